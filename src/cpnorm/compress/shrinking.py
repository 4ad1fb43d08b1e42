"""One call from a trained network to a small one of plain layers, with a report."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cpnorm._checks import check_model, is_number
from cpnorm.compress.calibration_data import accuracy, as_batches, batch_size, first_sample, relative_error
from cpnorm.compress.probe import Batch
from cpnorm.compress.shrink_report import ShrinkReport, ShrunkLayer
from cpnorm.compress.truncation import truncate
from cpnorm.deploy.factorization import Factorization, choose_forms
from cpnorm.deploy.timing import fastest
from cpnorm.nn.canonical import count_parameters
from cpnorm.nn.convert import Skip, canonical_layers, canonical_norm, fold, skipped
from cpnorm.nn.coverage import DenseLayer, dense_reasons, unpack_layers
from cpnorm.nn.modes import flatten_modes
from cpnorm.nn.planner import LAYERS
from cpnorm.nn.running import evaluating, run, to_device_of
from cpnorm.nn.siblings import split_siblings, stack_siblings
from cpnorm.nn.training import renormalize
from cpnorm.nn.work import count_work

Metric = Callable[[Any, Any], Any]
Progress = Callable[[str, int, int], None]

PROBES = 7  # budgets tried for a bound on latency or accuracy
ATTEMPTS = 3  # cuts until the factorised model is within the budget
FOR_SPEED = 0.98  # of a budget of parameters is for terms, the rest for faster forms of convolutions
ROUNDING = 1e-3  # of the outputs' norm: single precision may amplify that much in deep networks
NEARLY = 1.05  # of the fewest parameters: a faster form of a layer may have this many
EXACT = 1e-6  # of the outputs' norm in double precision


@dataclass(frozen=True)
class Shrunk:
    """What ``shrink`` returns: the small model in plain torch layers, its canonical form, and a printable report."""

    model: nn.Module
    canonical: nn.Module
    report: ShrinkReport

    def __str__(self) -> str:
        return str(self.report)


def shrink(
    model: nn.Module,
    data: Any,
    *,
    parameters: float | None = None,
    flops: float | None = None,
    latency_ms: float | None = None,
    accuracy_drop: float | None = None,
    metric: Metric | None = None,
    finetune: Callable[[nn.Module], Any] | None = None,
    example_input: Any = None,
    samples: int = 512,
    skip: Skip = (),
    together: bool = True,
    progress: Progress | None = None,
) -> Shrunk:
    """Make a small model of plain torch layers from a trained one, under exactly one budget; the given one stays.

    A copy takes canonical form, is cut to the budget where that changes its outputs on the data least, fitted to the
    old outputs, fine-tuned if asked for, and factorised; its outputs are compared with those before.

    Args:
        model: a trained network of any making; what of it stays dense, and why, is in the report.
        data: a few hundred typical inputs: a DataLoader of inputs or (inputs, targets), a tensor, or batches as
            tensors, tuples or mappings of keyword arguments. Targets are only looked at by ``metric``.
        parameters: how many the result may have: a share of the given model's (0.1), or a number.
        flops: what one pass over the example input may cost: a share, or a number.
        latency_ms: milliseconds one pass over the example input may take, measured on the model's device.
        accuracy_drop: how far the metric may fall on the data, such as 0.01; the smallest model found by bisection.
        metric: of (outputs, targets) of a batch, where more is better; the share of right answers if the targets are
            class indices.
        finetune: trains the canonical model that it is given, in place, by the user's own loop.
        example_input: what FLOPs and milliseconds are counted for; the first sample of the data if None.
        samples: how many samples of the data to use at most.
        skip: layers to leave alone: names, patterns such as "features.*", or types.
        together: let linear layers with the same input, such as query, key and value, share their input vectors, where
            the budget is one of parameters or accuracy: fewer parameters for the same outputs, more arithmetic.
        progress: called with (what is being done, steps done, steps in all).

    >>> network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    >>> small = shrink(network, torch.randn(256, 64), parameters=0.5)
    >>> small.report.parameters_before, small.report.parameters_after <= 4810 // 2
    (4810, True)
    """
    check_model(model)
    started = time.perf_counter()
    budget, amount = _only_budget(
        parameters=parameters, flops=flops, latency_ms=latency_ms, accuracy_drop=accuracy_drop
    )
    batches = as_batches(data, samples)
    example = first_sample(model, batches[0][0]) if example_input is None else example_input
    tell = progress or (lambda what, done, total: None)
    job = _Job(model, batches, example, metric, tell)
    exact, dense = job.canonical_form(skip, together=together and budget in ("parameters", "accuracy_drop"))
    shapes = {name: (layer.plain.__name__, layer.modes) for name, layer in canonical_layers(exact).items()}
    steps = ["exact canonical form"]
    cut = job.within(budget, amount, exact)
    steps.append(f"cut and fitted to the outputs on {job.samples:,} samples")
    if finetune is not None:
        tell("fine-tuning", 0, 1)
        returned = finetune(cut.train())
        cut = returned if isinstance(returned, nn.Module) else cut
        renormalize(cut)
        steps.append("fine-tuned")
    cut.eval()
    tell("factorising", 0, 1)
    choice = job.forms(cut, budget)
    small = job.plain(choice, cut)
    verified = job.verify(small, cut)
    steps.append("factorised into plain layers, outputs verified")
    tell("measuring", 0, 1)
    report = job.report(f"{budget}={amount:g}", small, shapes, choice, dense, verified, steps, started)
    tell("done", 1, 1)
    return Shrunk(small, cut, report)


def _only_budget(**offered: Any) -> tuple[str, float]:
    given = {name: amount for name, amount in offered.items() if amount is not None}
    if len(given) != 1:
        raise ValueError(f"expected exactly one budget of {', '.join(offered)}, got {', '.join(given) or 'none'}")
    ((name, amount),) = given.items()
    least = 0 if name == "accuracy_drop" else math.ulp(0.0)
    if not is_number(amount) or amount < least:
        raise ValueError(f"{name}: expected a number > 0, got {amount!r}")
    return name, float(amount)


@dataclass
class _Job:
    """The given model and its data, and the steps from it to a small one."""

    model: nn.Module
    batches: list[Batch]
    example: Any
    metric: Metric | None
    tell: Progress
    limit: int | None = None  # parameters of the result
    stacked: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names of layers that are decomposed together

    @property
    def samples(self) -> int:
        return sum(batch_size(inputs) for inputs, _ in self.batches)

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def canonical_form(self, skip: Skip, together: bool) -> tuple[nn.Module, dict[str, str]]:
        """Return the model's copy at exact ranks, and why layers stay dense, by name."""
        twin = copy.deepcopy(self.model).eval()
        reasons: dict[str, str] = {}
        if not canonical_layers(twin):
            unpack_layers(twin, self.example)
            twin = self._with_siblings(twin, skip) if together else twin
            reasons = dense_reasons(twin, skip)
            try:
                modes = {n: m for n, m in flatten_modes(twin, self.example).items() if n not in reasons}
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "leave")
                    inside = [name for name in reasons if isinstance(twin.get_submodule(name), LAYERS)]
                    canonical_norm(twin, skip=inside, modes=modes, progress=partial(self._told, "canonical form"))
            except ValueError as error:
                raise ValueError(f"{error}; dense are: {reasons}" if reasons else str(error)) from error
        # Layers whose weights other code reads cannot become several: cutting them would gain nothing.
        for name, form in choose_forms(twin, self.example, measure=False, goal="parameters").layers.items():
            if form.form == "dense" and form.reason != "fewest parameters":
                fold(twin.get_submodule(name))
                reasons[name] = form.reason
        if not canonical_layers(twin):
            raise ValueError(f"no layer of {type(self.model).__name__} can be cut: {reasons}")
        return twin, reasons

    def _with_siblings(self, twin: nn.Module, skip: Skip) -> nn.Module:
        stacked = copy.deepcopy(twin)
        found = stack_siblings(stacked, self.example, sorted(skipped(twin, skip) if skip else ()))
        try:
            _run(stacked, self.example)
        except AttributeError:  # other code reads the weights of such layers
            return twin
        self.stacked.update(found)
        return stacked

    def plain(self, choice: Factorization, cut: nn.Module) -> nn.Module:
        """Return the small model in these forms."""
        small = choice.apply(cut).eval()
        split_siblings(small)
        return small

    def _told(self, what: str, name: str, done: int, total: int) -> None:
        self.tell(f"{what}: {name}" if name else what, done, total)

    # --- cutting --------------------------------------------------------------------------------------------------

    def within(self, budget: str, amount: float, exact: nn.Module) -> nn.Module:
        """Return the canonical model cut so that what becomes of it is within the budget."""
        if budget == "accuracy_drop":
            return self._by_accuracy(amount, exact)
        if budget == "latency_ms":
            return self._by_latency(amount, exact)
        before = count_parameters(self.model) if budget == "parameters" else flops_of(self.model, self.example)
        limit = int(amount * before) if amount < 1 else int(amount)
        if limit >= before:
            raise ValueError(f"{budget}: expected less than the model's {before:,}, got {amount:g}")
        least = self._least_parameters(exact)
        if budget == "parameters" and limit < least:
            raise ValueError(
                f"parameters: expected at least {least:,} ({100 * least / before:.3g} % of {before:,}), which leave "
                f"one term in each of {len(canonical_layers(exact))} layers and all other parameters, got {amount:g}"
            )
        target, self.limit = limit, limit if budget == "parameters" else None
        if budget == "parameters" and any(len(layer.modes) > 3 for layer in canonical_layers(exact).values()):
            target = max(least, int(FOR_SPEED * limit))
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            twin = exact if last else copy.deepcopy(exact)
            self.cut(twin, budget, target)
            small = self.plain(self.forms(twin, budget), twin)
            got = count_parameters(small) if budget == "parameters" else flops_of(small, self.example)
            if got <= limit or last:
                break
            # Plain forms hold more than terms: a little more, or many times as much where a layer follows a flatten.
            less = target - math.ceil(1.02 * (got - limit))
            target = max(least, less if 2 * less > target else int(0.98 * target * limit / got))
        if got > limit:
            warnings.warn(f"the result has {got:,} {budget}, more than the {limit:,} asked for", stacklevel=4)
        return twin

    def cut(self, twin: nn.Module, budget: str, target: int, **changed: Any) -> None:
        """Truncate in place to a number of parameters or FLOPs."""
        options: dict[str, Any] = {"data": self.batches, "progress": partial(self._told, "cutting"), **changed}
        if budget == "parameters":
            truncate(twin, params=target, **options)
        else:
            counted = sum(work.dense for work in count_work(self.model, self.example).values())
            others = flops_of(self.model, self.example) - counted  # attention's products, which stay
            truncate(twin, flops=target - others, example_input=self.example, **options)

    def _by_accuracy(self, drop: float, exact: nn.Module) -> nn.Module:
        allowed = self.score(self.model) - drop
        whole, best, high = count_parameters(self.model), None, 1.0
        low = min(1.0, self._least_parameters(exact) / whole)
        for probe in range(PROBES):
            self.tell("bisecting", probe, PROBES)
            share = math.sqrt(low * high)
            twin = copy.deepcopy(exact)
            self.cut(twin, "parameters", math.ceil(share * whole))
            score = self.score(twin)
            if score >= allowed:
                best, high = twin, share
            else:
                low = share
        if best is None:
            raise ValueError(
                f"accuracy_drop: no cut keeps the metric at {allowed:.4g}; the mildest tried gives {score:.4g}"
            )
        return best

    def _by_latency(self, limit: float, exact: nn.Module) -> nn.Module:
        whole, low, high, share = flops_of(self.model, self.example), 0.0, 1.0, 0.0
        quickly = {"refit": "none", "data": self.batches[:1]}  # ranks are what matters for the time
        least = math.inf
        for probe in range(PROBES):
            self.tell("bisecting", probe, PROBES)
            middle, twin = (low + high) / 2, copy.deepcopy(exact)
            try:
                self.cut(twin, "flops", math.ceil(middle * whole), **quickly)
            except ValueError:  # fewer than one term in each layer
                low = middle
                continue
            taken = self.milliseconds(self.plain(self.forms(twin, "flops"), twin))
            least = min(least, taken)
            if taken <= limit:
                low = share = middle
            else:
                high = middle
        for slack in (1.0, 0.9, 0.8) if share else ():  # the clock is noisy
            twin = copy.deepcopy(exact)
            self.cut(twin, "flops", math.ceil(slack * share * whole))
            taken = self.milliseconds(self.plain(self.forms(twin, "latency_ms"), twin))
            least = min(least, taken)
            if taken <= limit:
                return twin
        raise ValueError(f"latency_ms: expected at least about {least:.3g} ms, the least that a cut reaches here")

    def _least_parameters(self, exact: nn.Module) -> int:
        layers = canonical_layers(exact).values()
        return count_parameters(exact) - sum((y.rank - 1) * (1 + sum(y.modes)) for y in layers)

    # --- factorising ----------------------------------------------------------------------------------------------

    def forms(self, cut: nn.Module, budget: str) -> Factorization:
        """Return the forms that suit the budget: the fewest parameters, the least arithmetic or the least time."""
        if budget == "latency_ms":
            return choose_forms(cut, self.example)
        choice = choose_forms(cut, self.example, measure=False, goal="parameters")
        picked = {name: layer.form for name, layer in choice.layers.items()}
        if budget == "flops":
            least = {n: min(y.costs, key=lambda form: y.costs[form].flops) for n, y in choice.layers.items()}
            return choose_forms(cut, self.example, measure=False, forms=least)
        spare = math.inf if self.limit is None else self.limit - count_parameters(choice.apply(cut))
        faster = []
        for name, layer in choice.layers.items():
            now = layer.costs[layer.form]
            nearly = {form: cost for form, cost in layer.costs.items() if cost.parameters <= NEARLY * now.parameters}
            best = min(nearly, key=lambda form: nearly[form].total)
            more, gain = nearly[best].parameters - now.parameters, now.total - nearly[best].total
            faster += [(gain / max(more, 1), more, name, best)] if gain > 0 else []
        for _, more, name, best in sorted(faster, reverse=True):
            if more <= spare:
                spare, picked[name] = spare - more, best
        return choose_forms(cut, self.example, measure=False, forms=picked) if faster else choice

    def verify(self, small: nn.Module, cut: nn.Module) -> float:
        """Return how far the outputs of both are apart; raise where it is more than rounding explains."""
        inputs, _ = self.batches[0]
        with torch.no_grad(), evaluating(cut), evaluating(small):
            error = relative_error([(run(small, inputs), run(cut, inputs))])
            if error <= ROUNDING:
                return error
            wide = [copy.deepcopy(each).double() for each in (small, cut)]
            try:
                in_double = relative_error([(run(wide[0], _double(inputs)), run(wide[1], _double(inputs)))])
            except RuntimeError:  # some of torch's kernels know single precision only
                in_double = error
        if in_double > EXACT:
            raise RuntimeError(
                f"the factorised model computes something else: its outputs are {error:.2g} away, and {in_double:.2g} "
                "in double precision; please report this network"
            )
        return error

    # --- measuring ------------------------------------------------------------------------------------------------

    def score(self, model: nn.Module) -> float:
        """Return the metric over all batches, each counted by its size."""
        metric, total, count = self.metric or accuracy, 0.0, 0
        with torch.no_grad(), evaluating(model):
            for inputs, targets in self.batches:
                size = batch_size(inputs)
                total += float(metric(run(model, inputs), to_device_of(model, targets))) * size
                count += size
        return total / count

    def milliseconds(self, *models: nn.Module) -> Any:
        """Return the time of one pass over the example of each model: of several in turns."""
        runs = {n: partial(_run, model, self.example) for n, model in enumerate(models)}
        with evaluating(self.model):
            taken = [1e3 * seconds for seconds in fastest(runs, self.device).values()]
        return taken[0] if len(taken) == 1 else taken

    def report(
        self,
        budget: str,
        small: nn.Module,
        shapes: dict[str, tuple[str, tuple[int, ...]]],
        choice: Factorization,
        dense: dict[str, str],
        verified: float,
        steps: list[str],
        started: float,
    ) -> ShrinkReport:
        """Compare the small model with the given one."""
        with torch.no_grad(), evaluating(self.model):
            error = relative_error((run(small, x), run(self.model, x)) for x, _ in self.batches)
        scores, metric = self._scores(small)
        before, after = self.milliseconds(self.model, small)
        layers = []
        for name, (kind, shape) in shapes.items():
            form, members = choice.layers.get(name), self.stacked.get(name, (name,))
            module = nn.ModuleList(small.get_submodule(member) for member in members)  # what they share counts once
            biases = sum(p.numel() for key, p in module.named_parameters() if key.endswith("bias"))
            terms, called = (form.rank, form.form) if form is not None else (0, "dense")
            title = ", ".join([members[0], *(member.rpartition(".")[2] for member in members[1:])])
            layers.append(
                ShrunkLayer(title, kind, shape, terms, called, math.prod(shape) + biases, count_parameters(module))
            )
        modules = dict(small.named_modules())
        sizes = {n: sum(p.numel() for p in modules[n]._parameters.values() if p is not None) for n in dense}
        return ShrinkReport(
            network=type(self.model).__name__,
            budget=budget,
            device=_device_name(self.device),
            samples=self.samples,
            steps=tuple(steps),
            parameters_before=count_parameters(self.model),
            parameters_after=count_parameters(small),
            flops_before=flops_of(self.model, self.example),
            flops_after=flops_of(small, self.example),
            milliseconds_before=before,
            milliseconds_after=after,
            output_error=error,
            metric=metric,
            metric_before=scores[0],
            metric_after=scores[1],
            verification_error=verified,
            layers=tuple(layers),
            dense=tuple(DenseLayer(name, sizes[name], reason) for name, reason in dense.items()),
            seconds=time.perf_counter() - started,
        )

    def _scores(self, small: nn.Module) -> tuple[tuple[float | None, float | None], str | None]:
        if self.metric is None:
            try:
                return (self.score(self.model), self.score(small)), "accuracy"
            except ValueError:  # no class indices among the data
                return (None, None), None
        return (self.score(self.model), self.score(small)), getattr(self.metric, "__name__", "metric")


def flops_of(model: nn.Module, example: Any) -> int:
    """Return the FLOPs of all matrix products and convolutions of one pass."""
    counter = FlopCounterMode(display=False)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a kernel of its own, which is not counted
    try:
        with torch.no_grad(), evaluating(model), counter:
            run(model, example)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return int(counter.get_total_flops())


@torch.no_grad()
def _run(model: nn.Module, example: Any) -> Any:
    return run(model, example)


def _double(inputs: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
