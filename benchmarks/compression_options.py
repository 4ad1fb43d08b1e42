"""The options of compression_accuracy.py."""

from __future__ import annotations

import argparse
from pathlib import Path

import timing
from compressors import METHODS
from cpnorm.lab.data import pretrained

SHARES = (0.5, 0.33, 0.2, 0.1, 0.05, 0.03, 0.02)
PUBLISHED = {name.removesuffix("-cifar10"): name for name in pretrained.NETWORKS}
BATCH = dict.fromkeys(PUBLISHED, 256) | {"resnet18": 512, "vgg16": 512}  # images a step of fine-tuning


def arguments(description: str | None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = timing.parser(description, rounds=1)
    add = parser.add_argument
    add("network", nargs="?", choices=list(BATCH), default="resnet20")
    add("--data", choices=["cifar10", "svhn"], default="cifar10")
    add("--data-dir", type=Path, help="official files; else $CPNORM_DATA")
    add("--weights", type=Path, help="published weights in a local file")
    add("--out", type=Path, help="records; else results/networks/NETWORK-DATA.jsonl")
    add("--work", type=Path, default=Path("runs/networks"), help="where networks are kept between commands")
    add("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    add("--shares", nargs="*", type=float, default=list(SHARES), help="of the dense network's parameters")
    add("--finetune", nargs="*", type=float, default=[], help="shares at which networks are fine-tuned")
    add("--finetune-methods", nargs="*", choices=list(METHODS), default=[], help="else all of --methods")
    add("--distill", nargs="*", type=float, default=[], help="shares at which cpnorm's networks are distilled")
    add("--distill-steps", type=int, default=512, help="of 64 images, without labels")
    add("--distill-images", type=int, default=8192, help="training images that these steps see")
    add("--control", action="store_true", help="give the dense network the same fine-tuning")
    add("--seeds", nargs="*", type=int, default=[0], help="of the fine-tuning")
    add("--network-seed", type=int, default=0, help="of the dense network's training")
    add("--epochs", type=float, default=20, help="of fine-tuning")
    add("--dense-epochs", type=int, default=60, help="of training a dense network")
    add("--train", action="store_true", help="train the dense network here, though there are published weights")
    add("--teacher", nargs="+", help="learn from the mean of these instead: published, or trained before in --work")
    add("--label", default="default", help="a name for these fine-tuning settings, to compare several")
    add("--lr", type=float)
    add("--batch-size", type=int)
    add("--optimizer", choices=["sgd", "adamw"])
    add("--form", choices=["canonical", "plain"], default="canonical", help="that cpnorm's networks are fine-tuned in")
    add("--distillation", type=float)
    add("--temperature", type=float)
    add("--averaging", type=float)
    add("--warmup", type=float)
    add("--augment", choices=["crop", "crop-flip", "crop-flip-cutout", "none"])
    add("--weight-decay", type=float)
    add("--precision", choices=["bf16", "fp32"], help="of fine-tuning; else bf16 on a GPU, fp32 elsewhere")
    add("--test-every", type=int, default=5, help="epochs between two tests while fine-tuning")
    add("--calibration", type=int, default=1024, help="training images that the methods may look at")
    add("--copies", type=int, default=1, help="of each of these images, augmented anew")
    add("--train-images", type=int, help="only the first of them")
    add("--test-images", type=int, help="only the first of them")
    add("--validation", type=int, default=0, help="the last training images are the test set: for choices of settings")
    add("--finetune-images", type=int, help="fine-tune on the first training images only")
    add("--width", type=float, default=1.0, help="of ResNet-18 and VGG-16")
    add("--time-limit", type=float, help="seconds after which nothing new is begun")
    add("--smoke", action="store_true", help="everything once, on few images and narrow networks: does it run?")
    add("--plot", nargs="*", type=Path, help="only make the tables and the figure of these records")
    add("--figure", type=Path, default=Path("docs/assets/compression_accuracy.png"))
    add("--page", type=Path, help="with --plot: the page to put the tables into, docs/cuts.md")
    args = parser.parse_args()
    if args.smoke:
        args.train_images, args.test_images, args.calibration = 256, 200, 64
        args.width, args.epochs, args.dense_epochs = 0.125, 1, 1
        args.shares, args.finetune, args.distill = [0.5], args.finetune and [0.5], args.distill and [0.5]
        args.distill_steps = 2
    args.precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    args.out = args.out or Path("results/networks") / f"{args.network}-{args.data}.jsonl"
    return args
