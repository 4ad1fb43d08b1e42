"""The model and data that ``shrink`` works on, and measurements of models: metric, time, FLOPs and outputs."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cpnorm.compress.calibration_data import Batch, Metric, accuracy, batch_size, relative_error, tensors_of
from cpnorm.compress.fitting.calibration import Calibrated, calibrate
from cpnorm.compress.shrinking.report import ShrinkReport, ShrunkLayer
from cpnorm.compress.truncation_job import Progress
from cpnorm.deploy.factorization import Factorization
from cpnorm.deploy.timing import fastest
from cpnorm.nn.canonical import count_parameters
from cpnorm.nn.convert import canonical_layers
from cpnorm.nn.coverage import DenseLayer, own_parameters
from cpnorm.nn.running import evaluating, run, to_device_of, without_attention_fast_path

ROUNDING = 1e-3  # error relative to the outputs' norm that single precision may cause in deep networks
EXACT = 1e-6  # the same in double precision
SINGLE = torch.finfo(torch.float32).eps
ROUNDED = 16  # times the precision of parameters of half precision: they are rounded before and after factorising
VALUES_COMPARED = 2**26  # outputs that are enough for their error: a language model has 49,152 for each token


@dataclass
class ShrinkJob:
    """The model to shrink, with its data and the options that all steps need."""

    model: nn.Module
    batches: list[Batch]
    example: Any
    metric: Metric | None
    progress: Progress
    round_ranks: int = 1  # ranks are multiples of this
    limit: int | None = None  # parameters that the result may have
    stacked: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names of layers that are decomposed together
    exact: nn.Module = field(default_factory=nn.Module)  # a copy of the model in exact canonical form
    dense: dict[str, str] = field(default_factory=dict)  # the reasons why layers stay dense, by name

    @cached_property
    def calibrated(self) -> Calibrated:
        """The exact form, measured on the data."""
        return calibrate(self.exact, self.batches, progress=self.progress)

    @cached_property
    def flops(self) -> int:
        """FLOPs of the model on the example input."""
        return flops_of(self.model, self.example)

    @property
    def samples(self) -> int:
        return sum(batch_size(inputs) for inputs, _ in self.batches)

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def report_progress(self, what: str, name: str, done: int, total: int) -> None:
        self.progress(f"{what}: {name}" if name else what, done, total)

    def verify(self, small: nn.Module, cut: nn.Module) -> float:
        """Return the relative difference of the outputs of both models; raise if it is more than rounding."""
        inputs, _ = self.batches[0]
        precision = max((torch.finfo(p.dtype).eps for p in small.parameters() if p.is_floating_point()), default=0.0)
        exact = ROUNDED * precision if precision > SINGLE else EXACT
        with torch.no_grad(), evaluating(cut), evaluating(small):
            error = relative_error([(run(small, inputs), run(cut, inputs))])
            if error <= ROUNDING:
                return error
            wide = [copy.deepcopy(each).double() for each in (small, cut)]
            try:
                in_double = relative_error([(run(wide[0], _double(inputs)), run(wide[1], _double(inputs)))])
            except RuntimeError:  # some kernels of torch support single precision only
                in_double = error
        if in_double > exact:
            raise RuntimeError(
                f"the outputs of the factorised model differ from the canonical one's by {error:.2g}, and by "
                f"{in_double:.2g} in double precision; please report this network"
            )
        return error

    def check_repeatable(self) -> None:
        """Raise if the model's outputs are random: no cut could be fitted to them."""
        with evaluating(self.model):
            outputs = [run_without_gradients(self.model, self.example) for _ in range(2)]
        if (error := relative_error([(outputs[0], outputs[1])])) > ROUNDING:
            raise ValueError(
                f"model: its outputs for one input differ by {100 * error:.2g} % from call to call, so that nothing "
                "can be fitted to them: make it draw no random numbers in eval mode"
            )

    def score(self, model: nn.Module) -> float:
        """Return the mean of the metric over all batches, weighted by their sizes."""
        metric, total, count = self.metric or accuracy, 0.0, 0
        with torch.no_grad(), evaluating(model):
            for inputs, targets in self.batches:
                size = batch_size(inputs)
                total += float(metric(run(model, inputs), to_device_of(model, targets))) * size
                count += size
        return total / count

    def milliseconds(self, *models: nn.Module) -> Any:
        """Return the milliseconds of one pass over the example input, for each model; several are timed in turns."""
        runs = {n: partial(run_without_gradients, model, self.example) for n, model in enumerate(models)}
        with evaluating(self.model):
            seconds = fastest(runs, self.device, drop_slow=False)  # the fastest first
        taken = [1e3 * seconds[n] for n in runs]
        return taken[0] if len(taken) == 1 else taken

    def dense_layers(self, small: nn.Module) -> tuple[DenseLayer, ...]:
        """Return the layers that stay dense, with their sizes in this model and the reasons."""
        modules = dict(small.named_modules())
        sizes = {name: sum(p.numel() for p in own_parameters(modules[name]).values()) for name in self.dense}
        return tuple(DenseLayer(name, sizes[name], reason) for name, reason in self.dense.items())

    def report(
        self,
        budget: str,
        small: nn.Module,
        choice: Factorization,
        verified: float,
        steps: list[str],
        started: float,
    ) -> ShrinkReport:
        """Compare the small model with the given one."""
        error, compared, scores = self._compared(small)
        before, after = self.milliseconds(self.model, small)
        layers = []
        for name, canonical in canonical_layers(self.exact).items():
            kind, shape = canonical.plain.__name__, canonical.modes
            form, members = choice.layers.get(name), self.stacked.get(name, (name,))
            module = nn.ModuleList(small.get_submodule(member) for member in members)  # shared parameters count once
            biases = sum(p.numel() for key, p in module.named_parameters() if key.endswith("bias"))
            terms, called = (form.rank, form.form) if form is not None else (0, "dense")
            title = ", ".join([members[0], *(member.rpartition(".")[2] for member in members[1:])])
            layers.append(
                ShrunkLayer(title, kind, shape, terms, called, math.prod(shape) + biases, count_parameters(module))
            )
        return ShrinkReport(
            network=type(self.model).__name__,
            budget=budget,
            device=_device_name(self.device),
            samples=self.samples,
            steps=tuple(steps),
            parameters_before=count_parameters(self.model),
            parameters_after=count_parameters(small),
            flops_before=self.flops,
            flops_after=flops_of(small, self.example),
            milliseconds_before=before,
            milliseconds_after=after,
            output_error=error,
            samples_compared=compared,
            metric=None if scores is None else getattr(self.metric or accuracy, "__name__", "metric"),
            metric_before=scores and scores[0],
            metric_after=scores and scores[1],
            verification_error=verified,
            layers=tuple(layers),
            dense=self.dense_layers(small),
            seconds=time.perf_counter() - started,
        )

    @torch.no_grad()
    def _compared(self, small: nn.Module) -> tuple[float, int, tuple[float, float] | None]:
        """Return the error of the outputs on how many samples, and the metric of both models if there are targets."""
        totals: list[float] | None = [0.0, 0.0]
        values = samples = 0

        def pairs() -> Iterator[tuple[Any, Any]]:
            nonlocal totals, values, samples
            for inputs, targets in self.batches:
                if totals is None and values >= VALUES_COMPARED:
                    break
                outputs = run(self.model, inputs), run(small, inputs)
                values, samples = values + sum(y.numel() for y in tensors_of(outputs[0])), samples + batch_size(inputs)
                self.progress("comparing with the given network", samples, self.samples)
                if totals is not None:
                    wanted, size = to_device_of(self.model, targets), batch_size(inputs) / self.samples
                    try:
                        found = [size * float((self.metric or accuracy)(y, wanted)) for y in outputs]
                        totals = [total + part for total, part in zip(totals, found, strict=True)]
                    except ValueError:  # the targets are not class indices
                        if self.metric is not None:
                            raise
                        totals = None
                yield outputs[1], outputs[0]

        # The fast path fills hidden positions with zeros; the fit has what torch computes without it.
        with without_attention_fast_path(), evaluating(self.model), evaluating(small):
            error = relative_error(pairs())
        return error, samples, None if totals is None else (totals[0], totals[1])


def _grouped_flops(tokens: Sequence[int], experts: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(tokens) * experts[-1]  # (tokens, K) or (groups, tokens, K), times (groups, K, N)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


# Kernels whose FLOPs torch does not count, and how many they take by the shapes of their arguments.
UNKNOWN_TO_TORCH = {
    "_grouped_mm": _grouped_flops,
    "_scaled_dot_product_flash_attention_for_cpu": _attention_flops,
}


def flops_of(model: nn.Module, example: Any) -> int:
    """Return the FLOPs of all matrix products and convolutions in one pass."""
    kernels = {getattr(torch.ops.aten, name): flops for name, flops in UNKNOWN_TO_TORCH.items()}
    counter = FlopCounterMode(display=False, custom_mapping=kernels)  # does not know attention's fast path either
    with without_attention_fast_path(), torch.no_grad(), evaluating(model), counter:
        run(model, example)
    return int(counter.get_total_flops())


@torch.no_grad()
def run_without_gradients(model: nn.Module, example: Any) -> Any:
    """Return what the model computes from the example input."""
    return run(model, example)


def _double(inputs: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
