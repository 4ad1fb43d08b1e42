"""What all canonical layers share: the parameters, the dense weight made of them, and when it is built."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from cpnorm._checks import check_int
from cpnorm.cp.decompose import cp_exact, exact_rank
from cpnorm.cp.tensor import CPTensor, UnitTerms, dense_from_terms, unit_columns
from cpnorm.nn import planner
from cpnorm.nn.initial import check_options, initial_form, random_form
from cpnorm.nn.planner import Plan, weight_shape
from cpnorm.nn.readonly import read_only
from cpnorm.nn.stale_state import watch_resized

PATHS = ("auto", "rebuild", "factors")


def fx_call(layer: nn.Module, *args: Any) -> Any:
    """Record one call of the layer, as ``torch.fx.symbolic_trace`` does for torch's own: the path depends on sizes."""
    tracer: Any = args[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, {})


def _listed(factors: nn.ParameterList) -> list[nn.Parameter]:
    return [factors[mode] for mode in range(len(factors))]  # torch.compile (2.11) cannot unpack a ParameterList itself


@dataclass
class Prebuilt:
    """A weight built before its layer runs: W, or two matrices whose product it is."""

    tensors: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()  # what it was built from
    versions: tuple[int, ...] | None = None  # of these and of the weight; None: its maker replaces it in time
    memory: tuple[Tensor, ...] = ()  # that of the parameters; held, so that other data cannot get the same address
    in_evaluation: bool = False  # kept over many calls; in training every forward pass builds it

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copied layer builds its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Renormalizer(Protocol):
    """What keeps the columns of layers unit."""

    def is_unit(self, layer: CPLayer) -> bool:
        """Return True if the columns of the layer are unit now."""


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which torch would multiply by this parameter: autocast's if it is on."""
    kind = parameter.device.type
    if parameter.dtype == torch.float32 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return parameter.dtype


@dataclass
class Form:
    """What a canonical layer knows beside its parameters, in one place, so that no attribute of a user's is in the way.

    Attributes:
        modes: the shape in which W is decomposed: that of the weight, or a finer one.
        path: "rebuild", "factors", or "auto" for the planner's choice.
        folds_to: the class that ``fold`` gives back.
        prebuilt: the weight as it was built last, good for as long as no parameter changes.
        renormalizer: what keeps the columns unit, if anything does.
        plans: paths the planner chose before, by rank and size of the input.
    """

    modes: tuple[int, ...]
    path: str
    folds_to: type[nn.Module]
    prebuilt: Prebuilt | None = None
    renormalizer: Renormalizer | None = None
    plans: dict[Any, str] = field(default_factory=dict)


class CPLayer(nn.Module):
    """Base of the canonical layers: W = sigma * sum_r lambda_r * a_r/|a_r| o b_r/|b_r| o ... (equation 5).

    The parameters, and so the keys of the state dict, are ``sigma`` (), ``lambdas`` (R,), ``factors.0`` (d1, R), ...
    and the layer's own ``bias``. A state dict with a dense ``weight`` in their place loads too if the rank can hold it.
    """

    plain: ClassVar[type[nn.Module]]
    sigma: nn.Parameter
    lambdas: nn.Parameter
    factors: nn.ParameterList
    _form: Form

    def __init__(
        self,
        *args: Any,
        rank: int | str = "exact",
        init: str = "exact",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs |= {key: value for key, value in (("device", device), ("dtype", dtype)) if value is not None}
        layer = self.plain(*args, **kwargs)
        weight = cast(Tensor, layer.weight).detach()
        exact = exact_rank(weight.shape)
        terms = (
            exact if rank == "exact" else check_int("rank", rank, where=f" for a weight of shape {tuple(weight.shape)}")
        )
        self.__dict__.update(layer.__dict__)
        check_options(init, "decomposition")
        init = "kaiming_normal" if weight.is_meta else init  # without values there are only shapes to make
        self.hold(initial_form(weight, terms, init))

    @torch.inference_mode(False)
    def hold(self, cp: CPTensor, folds_to: type[nn.Module] | None = None) -> None:
        """Keep the weight in this form from now on, in place of the plain layer's."""
        self._parameters, self._modules = dict(self._parameters), dict(self._modules)  # a shallow copy has the old ones
        weight, bias = self._parameters.pop("weight"), self._parameters.get("bias")
        assert weight is not None
        self._form = Form(cp.shape, "auto", folds_to or self.plain)
        self.sigma, self.lambdas, *factors = (
            nn.Parameter(value.detach().to(weight).contiguous().clone(), requires_grad=weight.requires_grad)
            for value in (cp.sigma, cp.lambdas, *cp.factors)
        )
        self.factors = nn.ParameterList(factors)
        if bias is not None and bias.is_inference():  # of a layer built in inference mode: it is to be trained, too
            self._parameters["bias"] = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)

    @property
    def modes(self) -> tuple[int, ...]:
        """The shape in which W is decomposed: that of the weight, or a finer one."""
        return self._form.modes

    @property
    def path(self) -> str:
        """How the layer meets its input: "rebuild", "factors", or "auto" for the planner's choice."""
        return self._form.path

    @path.setter
    def path(self, path: str) -> None:
        self._form.path = path

    @torch.inference_mode(False)
    @torch.no_grad()
    def replace_terms(self, cp: CPTensor) -> None:
        """Hold other terms in the same Parameter objects, so that an optimizer keeps training them."""
        if cp.shape != self.modes:
            raise ValueError(f"expected terms of shape {self.modes}, got {cp.shape}")
        if cp.rank != self.rank:
            watch_resized(self.canonical_parameters()[1:])
        for parameter, value in zip(self.canonical_parameters(), (cp.sigma, cp.lambdas, *cp.factors), strict=True):
            new = value.detach().to(parameter).contiguous().clone()
            parameter.grad = None
            # A graph that is still alive (that of the last step's loss, say) keeps the old shape for gradients to
            # come; data of another dtype make autograd release it.
            other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
            parameter.data = new.new_empty(0, dtype=other)
            parameter.data = new
            torch.autograd.graph.increment_version(parameter)  # which tells tied layers that their weight is stale

    def share_terms(self, other: CPLayer) -> None:
        """Tie this layer to another: both have the same Parameters from now on."""
        self.sigma, self.lambdas, self.factors = other.sigma, other.lambdas, nn.ParameterList(other.factors)

    def __copy__(self) -> CPLayer:
        """Return a layer with the same Parameter objects, whose attributes can be set without changing this one."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._parameters, other._buffers = dict(self._parameters), dict(self._buffers)
        other._modules, other._form = dict(self._modules), replace(self._form)
        other.factors = nn.ParameterList(self.factors)
        return other

    def __prepare_scriptable__(self) -> CPLayer:
        """Say what to do instead of ``torch.jit.script``, which calls this."""
        raise RuntimeError(
            "torch.jit.script cannot compile canonical layers: script cpnorm.fold(model) or what "
            "cpnorm.factorize(model, example_input) returns, or use torch.compile or torch.export"
        )

    def canonical_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return sigma, the lambdas and the factors, without the bias."""
        return (self.sigma, self.lambdas, *self.factors)

    def reset_parameters(self) -> None:
        """Draw vectors, sigma and bias anew, as torch's layers do, whatever the present values are."""
        shape = weight_shape(self)
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        drawn = self.lambdas.new_empty(shape).uniform_(-bound, bound)
        self.replace_terms(random_form(drawn.reshape(self.modes), self.rank, "kaiming_normal", None))
        bias = cast(Tensor | None, self.bias)
        if bias is not None:
            nn.init.uniform_(bias, -bound, bound)

    @property
    def rank(self) -> int:
        """Number of terms."""
        return int(self.lambdas.shape[0])  # torch.jit.trace makes it a tensor

    @property
    def cp(self) -> CPTensor:
        """The weight in canonical form, with unit vectors; gradients flow through it."""
        return CPTensor(self.sigma, self.lambdas, tuple(unit_columns(f) for f in self.factors))

    @property
    def weight(self) -> Tensor:
        """The dense weight, rebuilt at each read; gradients flow through it.

        In eval mode without gradients it is kept until a parameter changes. A change in place of ``parameter.data`` is
        not noticed before the next call of ``train()`` or ``eval()``: change the parameter itself under ``no_grad``.

        It is a result: writing to it raises a RuntimeError. A tensor assigned to it is decomposed, and a ValueError
        says so if the layer has too few terms to hold it exactly.
        """
        return read_only(self._dense())

    def _dense(self) -> Tensor:
        prebuilt = self.valid_prebuilt()
        if prebuilt is not None:
            return prebuilt[0] if len(prebuilt) == 1 else prebuilt[0] @ prebuilt[1].mT
        shape = weight_shape(self)
        on_gpu = self.lambdas.is_cuda and len(shape) == len(self.modes)  # finer modes are merged again, in their order
        if not self._keeps_weight():
            return dense_from_terms(*self._terms(), channels_last=on_gpu).reshape(shape)
        with torch.inference_mode(False), torch.no_grad():
            built = dense_from_terms(*self._terms()).reshape(shape).contiguous()  # as the plain layer's lies
        self.keep_prebuilt(built)
        return built

    def use_prebuilt(self, *tensors: Tensor) -> None:
        """Use this weight, or two matrices whose product it is, whatever the parameters are.

        The caller replaces it when they change; setting ``prebuilt`` to None ends it.
        """
        self._form.prebuilt = Prebuilt(tensors)

    def keep_prebuilt(self, weight: Tensor) -> None:
        """Use this weight, built from the parameters as they are now, until one of them changes."""
        parameters = self._term_parameters()
        versions = tuple([tensor._version for tensor in (*parameters, weight)])
        in_evaluation = not weight.requires_grad
        memory = tuple([parameter.detach() for parameter in parameters]) if in_evaluation else ()
        self._form.prebuilt = Prebuilt((weight,), parameters, versions, memory, in_evaluation)

    def train(self, mode: bool = True) -> CPLayer:
        """Set the mode as torch does, and forget a kept weight: writes to ``parameter.data`` leave no other trace."""
        prebuilt = self._form.prebuilt
        if prebuilt is not None and prebuilt.in_evaluation:
            self._form.prebuilt = None
        return super().train(mode)

    def _term_parameters(self) -> tuple[Tensor, ...]:
        """Return what ``canonical_parameters`` does, in a fraction of the time."""
        own: dict[str, Any] = self._parameters
        factors: Any = self._modules["factors"]
        return (own["sigma"], own["lambdas"], *factors._parameters.values())

    def valid_prebuilt(self) -> tuple[Tensor, ...] | None:
        """Return W, or two matrices whose product it is, if they were built from the parameters as they are now."""
        form = self._form
        prebuilt = form.prebuilt
        if prebuilt is None:
            return None
        if torch.compiler.is_compiling():  # which must not look at versions: code would be compiled for each
            return None if prebuilt.in_evaluation else prebuilt.tensors
        tensors, versions = prebuilt.tensors, prebuilt.versions
        if versions is None:
            return tensors
        if form.path == "factors":
            return None
        first, current = tensors[0], self._term_parameters()
        lambdas = current[1]
        if (
            not all(map(operator.is_, prebuilt.parameters, current))
            or versions != tuple([tensor._version for tensor in (*current, first)])
            or any(p.data_ptr() != old.data_ptr() for p, old in zip(current, prebuilt.memory, strict=False))
            or (first.dtype != lambdas.dtype and first.dtype != compute_dtype(lambdas))
            or first.device != lambdas.device
            or (not first.requires_grad and lambdas.requires_grad and torch.is_grad_enabled())
        ):
            form.prebuilt = None
            return None
        return tensors

    def _keeps_weight(self) -> bool:
        """Return True in evaluation, where the weight stays as it is until a parameter changes."""
        return not (
            self.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or type(self.lambdas) is not nn.Parameter
            or self.lambdas.is_inference()
            or (torch.distributed.is_available() and torch.distributed.is_initialized())  # FSDP changes them unseen
        )

    @property
    def prebuilt(self) -> Prebuilt | None:
        """The weight as it was built last, if it was kept."""
        return self._form.prebuilt

    @prebuilt.setter
    def prebuilt(self, prebuilt: Prebuilt | None) -> None:
        self._form.prebuilt = prebuilt

    @property
    def renormalizer(self) -> Renormalizer | None:
        """What keeps the columns unit, if anything does."""
        return self._form.renormalizer

    @renormalizer.setter
    def renormalizer(self, renormalizer: Renormalizer | None) -> None:
        self._form.renormalizer = renormalizer

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # torch would register a Parameter beside the property
            self.replace_terms(self._exact_form(value))
        else:
            super().__setattr__(name, value)

    def _exact_form(self, weight: Any) -> CPTensor:
        """Return this dense weight in the layer's modes and rank, or raise if the rank is too low for it."""
        expected = weight_shape(self)
        if isinstance(weight, Tensor) and type(weight) not in (Tensor, nn.Parameter):  # as torchao assigns
            raise TypeError(
                f"expected a plain tensor as weight, got a {type(weight).__name__}: canonical layers cannot be "
                "quantised; call cpnorm.factorize or cpnorm.fold first"
            )
        if not isinstance(weight, Tensor) or tuple(weight.shape) != expected:
            got = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
            raise ValueError(f"expected a tensor of shape {expected} as weight, got {got}")
        dense = weight.detach().to(self.lambdas).reshape(self.modes)
        cp = cp_exact(dense, self.rank)
        if (fit := cp.fit(dense)) < 1 - 100 * torch.finfo(dense.dtype).eps:
            raise ValueError(
                f"the layer's {self.rank} terms cannot hold the dense weight of shape {expected} exactly (fit "
                f"{fit:.4f}; {exact_rank(self.modes)} terms always can): put it into the plain layer, and call "
                "canonical_norm with the rank and init wanted"
            )
        return cp

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as torch does, with a plain layer's ``weight`` decomposed on the way."""
        key = f"{prefix}weight"
        if key in state_dict and f"{prefix}lambdas" not in state_dict:
            try:
                cp = self._exact_form(state_dict.pop(key))
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
            else:
                names = ("sigma", "lambdas", *(f"factors.{mode}" for mode in range(len(cp.factors))))
                values = (cp.sigma, cp.lambdas, *cp.factors)
                state_dict.update({f"{prefix}{name}": value for name, value in zip(names, values, strict=True)})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _terms(self) -> tuple[Tensor, list[Tensor]]:  # (R,), [(d_i, R)]
        scales = self.sigma * self.lambdas
        renormalizer = self._form.renormalizer
        if renormalizer is not None and renormalizer.is_unit(self):
            scales, *factors = UnitTerms.apply(scales, *_listed(self.factors))
            return scales, factors
        return scales, [unit_columns(f) for f in self.factors]

    def plan(self, input_shape: Sequence[int], *, training: bool | None = None, built: bool = False) -> Plan:
        """Return the planner's choice for an input of this shape, with the costs; it prints as a table."""
        return planner.plan(
            self,
            input_shape,
            self.rank,
            modes=self.modes,
            training=torch.is_grad_enabled() if training is None else training,
            device="cuda" if self.lambdas.is_cuda else "cpu",
            built=built,
        )

    def _rebuilds(self, x: Tensor) -> bool:
        if x.is_nested or not self._fits(x):  # torch's own layer says what does not fit
            return True
        if self.path not in PATHS:
            raise ValueError(f"expected path to be one of {', '.join(PATHS)}, got {self.path!r}")
        if self.path == "auto" and torch.compiler.is_exporting() and not all(isinstance(n, int) for n in x.shape):
            return True  # a program for all sizes cannot choose by size
        if self.path != "auto":
            return self.path == "rebuild"
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.plan(x.shape).path == "rebuild"
        keeps, plans = self._keeps_weight(), self._form.plans
        if keeps and x.is_cuda:  # a weight that is kept costs nothing, and a GPU runs one kernel faster than three
            return True
        key = (self.rank, tuple(x.shape), keeps, torch.is_grad_enabled(), x.is_cuda)
        if key not in plans:
            if len(plans) > 64:  # inputs of many sizes
                plans.clear()
            plans[key] = self.plan(x.shape, built=keeps).path
        return plans[key] == "rebuild"

    def _dense_for(self, x: Tensor) -> Tensor | None:
        """Return the dense weight if it should meet this input, and None if the factors should."""
        prebuilt = self.valid_prebuilt()
        if prebuilt is not None:
            return prebuilt[0] if len(prebuilt) == 1 else prebuilt[0] @ prebuilt[1].mT
        return self._dense() if self._rebuilds(x) else None

    def _fits(self, x: Tensor) -> bool:  # (N, I, ...)
        conv = cast(nn.Conv2d, self)
        return x.ndim == len(conv.kernel_size) + 2 and x.shape[1] == conv.in_channels

    def extra_repr(self) -> str:
        """Return the plain layer's settings, with rank and path."""
        return f"{super().extra_repr()}, rank={self.rank}, path={self.path}"

    def __repr__(self) -> str:
        return f"{self._get_name()}({self.extra_repr()})"  # one line, as the plain layer's, without the list of factors


def tie_key(layer: nn.Module) -> int:
    """Return a key that is equal for layers that share their weight or their terms."""
    shared = layer._parameters.get("lambdas" if isinstance(layer, CPLayer) else "weight")
    return id(layer if shared is None else shared)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
