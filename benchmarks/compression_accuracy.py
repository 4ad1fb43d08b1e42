"""Claim: cpnorm compresses trained networks further than its peers at the same accuracy, without training and after it.

Same network, same budget of parameters, same calibration images (the first 1,024 of the training set, augmented), and
the same fine-tuning for every method. Accuracies are of the whole test set and of the last epoch; nothing is chosen by
them.

    python benchmarks/compression_accuracy.py resnet56 --shares 0.5 0.33                 # published weights
    python benchmarks/compression_accuracy.py resnet18 --device cuda --finetune 0.05     # trained here first
    python benchmarks/compression_accuracy.py resnet20 --methods cpnorm --shares 0.1 --distill 0.1   # without labels
    python benchmarks/compression_accuracy.py --plot results/networks/*.jsonl            # tables and the Pareto figure

Records are lines of JSON, written as soon as they are known; what a file has already is not measured again. Networks
and their compressed forms are kept in ``--work``, so that an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import compression_figure
import cpnorm
import timing
from compression_networks import Mean, Renormalized, divergence, flops, read_shards, write_shards
from compression_options import BATCH, PUBLISHED, arguments
from compressors import METHODS
from cpnorm.lab.data import pretrained
from cpnorm.lab.data.images import ImageSet, load
from cpnorm.lab.report.networks import USUAL_IMAGES
from cpnorm.lab.training.evaluation import accuracy, calibration_batches
from cpnorm.lab.training.finetune import Recipe, finetune
from cpnorm.lab.training.forward import use_arithmetic
from cpnorm.lab.training.models import build
from cpnorm.lab.training.networks import load_pretrained
from cpnorm.lab.training.recipes import dense_recipe
from cpnorm.lab.training.trainer import Options, Trainer
from small_layers import parameters

DISTILLED = "distilled"  # the label of networks that were trained without labels
HELD_OUT = 1024  # training images that decide whether batch-norm statistics are estimated anew


def main() -> None:
    args = arguments(__doc__)
    if args.plot:
        compression_figure.show(args.plot, args.figure, args.page)
        return
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = args.device == "cuda"  # the same few shapes come thousands of times
    run = Run(args)
    run.dense_network()
    for method in args.methods:
        for share in args.shares:
            run.compress(method, share)
    if args.control:
        run.finetune("dense", 1.0, run.network)
    compression_figure.print_table([args.out])


class Run:
    """One network on one data set: its data, the records so far, and what is still to be measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started = args, time.monotonic()
        self.device = torch.device(args.device)
        self.split = f"-{args.validation}" if args.validation else ""  # in names of files
        self.published = args.network in PUBLISHED and not args.train
        self.records = list(compression_figure.read([args.out])) if args.out.exists() else []
        self.data = self._data()
        mode = "crop-flip" if args.data == "cifar10" else "crop"
        self.calibration = calibration_batches(self.data, args.calibration, mode=mode, copies=args.copies)
        images, labels = self.data.train_images[-HELD_OUT:], self.data.train_labels[-HELD_OUT:]
        self.held_out = dataclasses.replace(self.data, test_images=images, test_labels=labels)
        self.network = nn.Module()

    def _data(self) -> ImageSet:
        args, data = self.args, load(self.args.data, self.args.data_dir)
        if self.published:
            about = pretrained.NETWORKS[PUBLISHED[args.network]]
            data = dataclasses.replace(data, mean=about.mean, std=about.std)
        self._normalized = data.mean, data.std
        if args.validation:  # the test set stays unread
            images, labels = data.train_images, data.train_labels
            kept = len(labels) - args.validation
            data = dataclasses.replace(data, train_images=images[:kept], train_labels=labels[:kept])
            data = dataclasses.replace(data, test_images=images[kept:], test_labels=labels[kept:])
        train, test = args.train_images, args.test_images
        return dataclasses.replace(
            data,
            train_images=data.train_images[:train],
            train_labels=data.train_labels[:train],
            test_images=data.test_images[:test],
            test_labels=data.test_labels[:test],
        ).to(self.device)

    # --- the dense network ---

    def dense_network(self) -> None:
        """Load the network from published weights or from an earlier command, or train it."""
        args, trained = self.args, None
        file = args.work / f"{args.network}-{args.data}-{args.network_seed}{self.split}"
        if self.published:
            self.network = load_pretrained(PUBLISHED[args.network], args.data_dir, file=args.weights)
        else:
            self.network = build(args.network, 3, 10, 32, args.width)
            if not list(args.work.glob(f"{file.name}.*.safetensors")):
                trained = self._train(file)
            self.network.load_state_dict(read_shards(file))
        self.teacher = Mean([self._teacher(name) for name in args.teacher]) if args.teacher else None
        self.network = self.network.to(self.device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        use_arithmetic("fp32")  # whatever the training has used
        self.accuracy = accuracy(self.network, self.data)
        self.parameters = parameters(self.network)
        self.flops = flops(self.network, self.calibration[0][0][:1])
        if self._missing("dense", 1.0, None):
            self._write({"method": "dense", "share": 1.0, "accuracy": self.accuracy, "training": trained}, self.network)

    def _teacher(self, name: str) -> nn.Module:
        """Return a network that others learn from, on images that are normalised as this network's are."""
        args = self.args
        plain = load(args.data, args.data_dir)
        if name in PUBLISHED:
            about = pretrained.NETWORKS[PUBLISHED[name]]
            teacher: nn.Module = load_pretrained(PUBLISHED[name], args.data_dir)
            its = (about.mean, about.std)
        else:
            teacher, its = build(name, 3, 10, 32, args.width), (plain.mean, plain.std)
            teacher.load_state_dict(read_shards(args.work / f"{name}-{args.data}-{args.network_seed}{self.split}"))
        given, wanted = ([torch.tensor(each).reshape(-1, 1, 1) for each in both] for both in (self._normalized, its))
        return Renormalized(teacher, given[1] / wanted[1], (given[0] - wanted[0]) / wanted[1]).to(self.device).eval()

    def _train(self, file: Path) -> dict[str, Any]:
        args = self.args
        config = dense_recipe(args.network, args.data, epochs=args.dense_epochs, seed=args.network_seed)
        config = config.replace(width=args.width, batch_size=min(512, len(self.data.train_labels) // 4))
        trainer = Trainer(config, self.data, Options(device=args.device))
        with trainer.step.stream():
            for epoch_done in trainer.run():
                if epoch_done:
                    line = trainer.history[-1]
                    print(f"epoch {line['epoch']}: loss {line['loss']:.4f}, test {line['test_accuracy']:.2f} %, "
                          f"{line['seconds']:.1f} s", flush=True)  # fmt: skip
        self._synchronize()  # with the stream of the steps
        write_shards(trainer.model, file)
        record = trainer.record()
        return {key: record[key] for key in ("config", "seconds", "precision", "curve") if key in record}

    # --- compressing ---

    def compress(self, method: str, share: float) -> None:
        """Compress to a share of the parameters and record it; fine-tune where asked to."""
        args = self.args
        tunes = method in (args.finetune_methods or args.methods) and share in args.finetune
        distils = method.startswith("cpnorm") and share in args.distill
        labels = [args.label] * tunes + [DISTILLED] * distils
        wanted = {label: [s for s in args.seeds if self._missing(method, share, s, label)] for label in labels}
        if not any(wanted.values()) and not self._missing(method, share, None):
            return
        if self._out_of_time(f"{method} at {share:g}"):
            return
        images = "" if args.calibration == USUAL_IMAGES else f"-{args.calibration}"
        stem = f"{args.network}-{args.data}-{args.network_seed}{self.split}-{method}-{share:g}{images}"
        cache = args.work / f"{stem}.pt"
        try:
            if cache.exists() and not self._missing(method, share, None):
                model = torch.load(cache, map_location=self.device, weights_only=False)
            else:
                model = self._compressed(method, share, cache)
        except (ImportError, ValueError, RuntimeError, torch.linalg.LinAlgError) as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"[:500]
            self._write({"method": method, "share": share, "accuracy": None, "failed": reason}, None)
            return
        if wanted.get(DISTILLED):
            self.distill(method, share, model)
        if wanted.get(args.label):
            self.finetune(method, share, model)

    def _compressed(self, method: str, share: float, cache: Path) -> nn.Module:
        self._synchronize()
        started = time.perf_counter()
        model = METHODS[method](self.network, int(share * self.parameters), self.calibration).eval()
        self._synchronize()
        seconds = round(time.perf_counter() - started, 3)
        refreshed = copy.deepcopy(model)
        cpnorm.reestimate_batch_norm(refreshed, self.calibration)
        held_out = [accuracy(each, self.held_out) for each in (model, refreshed)]
        tested = [accuracy(each, self.data) for each in (model, refreshed)]
        if held_out[1] > held_out[0]:
            model = refreshed
        cache.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model, cache)
        found = {
            "accuracy": tested[held_out[1] > held_out[0]],  # the better one on training images that were not looked at
            "accuracy_as_cut": tested[0],
            "accuracy_fresh_statistics": tested[1],  # of batch norm, from the calibration images
            "held_out_accuracies": held_out,
            "divergence": divergence(model, self.network, self.data),
            "seconds": seconds,
            "ranks": {name: layer.rank for name, layer in cpnorm.canonical_layers(model).items()},
        }
        self._write({"method": method, "share": share, **found}, model)
        return model

    # --- training what was compressed ---

    def distill(self, method: str, share: float, model: nn.Module) -> None:
        """Train copies of a network towards the dense one's outputs, without labels, and record them."""
        args = self.args
        mode = "crop-flip" if args.data == "cifar10" else "crop"
        passes = math.ceil(64 * args.distill_steps / args.distill_images)
        batches = calibration_batches(self.data, args.distill_images, mode=mode, copies=passes)
        for seed in args.seeds:
            if not self._missing(method, share, seed, DISTILLED):
                continue
            started, images = time.perf_counter(), min(args.distill_images, len(self.data.train_labels))
            twin = cpnorm.distill(copy.deepcopy(model), self.network, batches, steps=args.distill_steps, seed=seed)
            self._synchronize()
            how = {"label": DISTILLED, "steps": args.distill_steps, "images": images, "labels": False}
            found = {"finetuning": how, "seconds": round(time.perf_counter() - started, 2)}
            found |= {"accuracy": accuracy(twin, self.data), "divergence": divergence(twin, self.network, self.data)}
            self._write({"method": method, "share": share, "seed": seed, **found}, twin)

    def finetune(self, method: str, share: float, model: nn.Module) -> None:
        """Fine-tune copies of a network, one for each seed, and record them."""
        for seed in self.args.seeds:
            if not self._missing(method, share, seed) or self._out_of_time(f"{method} at {share:g}, seed {seed}"):
                continue
            twin, recipe = copy.deepcopy(model), self._recipe(seed)
            if self.args.form == "plain" and cpnorm.canonical_layers(twin):
                image = self.calibration[0][0][:1]
                twin = cpnorm.factorize(twin.train(), image, goal="parameters", measure=False)  # with its batch norms
            started = time.perf_counter()
            data, count = self.data, self.args.finetune_images
            if count:
                images, labels = data.train_images[:count], data.train_labels[:count]
                data = dataclasses.replace(data, train_images=images, train_labels=labels)
            history = finetune(
                twin,
                data,
                recipe,
                teacher=self.teacher or self.network,
                test_every=self.args.test_every,
                on_epoch=lambda line: print(json.dumps(line), flush=True),
            )
            seconds = time.perf_counter() - started
            self._write(
                {
                    "method": method,
                    "share": share,
                    "seed": seed,
                    "accuracy": history[-1]["test_accuracy"],
                    "finetuning": {
                        **recipe.to_json(),
                        "teacher": "+".join(self.args.teacher or ["dense"]),
                        "images": len(data.train_labels),
                        "form": self.args.form,
                        "label": self.args.label,
                    },
                    "curve": {key: [line.get(key) for line in history] for key in ("loss", "test_accuracy")},
                    "seconds": round(seconds, 2),
                },
                twin,
            )

    def _recipe(self, seed: int) -> Recipe:
        args = self.args
        settings: dict[str, Any] = {"batch_size": BATCH[args.network]}
        given = ("lr", "batch_size", "optimizer", "distillation", "temperature", "averaging", "warmup", "augment")
        given = (*given, "weight_decay")
        if args.data == "svhn":
            settings["augment"] = "crop"
        settings |= {name: getattr(args, name) for name in given if getattr(args, name) is not None}
        images = args.finetune_images or len(self.data.train_labels)
        settings["batch_size"] = min(settings["batch_size"], images)
        return Recipe(epochs=args.epochs, precision=args.precision, seed=seed, **settings)

    # --- records ---

    def _missing(self, method: str, share: float, seed: int | None, label: str | None = None) -> bool:
        wanted: dict[str, Any] = {**self._about(), "method": method, "share": share}
        if seed is not None:
            wanted |= {"seed": seed, "finetuning": {"label": label or self.args.label}}
        return compression_figure.key(wanted) not in {compression_figure.key(record) for record in self.records}

    def _about(self) -> dict[str, Any]:
        """Return what all records of this command have in common, and which measurement they are."""
        args = self.args
        return {
            "network": args.network,
            "data": args.data,
            "network_seed": args.network_seed,
            "dense_accuracy": self.accuracy,
            "calibration_images": args.calibration,
            "smoke": args.smoke,
        }

    def _out_of_time(self, what: str) -> bool:
        late = self.args.time_limit is not None and time.monotonic() - self.started > self.args.time_limit
        if late:
            print(f"out of time before {what}", flush=True)
        return late

    def _write(self, found: Mapping[str, Any], model: nn.Module | None) -> None:
        args = self.args
        record: dict[str, Any] = {
            "benchmark": "compression_accuracy",
            **self._about(),
            **found,
            "parameters": model and parameters(model),
            "dense_parameters": self.parameters,
            "flops": model and flops(model, self.calibration[0][0][:1]),
            "dense_flops": self.flops,
            "calibration_copies": args.copies,
            "data_sha256": self.data.sha256,
            "train_images": len(self.data.train_labels),
            "test_images": len(self.data.test_labels),
            "validation": args.validation,
            "width": args.width,
            "command": timing.command("compression_accuracy"),
            "date": time.strftime("%Y-%m-%d"),
            "commit": timing._commit(),
            "machine": timing.machine(),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(timing._rounded(record)) + "\n")
        self.records.append(record)
        print(compression_figure.line(record), flush=True)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
