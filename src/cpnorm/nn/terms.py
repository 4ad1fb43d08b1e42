"""The parameters of a canonical layer: how they are made, replaced, shared, copied and loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, Self, cast

import torch
from torch import Tensor, nn

from cpnorm._checks import check_int
from cpnorm.cp.decompose import cp_exact, exact_rank
from cpnorm.cp.tensor import CPTensor, unit_columns
from cpnorm.nn.initial import check_options, initial_form, random_form
from cpnorm.nn.layer_form import Form
from cpnorm.nn.planner import weight_shape
from cpnorm.nn.stale_state import watch_resized


class CanonicalTerms(nn.Module):
    """A module whose weight is held as sigma, lambdas and one factor for each mode.

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
        init = "kaiming_normal" if weight.is_meta else init  # without values only shapes can be made
        self.hold(initial_form(weight, terms, init))

    @torch.inference_mode(False)
    def hold(self, cp: CPTensor, folds_to: type[nn.Module] | None = None) -> None:
        """Keep the weight in this form from now on, in place of the plain layer's."""
        self._parameters, self._modules = (
            dict(self._parameters),
            dict(self._modules),
        )  # a shallow copy keeps the old dicts
        weight, bias = self._parameters.pop("weight"), self._parameters.get("bias")
        assert weight is not None
        self._form = Form(cp.shape, "auto", folds_to or self.plain)
        self.sigma, self.lambdas, *factors = (
            nn.Parameter(value.detach().to(weight).contiguous().clone(), requires_grad=weight.requires_grad)
            for value in (cp.sigma, cp.lambdas, *cp.factors)
        )
        self.factors = nn.ParameterList(factors)
        if bias is not None and bias.is_inference():  # made in inference mode, and could not be trained
            self._parameters["bias"] = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)

    @property
    def modes(self) -> tuple[int, ...]:
        """The shape in which W is decomposed: that of the weight, or a finer one."""
        return self._form.modes

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
            # An autograd graph that is still alive, for example that of the last loss, remembers the old shape for
            # gradients; data of another dtype make autograd release it.
            other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
            parameter.data = new.new_empty(0, dtype=other)
            parameter.data = new
            torch.autograd.graph.increment_version(parameter)  # marks prebuilt weights of tied layers as stale

    def share_terms(self, other: CanonicalTerms) -> None:
        """Tie this layer to another: both have the same Parameters from now on."""
        self.sigma, self.lambdas, self.factors = other.sigma, other.lambdas, nn.ParameterList(other.factors)

    def __copy__(self) -> Self:
        """Return a layer with the same Parameter objects, whose attributes can be set without changing this one."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._parameters, other._buffers = dict(self._parameters), dict(self._buffers)
        other._modules, other._form = dict(self._modules), replace(self._form)
        other.factors = nn.ParameterList(self.factors)
        return other

    def __prepare_scriptable__(self) -> NoReturn:
        """Say what to do instead of ``torch.jit.script``, which calls this."""
        raise RuntimeError(
            "torch.jit.script cannot compile canonical layers: script cpnorm.fold(model) or what "
            "cpnorm.factorize(model, example_input) returns, or use torch.compile or torch.export"
        )

    def canonical_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return sigma, the lambdas and the factors, without the bias."""
        return (self.sigma, self.lambdas, *self.factors)

    def _term_parameters(self) -> tuple[Tensor, ...]:
        """Return what ``canonical_parameters`` does, in a fraction of the time."""
        own: dict[str, Any] = self._parameters
        factors: Any = self._modules["factors"]
        return (own["sigma"], own["lambdas"], *factors._parameters.values())

    def reset_parameters(self) -> None:
        """Draw vectors, sigma and bias again, as torch's layers do, independently of the present values."""
        shape = weight_shape(self)
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        drawn = self.lambdas.new_empty(shape).uniform_(-bound, bound)
        self.replace_terms(random_form(drawn.reshape(self.modes), self.rank, "kaiming_normal", None))
        bias = cast(Tensor | None, self.bias)
        if bias is not None:
            nn.init.uniform_(bias, -bound, bound)

    @property
    def rank(self) -> int:
        """The number of terms."""
        return int(self.lambdas.shape[0])  # torch.jit.trace makes it a tensor

    @property
    def cp(self) -> CPTensor:
        """The weight in canonical form, with unit vectors; gradients flow through it."""
        return CPTensor(self.sigma, self.lambdas, tuple(unit_columns(f) for f in self.factors))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # torch would register a Parameter beside the property
            self.replace_terms(self._exact_form(value))
        else:
            super().__setattr__(name, value)

    def _exact_form(self, weight: Any) -> CPTensor:
        """Return this dense weight in the layer's modes and rank, or raise if the rank is too low for it."""
        expected = weight_shape(self)
        if isinstance(weight, Tensor) and type(weight) not in (Tensor, nn.Parameter):  # torchao assigns subclasses
            raise TypeError(
                f"weight: expected a plain tensor, got a {type(weight).__name__}: canonical layers cannot be "
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
                f"{fit:.4f}; {exact_rank(self.modes)} terms always can): assign it to the plain layer, and call "
                "canonical_norm with a rank and an init"
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
        """Load as torch does, and decompose the ``weight`` of a plain layer."""
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
