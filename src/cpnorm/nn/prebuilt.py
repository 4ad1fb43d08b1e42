"""Build the weights of all canonical layers of a model together, once per forward pass, by one autograd node.

A weight depends on parameters alone, not on the input of its layer. So all weights of a network can be built before
its forward pass, and all gradients of sigma, lambda and the vectors be computed after its backward pass, each by one
program over the whole network. In between, the network runs exactly as a plain one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cpnorm.cp.tensor import khatri_rao, scaled_columns, split_modes
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.convert import canonical_layers, including_tied
from cpnorm.nn.layer_form import Prebuilt, compute_dtype
from cpnorm.nn.planner import weight_shape
from cpnorm.nn.prebuilt_op import build_weights, number_of

Terms = Sequence[Tensor]  # sigma (), lambdas (R,), factors (d_i, R)


class Program(Protocol):
    """Weights from terms, and gradients of the terms from those of the weights, for several layers at once."""

    def build(self) -> list[Tensor]:
        """Return the weight of every layer."""

    def gradients(self, d_weights: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the terms of all layers in one list; a layer without a gradient has Nones."""


class TorchProgram:
    """``Program`` in torch's operations, for layers of any kind with unit columns."""

    def __init__(self, layers: Sequence[CPLayer], dtype: torch.dtype) -> None:
        self.layers, self.dtype = layers, dtype
        self._sides: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def build(self) -> list[Tensor]:
        """Return the weight of every layer: one matrix product of two Khatri-Rao products each."""
        self._sides = []
        weights = []
        for layer in self.layers:
            modes = layer.modes
            left, right = split_modes(modes)
            scaled = [
                layer.factors[0] * (layer.sigma * layer.lambdas),
                *(layer.factors[m] for m in range(1, len(modes))),
            ]
            one, two = (khatri_rao([scaled[m] for m in side]).to(self.dtype) for side in (left, right))
            sides = one, two
            order = (*left, *right)
            product = (sides[0] @ sides[1].mT).reshape([modes[m] for m in order])
            dense = product.permute([order.index(m) for m in range(len(modes))]).reshape(weight_shape(layer))
            last = layer._form.channels_last and dense.ndim == 4
            weights.append(dense.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format))
            self._sides.append(sides)
        return weights

    def gradients(self, d_weights: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of sigma, lambda and the vectors."""
        found: list[Tensor | None] = []
        for layer, sides, d_weight in zip(self.layers, self._sides, d_weights, strict=True):
            if d_weight is None:
                found += [None] * (2 + len(layer.modes))
            else:
                found += _term_gradients(layer, sides, d_weight)
        return found


@torch.no_grad()
def _term_gradients(layer: CPLayer, sides: tuple[Tensor, Tensor], d_weight: Tensor) -> list[Tensor]:
    modes, factors = layer.modes, [f.detach() for f in layer.factors]
    split = split_modes(modes)
    matrix = d_weight.reshape(modes).permute((*split[0], *split[1])).reshape(len(sides[0]), len(sides[1]))
    d_sides = matrix @ sides[1], matrix.mT @ sides[0]
    scales = layer.sigma * layer.lambdas
    d_factors: dict[int, Tensor] = {}
    for side, d_side in zip(split, d_sides, strict=True):
        found = _factor_gradients(d_side.to(scales.dtype), [factors[m] for m in side])
        d_factors |= dict(zip(side, found, strict=True))
    # A term is linear in its scale and in each vector, so that <a, dL/da> is the same for all of them (UnitTerms).
    by_scale = (d_factors[0] * factors[0]).sum(0)
    radial = by_scale * scales
    left = set(split[0])
    d_terms = [
        torch.addcmul(d_factors[m] * scales if m in left else d_factors[m], f, radial, value=-1)
        for m, f in enumerate(factors)
    ]
    return [(by_scale * layer.lambdas).sum(), by_scale * layer.sigma, *d_terms]


def _factor_gradients(d_side: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:  # (d1 * d2 * ..., R), [(d_i, R)]
    """Return the gradients of the factors of an unscaled Khatri-Rao product."""
    first, *rest = factors
    if not rest:
        return [d_side]
    others = khatri_rao(rest)
    parts = d_side.reshape(len(first), len(others), -1)
    d_first, d_others = torch.zeros_like(first), torch.empty_like(others)
    for index, other in enumerate(others):  # a product of kernel lengths: few
        d_first.addcmul_(parts[:, index], other)
        torch.sum(parts[:, index] * first, 0, out=d_others[index])
    return [d_first, *_factor_gradients(d_others, rest)]


class _BuildWeights(torch.autograd.Function):
    """(terms of all layers) -> weights of all layers.

    Nothing is saved: a program holds what its gradients need as long as the parameters stay as they are, so that the
    node may run again, as it does once for each region of a reentrant activation checkpoint.
    """

    @staticmethod
    def forward(ctx: Any, owner: NetworkWeights, program: Program, *terms: Tensor) -> tuple[Tensor, ...]:
        ctx.owner, ctx.program, ctx.versions = owner, program, owner.versions
        ctx.set_materialize_grads(False)
        return tuple(weight.detach() for weight in owner.built(program))

    @staticmethod
    def backward(ctx: Any, *d_weights: Tensor | None) -> tuple[Any, ...]:
        if ctx.versions != ctx.owner.current_versions():
            raise RuntimeError(
                "canonical parameters were changed in place between the forward and the backward pass, which needs "
                "them as they were"
            )
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *_differentiable_gradients(ctx.owner.trained_layers(), d_weights)
        return None, None, *ctx.program.gradients(d_weights)


def _differentiable_gradients(layers: Sequence[CPLayer], d_weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return what ``Program.gradients`` does, as functions of the terms and of ``d_weights``, for a second backward."""
    found: list[Tensor | None] = []
    for layer, d_weight in zip(layers, d_weights, strict=True):
        terms = layer.canonical_parameters()
        if d_weight is None:
            found += [None] * len(terms)
        else:
            weight = layer.cp.to_dense().reshape(weight_shape(layer))
            found += torch.autograd.grad(weight, terms, d_weight.to(weight.dtype), create_graph=True)
    return found


class NetworkWeights:
    """Keep columns unit and have all weights of a model ready at each of its forward passes.

    It is a forward pre-hook of the model. Copies of the model do not take it over: their layers build their own
    weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.enabled = True  # False: columns are kept unit, and layers build their own weights
        self.versions: list[int] = []  # of the parameters when their columns were unit last
        self._layers = list(canonical_layers(model).values())
        tied = including_tied(model, canonical_layers(model)).values()
        self._tied = [[other for other in tied if tie_key(other) == tie_key(layer)] for layer in self._layers]
        self._places: list[tuple[dict[str, Any], str]] = []
        for layer in self._layers:
            self._places += [(layer._parameters, "sigma"), (layer._parameters, "lambdas")]
            self._places += [(layer.factors._parameters, str(mode)) for mode in range(len(layer.modes))]
        self._parameters = self._current()
        # FSDP's layers hold shards between their calls: they build their own weights, and divide by the norms.
        self._sharded = any(type(parameter).__name__ == "DTensor" for parameter in self._parameters)
        self._factors = [factor for layer in self._layers for factor in layer.factors]
        self._lambdas = [layer.lambdas for layer in self._layers for _ in layer.factors]
        self._terms: list[Tensor] = []
        self._signature: list[Any] = []
        self._addresses: list[Any] = []
        self._inputs: list[Any] | None = None  # shapes and strides of the last forward pass
        self._forms = [[layer._form for layer in group] for group in self._tied]
        self._own: list[tuple[tuple[Tensor, ...], list[int], slice]] = []  # of each layer: terms, ids, place among all
        for layer in self._layers:
            terms = layer.canonical_parameters()
            start = self._own[-1][2].stop if self._own else 0
            self._own.append((terms, list(map(id, terms)), slice(start, start + len(terms))))
        self._programs: dict[torch.dtype, Program] = {}
        self._built: dict[Program, tuple[list[int], list[Tensor]]] = {}
        self._trained: list[int] = []  # layers in the programs, by index
        self._renormalizer: Any = None
        for layer in (layer for group in self._tied for layer in group):
            layer.renormalizer = self
        self._number = number_of(self)
        _run_uncompiled(NetworkWeights.__call__, AfterForward.__call__)
        self._hooks = [
            model.register_forward_pre_hook(self, prepend=True, with_kwargs=True),
            model.register_forward_hook(AfterForward(self), always_call=True),
        ]
        self.active = True
        self._refresh()
        if all(_is_unit(factor) for layer in self._layers for factor in layer.factors):
            self.trust_columns()

    def remove(self) -> None:
        """Let the layers build their weights by themselves again."""
        self.active = False
        for hook in self._hooks:
            hook.remove()
        for layer in (layer for group in self._tied for layer in group):
            if isinstance(layer, CPLayer):
                layer.renormalizer = layer.prebuilt = layer._form.ready = None
        self._programs.clear()
        self._built.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoNetworkWeights:
        return NoNetworkWeights()  # no optimizer renormalises a copy

    def __reduce__(self) -> tuple[Any, ...]:
        return NoNetworkWeights, ()

    # --- what it knows of the parameters ---

    def _current(self) -> list[Any]:
        return [parameters.get(name) for parameters, name in self._places]

    def applies(self) -> bool:
        """Return True if the layers still hold the parameters they had: no fold, no functional_call, no FSDP."""
        return all(map(operator.is_, self._current(), self._parameters))

    def trust_columns(self) -> None:
        """Take the columns for unit as they are: whoever wrote the parameters knows."""
        self.versions = self.current_versions()
        self._built.clear()

    def current_versions(self) -> list[int]:
        """Return how often each parameter was changed in place."""
        return [parameter._version for parameter in self._parameters]

    def is_unit(self, layer: CPLayer) -> bool:
        """Return True if the columns of a layer are unit, by the promise made for its model."""
        return (
            self.active
            and not self._sharded
            and (torch.compiler.is_compiling() or self.versions == self.current_versions())
        )

    def _refresh(self, *, thoroughly: bool = True) -> None:
        """Forget programs made for other memory, ranks, inputs or, if ``thoroughly``, trainable parameters.

        A frozen parameter in a program costs time only: autograd drops its gradient.
        """
        found: list[Any] = [p.data_ptr() for p in self._parameters]
        found += [terms[1].size(0) for terms, _, _ in self._own]
        found += [forms[0].path for forms in self._forms]
        if found == self._addresses and not thoroughly:
            return
        self._addresses, found = found, list(found)
        found += [p.requires_grad for p in self._parameters]
        for forms in self._forms:
            found += (forms[0].channels_last, forms[0].input_shape)
        if found != self._signature:
            self._signature, self._renormalizer = found, None
            self._programs.clear()
            self._built.clear()
            first = self._layers[0].lambdas
            self._trained = [
                index
                for index, layer in enumerate(self._layers)
                if not self._sharded
                and layer.trains_by_rebuilding()
                and (layer.lambdas.dtype, layer.lambdas.device) == (first.dtype, first.device)
                and all(parameter.requires_grad for parameter in layer.canonical_parameters())
            ]
            self._terms = [p for index in self._trained for p in self._layers[index].canonical_parameters()]

    # --- after an optimizer's step ---

    @torch.no_grad()
    def renormalize(self) -> None:
        """Make all columns unit, in one launch on a GPU."""
        if not self.applies():
            return
        self._refresh()
        if self._renormalizer is None:
            self._renormalizer = _renormalizer(self._factors, self._lambdas)
        self._renormalizer()
        self.versions = self.current_versions()
        self._built.clear()  # an optimizer that writes to parameter.data leaves versions as they are
        for forms in self._forms:
            for form in forms:
                form.prebuilt = None

    # --- before a forward pass ---

    def __call__(
        self, model: nn.Module | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        """Build the weights; this is the forward pre-hook, and may be called without arguments in front of a step."""
        if torch.compiler.is_compiling():
            self._trace_build()
        elif model is None:
            self._build(None)
        else:
            self._build([(x.shape, x.stride()) for x in (*args, *(kwargs or {}).values()) if type(x) is Tensor])

    def _build(self, inputs: list[Any] | None) -> None:
        # Under one of torch.func's transforms layers build their weights by operations that it knows.
        if not torch.is_grad_enabled() or _transformed() or not self.applies():
            return
        seen, self._inputs = inputs is not None and inputs == self._inputs, inputs
        self._refresh(thoroughly=not seen)
        versions = self.current_versions()
        if not (self.enabled and self._trained and self.versions == versions):
            return  # parameters were loaded or written: until they are renormalised, layers divide by their norms
        lambdas = self._layers[0].lambdas
        program = self.program(compute_dtype(lambdas))
        weights = _BuildWeights.apply(self, program, *self.trained_terms())
        for index, weight in zip(self._trained, weights, strict=True):
            terms, identities, place = self._own[index]
            own = [*versions[place], weight._version]
            prebuilt = Prebuilt((weight,), terms, identities, own, dtype=lambdas.dtype)
            for form in self._forms[index]:
                form.prebuilt = prebuilt
                form.ready = (
                    prebuilt if seen else None
                )  # layers look at inputs of another kind: they may lie differently

    def _trace_build(self) -> None:
        """Have a compiler record the build as one operator; ``_after_forward`` takes the traced weights back."""
        if not self._traces():
            return
        dtype = compute_dtype(self._layers[0].lambdas)
        shapes = [weight_shape(layer) for layer in self.trained_layers()]
        weights = build_weights(self._number, dtype, self.trained_terms(), shapes)
        for index, weight in zip(self._trained, weights, strict=True):
            for form in self._forms[index]:
                form.prebuilt = Prebuilt((weight,))

    def _traces(self) -> bool:
        compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        return compiling and self.enabled and len(self._trained) > 0 and torch.is_grad_enabled()

    def _after_forward(self, *_: object) -> None:
        traces = self._traces()
        for forms in self._forms:
            for form in forms:
                form.ready = None
                if traces:
                    form.prebuilt = None

    def trained_layers(self) -> list[CPLayer]:
        """Return the layers whose weights the programs build, tied ones once."""
        return [self._layers[index] for index in self._trained]

    def trained_terms(self) -> list[Tensor]:
        """Return their parameters, layer by layer: sigma, lambdas, factors."""
        return self._terms

    def program(self, dtype: torch.dtype) -> Program:
        """Return the program that computes in this dtype."""
        if dtype not in self._programs:
            self._programs[dtype] = make_program(self.trained_layers(), dtype)
        return self._programs[dtype]

    def built(self, program: Program) -> list[Tensor]:
        """Return the weights of a program, built anew if parameters have changed."""
        versions, weights = self._built.get(program, ([], []))
        if versions != self.versions:
            weights = program.build()
            self._built[program] = self.versions, weights
        return weights


class AfterForward:
    """The forward hook of a ``NetworkWeights``."""

    def __init__(self, owner: NetworkWeights | NoNetworkWeights) -> None:
        self.owner = owner

    def __call__(self, *_: object) -> None:
        """Take traced weights back."""
        if isinstance(self.owner, NetworkWeights):
            self.owner._after_forward()


@torch.no_grad()
def _is_unit(factor: Tensor) -> bool:
    if factor.is_meta or type(factor) is not nn.Parameter:  # without values, or a shard of FSDP's
        return False
    rounding = 16 * torch.finfo(factor.dtype).eps
    return bool((torch.linalg.vector_norm(factor.double(), dim=0) - 1).abs().amax() <= rounding)


class NoNetworkWeights:
    """What a copied or unpickled model has in the place of ``NetworkWeights``: nothing is kept or promised."""

    def __call__(self, *_: object) -> None:
        """Do nothing before a forward pass."""

    def is_unit(self, layer: CPLayer) -> bool:
        """Return False: a layer divides by the norms of its columns."""
        return False


def _run_uncompiled(*hooks: Callable[..., None]) -> None:
    """Have hooks of a compiled model run as they are; a compiler that traces the call of the model traces them too."""
    dynamo: Any = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for hook in hooks:
        dynamo.set_code_exec_strategy(hook.__code__, dynamo._FrameExecStrategy(skip, skip))


def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def make_program(layers: Sequence[CPLayer], dtype: torch.dtype) -> Program:
    """Return kernels for the whole network where they can run, and torch's operations elsewhere."""
    if all(layer.lambdas.is_cuda for layer in layers):
        try:
            from cpnorm.gpu.network_program import KernelProgram

            return KernelProgram(layers, dtype, lambda others: TorchProgram(others, dtype))
        except (ImportError, ValueError):
            pass
    return TorchProgram(layers, dtype)


def _renormalizer(factors: Sequence[Tensor], lambdas: Sequence[Tensor]) -> Any:
    if factors[0].is_cuda:
        try:
            from cpnorm.gpu.train_step import Renormalizer

            return Renormalizer(factors, lambdas)
        except (ImportError, ValueError):
            pass
    return lambda: renormalize_terms(factors, lambdas)


@torch.no_grad()
def renormalize_terms(factors: Sequence[Tensor], lambdas: Sequence[Tensor]) -> None:  # [(d, R)], [(R,)] of each factor
    """Make the columns of factors unit in place; where one is zero, so becomes its lambda.

    This is the tensor work of ``renormalize``, for code that compiles or captures it.
    """
    if len(factors) != len(lambdas):
        raise ValueError(f"expected the lambdas of each of {len(factors)} factors, got {len(lambdas)}")
    if not torch.compiler.is_compiling() and all(map(_is_on_cpu, factors)) and _divide_by_norms(factors):
        return
    for factor, scales in zip(factors, lambdas, strict=True):
        scaled, _, inverse = scaled_columns(factor)
        dead = inverse == 0
        factor.copy_(scaled * inverse).masked_fill_(dead, factor.shape[0] ** -0.5)
        scales.masked_fill_(dead, 0.0)


def _is_on_cpu(factor: Tensor) -> bool:
    plain = type(factor) in (Tensor, nn.Parameter) and factor.dtype == torch.float32
    return plain and factor.device.type == "cpu"


def _divide_by_norms(factors: Sequence[Tensor]) -> bool:
    """Divide all columns by their norms if none has squares out of range; return whether it was done.

    Where a look at values costs no waiting this takes three passes over the factors, a tenth of the careful way.
    """
    if not factors:
        return True
    squares = torch.cat([factor.square().sum(0) for factor in factors])
    if not squares.numel():
        return True
    low, high = torch.aminmax(squares)
    if not (low > 1e-30 and high < torch.inf):  # NaN compares as False
        return False
    for factor, inverse in zip(factors, squares.rsqrt_().split([f.shape[1] for f in factors]), strict=True):
        factor.mul_(inverse)
    return True
