"""The base class of canonical layers: how and when they build their weight, and which path they take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from operator import is_
from typing import cast

import torch
from torch import Tensor, nn

from cpnorm.cp.tensor import UnitTerms, dense_from_terms, unit_columns
from cpnorm.nn import planner
from cpnorm.nn.layer_form import Prebuilt, Renormalizer, is_recorded, version_of
from cpnorm.nn.planner import Plan, weight_shape
from cpnorm.nn.readonly import read_only
from cpnorm.nn.terms import CanonicalTerms

PATHS = ("auto", "rebuild", "factors")


class CPLayer(CanonicalTerms):
    """Base of the canonical layers: W = sigma * sum_r lambda_r * a_r/|a_r| o b_r/|b_r| o ... (equation 5).

    The arguments of a canonical layer are those of the plain layer and, by name, ``rank`` (a number of terms, or
    "exact") and ``init`` (as for ``canonical_norm``).
    """

    @property
    def path(self) -> str:
        """How the layer computes its output: "rebuild", "factors", or "auto" for the planner's choice."""
        return self._form.path

    @path.setter
    def path(self, path: str) -> None:
        self._form.path = path

    @property
    def weight(self) -> Tensor:
        """The dense weight, rebuilt at each read; gradients flow through it.

        In eval mode without gradients it is kept until a parameter changes; a CUDA graph builds its own at each replay.
        A change in place of ``parameter.data`` is noticed at once on the CPU if it reaches the lambdas, else at the
        next call of ``train()`` or ``eval()``: change the parameter itself under ``no_grad``.

        It is a result: writing to it raises a RuntimeError. A tensor assigned to it is decomposed, and a ValueError
        says so if the layer has too few terms to hold it exactly.
        """
        return read_only(self._dense())

    def _dense(self) -> Tensor:
        prebuilt = self.valid_prebuilt()
        if prebuilt is not None:
            return prebuilt[0] if len(prebuilt) == 1 else planner.weight_of_sides(self, *prebuilt)
        shape = weight_shape(self)
        # As the input lies, so should the weight; finer modes are merged again, in their order.
        last = self._form.channels_last and len(shape) == len(self.modes) == 4
        if not self._keeps_weight():
            dense = dense_from_terms(*self._terms(), channels_last=last)
            return dense.reshape(shape) if last else dense.reshape(-1).reshape(shape)  # strides of a contiguous tensor
        kind = self.lambdas.device.type
        precise = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
        with torch.inference_mode(False), torch.no_grad(), precise:
            layout = torch.channels_last if last else torch.contiguous_format
            built = dense_from_terms(*self._terms()).reshape(shape).clone(memory_format=layout)
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
        versions = [parameter._version for parameter in parameters]
        versions.append(weight._version)
        prebuilt = self._form.prebuilt = Prebuilt((weight,), parameters, versions)
        prebuilt.dtype = parameters[1].dtype
        prebuilt.autocast = weight.device.type if weight.dtype != prebuilt.dtype else None
        if not weight.requires_grad:
            prebuilt.in_evaluation = True
            prebuilt.memory = tuple([parameter.detach() for parameter in parameters])
            prebuilt.addresses = [parameter.data_ptr() for parameter in parameters]
            if weight.dtype == torch.float32:
                prebuilt.product_on = "cuda" if weight.is_cuda else "cpu"
            if not parameters[1].is_cuda:  # which would have to wait for each comparison
                prebuilt.lambdas = parameters[1].detach().clone()

    def train(self, mode: bool = True) -> CPLayer:
        """Set the mode as torch does, and forget a built weight: writes to ``parameter.data`` may leave no trace."""
        prebuilt = self._form.prebuilt
        if prebuilt is not None and prebuilt.versions is not None:
            self._form.prebuilt = None
        self._form.ready = None
        return super().train(mode)

    def valid_prebuilt(self) -> tuple[Tensor, ...] | None:
        """Return W, or two matrices whose product it is, if they were built from the parameters as they are now."""
        form = self._form
        prebuilt = form.prebuilt
        if prebuilt is None:
            return None
        if torch.compiler.is_compiling():  # which must not look at versions: code would be compiled for each
            return None if prebuilt.in_evaluation else prebuilt.tensors
        if prebuilt.in_evaluation:
            return prebuilt.tensors if self._kept_is_valid(prebuilt) else None
        tensors, versions = prebuilt.tensors, prebuilt.versions
        if versions is None:
            return tensors
        if form.path == "factors":
            return None
        first, current = tensors[0], self._term_parameters()
        found = [*map(version_of, current), first._version]
        lambdas = current[1]
        unfit = first.device != lambdas.device or lambdas.dtype != prebuilt.dtype
        same = found == versions and all(map(is_, current, prebuilt.parameters))
        if unfit or not same or not prebuilt.fits_autocast:
            form.prebuilt = None
            return None
        return tensors

    def _kept_is_valid(self, kept: Prebuilt) -> bool:
        """Return True if the weight kept in evaluation can be used here; forget it if a parameter has changed."""
        form = self._form
        current = self._term_parameters()
        # A traced program would hold it as a constant, and a CUDA graph by its address, after it is forgotten here.
        if form.path == "factors" or torch.jit.is_tracing() or is_recorded(current[1]):
            return False
        if (
            all(map(is_, current, kept.parameters))
            and [*map(version_of, current), kept.tensors[0]._version] == kept.versions
            and [*map(Tensor.data_ptr, current)] == kept.addresses
            and not (torch.is_grad_enabled() and current[1].requires_grad)
            and (kept.lambdas is None or torch.equal(current[1], kept.lambdas))
        ):
            return True
        form.prebuilt = None
        return False

    def _ready_weight(self) -> Tensor | None:
        """Return W if it was built for the forward pass that is running, or kept in evaluation."""
        if torch.compiler.is_compiling():
            return None
        form = self._form
        ready = form.ready
        if ready is None:
            kept = form.prebuilt
            return kept.for_product() if kept is not None and kept.in_evaluation and self._kept_is_valid(kept) else None
        # NetworkWeights has checked the parameters: only the objects may be others now.
        same = all(map(is_, self._term_parameters(), ready.parameters))
        return ready.tensors[0] if same and ready.fits_autocast else None

    def _keeps_weight(self) -> bool:
        """Return True in evaluation, where the weight stays as it is until a parameter changes."""
        return not (
            self.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or is_recorded(self.lambdas)
            or type(self.lambdas) is not nn.Parameter
            or self.lambdas.is_inference()
            or (torch.distributed.is_available() and torch.distributed.is_initialized())  # FSDP changes them unseen
        )

    @property
    def prebuilt(self) -> Prebuilt | None:
        """The weight that was built last, or None."""
        return self._form.prebuilt

    @prebuilt.setter
    def prebuilt(self, prebuilt: Prebuilt | None) -> None:
        self._form.prebuilt = prebuilt

    @property
    def renormalizer(self) -> Renormalizer | None:
        """The object that keeps the columns unit, or None."""
        return self._form.renormalizer

    @renormalizer.setter
    def renormalizer(self, renormalizer: Renormalizer | None) -> None:
        self._form.renormalizer = renormalizer

    def _terms(self) -> tuple[Tensor, list[Tensor]]:  # (R,), [(d_i, R)]
        scales = self.sigma * self.lambdas
        renormalizer = self._form.renormalizer
        if renormalizer is not None and renormalizer.is_unit(self):
            scales, *factors = UnitTerms.apply(scales, *_listed(self.factors))
            return scales, factors
        return scales, [unit_columns(f) for f in self.factors]

    def _trains_as_one_node(self, x: Tensor) -> bool:
        """Return True if ``nn/factor_training.py`` can, and should, train the layer through its factors."""
        renormalizer, dtype = self._form.renormalizer, self.lambdas.dtype
        return (
            renormalizer is not None
            and x.device.type == self.lambdas.device.type == "cpu"
            and x.dtype == dtype
            and dtype in (torch.float32, torch.float64)
            and self._fits_one_node(x)
            and not torch.is_autocast_enabled("cpu")
            and not torch.jit.is_tracing()
            and renormalizer.is_unit(self)
        )

    def _fits_one_node(self, x: Tensor) -> bool:
        return False

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
        if x.is_nested or not self._fits(x):  # the plain layer raises for what does not fit
            return True
        if self.path not in PATHS:
            raise ValueError(f"expected path to be one of {', '.join(PATHS)}, got {self.path!r}")
        if self.path == "auto" and torch.compiler.is_exporting() and not all(isinstance(n, int) for n in x.shape):
            return True  # a program for all sizes cannot choose by size
        if self.path != "auto":
            return self.path == "rebuild"
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.plan(x.shape).path == "rebuild"
        keeps = self._keeps_weight()
        if keeps and x.is_cuda:  # a weight that is kept costs nothing, and a GPU runs one kernel faster than three
            return True
        return self._planned_path(x.shape, torch.is_grad_enabled(), keeps) == "rebuild"

    def _planned_path(self, shape: torch.Size, training: bool, built: bool) -> str:
        """Return the planner's choice, from memory where it was asked before."""
        plans, key = self._form.plans, (self.rank, shape, training, built, self.lambdas.is_cuda)
        if key not in plans:
            if len(plans) > 64:  # inputs of many sizes
                plans.clear()
            plans[key] = self.plan(shape, training=training, built=built).path
        return plans[key]

    def trains_by_rebuilding(self) -> bool:
        """Return True if a training loop should build W for inputs such as the last one.

        On a GPU it should at all ranks: the kernels that build all weights of a network together cost less than the
        launches of a layer that runs through its factors.
        """
        shape = self._form.input_shape
        if self.path != "auto" or self.lambdas.is_cuda or shape is None:
            return self.path != "factors"
        return self._planned_path(shape, True, False) == "rebuild"

    def _dense_for(self, x: Tensor) -> Tensor | None:
        """Return the dense weight if this input should be multiplied with it, and None for the factors."""
        prebuilt = self.valid_prebuilt()
        if not (x.is_nested or torch.compiler.is_compiling()):
            self._form.channels_last = x.ndim == 4 and x.stride(1) == 1 and not x.is_contiguous()
            if not x.is_cuda and self._fits(x):
                self._form.input_shape = x.shape
        if prebuilt is not None:
            return prebuilt[0] if len(prebuilt) == 1 else planner.weight_of_sides(self, *prebuilt)
        return self._dense() if self._rebuilds(x) else None

    def _fits(self, x: Tensor) -> bool:  # (N, I, ...)
        conv = cast(nn.Conv2d, self)
        return x.ndim == len(conv.kernel_size) + 2 and x.shape[1] == conv.in_channels

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; raise for what torch.nn.utils.prune makes of the weight, which is no parameter."""
        if name == "weight_orig":
            raise ValueError(
                "name: the weight of a canonical layer is computed, so that truncate takes pruning's place"
            )
        super().register_parameter(name, param)

    def extra_repr(self) -> str:
        """Return the plain layer's settings, with rank and path."""
        return f"{super().extra_repr()}, rank={self.rank}, path={self.path}"

    def __repr__(self) -> str:
        return f"{self._get_name()}({self.extra_repr()})"  # one line, as the plain layer's, without the list of factors


def _listed(factors: nn.ParameterList) -> list[nn.Parameter]:
    return [factors[mode] for mode in range(len(factors))]  # torch.compile (2.11) cannot unpack a ParameterList itself


def tie_key(layer: nn.Module) -> int:
    """Return a key that is equal for layers that share their weight or their terms."""
    shared = layer._parameters.get("lambdas" if isinstance(layer, CPLayer) else "weight")
    return id(layer if shared is None else shared)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
