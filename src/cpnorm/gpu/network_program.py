"""Weights and gradients of all canonical layers of a network in a few launches, for any training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from cpnorm.gpu import training_kernels, weight_kernels
from cpnorm.gpu.fused_step import has_kernels
from cpnorm.gpu.optimizer_rules import Rule
from cpnorm.gpu.replayed import Replayed
from cpnorm.gpu.train_step import FusedTerms
from cpnorm.gpu.training_kernels import BLOCK, TERMS
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.layer_form import is_recorded

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
GATHER = (16, 128)  # rows and columns that one program copies
TABLES = 16  # of the addresses of gradients that are kept on the device


class KernelProgram:
    """The program of a network: layers the kernels know in one launch each, others by the program given for them."""

    def __init__(
        self, layers: Sequence[CPLayer], dtype: torch.dtype, others: Callable[[Sequence[CPLayer]], Any]
    ) -> None:
        known = [has_kernels(layer) for layer in layers]
        if dtype not in DTYPES or not any(known):
            raise ValueError(f"expected a layer for the kernels and one of {', '.join(map(str, DTYPES))}, got {dtype}")
        self._known = [index for index, yes in enumerate(known) if yes]
        self._rest = [index for index, yes in enumerate(known) if not yes]
        self._terms = [2 + len(layer.modes) for layer in layers]  # of each layer; the layers themselves are not held
        self._gradients = FusedGradients([layers[index] for index in self._known], dtype)
        self._others = others([layers[index] for index in self._rest]) if self._rest else None
        self.in_place = self._others is None

    @property
    def captured(self) -> bool:
        """Return True if a CUDA graph of the caller's has recorded it."""
        return self._gradients.captured

    def build(self) -> list[Tensor]:
        """Return the weight of every layer."""
        if self._others is None:
            return self._gradients.build()
        weights: list[Any] = [None] * len(self._terms)
        for index, weight in zip(self._known, self._gradients.build(), strict=True):
            weights[index] = weight
        if self._others is not None:
            for index, weight in zip(self._rest, self._others.build(), strict=True):
                weights[index] = weight
        return weights

    def gradients(self, d_weights: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the terms of all layers, in one list."""
        if self._others is None:
            return self._gradients(d_weights)
        ours = iter(self._gradients([d_weights[i] for i in self._known]))
        others = iter(self._others.gradients([d_weights[i] for i in self._rest]))
        known = set(self._known)
        return [
            gradient
            for index, count in enumerate(self._terms)
            for gradient in islice(ours if index in known else others, count)
        ]


class FusedGradients(FusedTerms):
    """Weights and gradients of linear layers and 2-d convolutions with unit columns, in buffers that stay in place.

    Both programs touch no memory but these buffers and the parameters, so that each is recorded as a CUDA graph and
    replayed in one launch.
    """

    def __init__(self, layers: Sequence[CPLayer], dtype: torch.dtype) -> None:
        terms = [layer.canonical_parameters() for layer in layers]
        rate = torch.zeros(4, device=terms[0][0].device)  # an address the kernels may read
        self._d_sides: list[tuple[Tensor, Tensor]] = []

        # All gradients of terms lie one after the other in one piece of memory.
        self._parameters: list[Tensor] = [p for layer in terms for p in layer]
        self._found = _Gradients(self._parameters)
        places = dict(zip(self._parameters, self._found.views, strict=True))

        def slots(parameter: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
            return places[parameter], None, rate, None

        super().__init__(terms, dtype, Rule(slots, gradients_only=True), DTYPES[dtype])
        self._products = [left.new_zeros(len(left), len(right)) for left, right in self.sides]
        self._d_products = [torch.zeros_like(product) for product in self._products]
        # A convolution runs in the memory layout of its weight or of its input if one of them is channels-last. So a
        # weight lies as its input does; the strides say so even where a kernel of 1 x 1 makes both layouts the same.
        self._views = [self._as_weight(i, product) for i, product in enumerate(self._products)]
        self._weights = [
            view
            if layer._form.channels_last and view.ndim == 4
            else torch.empty(view.shape, dtype=dtype, device=self.device)
            for layer, view in zip(layers, self._views, strict=True)
        ]
        for index, (weight, view) in enumerate(zip(self._weights, self._views, strict=True)):
            if weight is not view and math.prod(view.shape) == self._products[index].numel() and view.is_contiguous():
                self._weights[index] = self._products[index].view(view.shape)
        self._copied = [
            i for i, weight in enumerate(self._weights) if weight.data_ptr() != self._products[i].data_ptr()
        ]
        self._d_views = [self._as_weight(i, product) for i, product in enumerate(self._d_products)]
        self._sources: tuple[Any, ...] = ()  # addresses and strides of the last gradients
        self._tables: dict[tuple[Any, ...], Tensor] = {}
        self._source_table = self._integers([[0] * 5] * len(terms)).flatten()
        self._gathered = self._integers([row for i in range(len(terms)) for row in self._gather_programs(i)])
        self._run_build = Replayed(self._build)
        self._run_gradients = Replayed(self._gather_and_compute)

    def _gradient_addresses(self, left: Tensor, right: Tensor) -> list[int]:
        d_left, d_right = torch.zeros_like(left), torch.zeros_like(right)
        self._d_sides.append((d_left, d_right))
        return [d_left.data_ptr(), d_right.data_ptr()]

    def _as_weight(self, index: int, product: Tensor) -> Tensor:  # (O * k1, k2 * I rounded up) -> (O, I, k1, k2)
        _, _, a, b, *kernels = self.layers[index]
        if not kernels:
            return product
        n1, n2 = (len(k) for k in kernels)
        used = product[:, : n2 * len(b)]
        return used.unflatten(0, (len(a), n1)).unflatten(2, (n2, len(b))).permute(0, 3, 1, 2)

    @property
    def captured(self) -> bool:
        """Return True if a CUDA graph of the caller's has recorded the build."""
        return self._run_build.captured

    def build(self) -> list[Tensor]:
        """Return the weight of every layer; the tensors are the same at each call."""
        self._run_build.record()
        self._run_gradients.record()  # here, since the backward pass runs on a thread of autograd's
        self._run_build()
        increment_version(self._weights)  # a graph's writes are not counted: an old backward pass must notice them
        return self._weights

    def _build(self) -> None:
        self.multiply()
        for (left, right), product in zip(self.sides, self._products, strict=True):
            torch.mm(left, right.mT, out=product)
        if self._copied:
            torch._foreach_copy_([self._weights[i] for i in self._copied], [self._views[i] for i in self._copied])

    def _gather_programs(self, index: int) -> list[list[int]]:
        _, _, a, b, *kernels = self.layers[index]
        n1, n2 = (len(kernels[0]), len(kernels[1])) if kernels else (1, 1)
        matrix, rows, used = self._d_products[index], n1 * len(a), n2 * len(b)
        return [
            [index, matrix.data_ptr(), row, column, rows, n1, len(b), used, matrix.shape[1]]
            for row in range(0, rows, GATHER[0])
            for column in range(0, used, GATHER[1])
        ]

    def _point_to(self, d_weights: Sequence[Tensor]) -> None:
        """Tell the kernel that gathers the gradients of the weights where autograd has put them."""
        key = (*map(Tensor.data_ptr, d_weights), *map(Tensor.stride, d_weights))
        if key == self._sources:
            return
        self._sources = key
        table = self._tables.get(key)  # an allocator repeats itself, often with a few turns
        if table is None:
            if len(self._tables) >= TABLES:
                self._tables.clear()
            sources: list[int] = []
            for d in d_weights:
                sources += (d.data_ptr(), *d.stride(), *((0, 0) if d.ndim == 2 else ()))
            # From pinned memory, so that the host does not wait for the work in front of the copy.
            numbers = torch.tensor(sources, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            table = self._tables[key] = numbers.to(self.device, non_blocking=True)
        self._source_table.copy_(table)

    @torch.no_grad()
    def __call__(self, d_weights: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of sigma, lambda and the vectors of all layers, in memory of their own."""
        zero = [i for i, d in enumerate(d_weights) if d is None]
        present = [torch.zeros_like(self._weights[i]) if d is None else d for i, d in enumerate(d_weights)]
        if is_recorded(self._weights[0]):  # a CUDA graph takes no table from here
            for view, d in zip(self._d_views, present, strict=True):
                view.copy_(d)
            self._compute()
        else:
            self._point_to(present)
            self._run_gradients()
        found: list[Tensor | None] = [*self._found.take()]
        for index in zero:
            first = sum(map(len, self.layers[:index]))
            found[first : first + len(self.layers[index])] = [None] * len(self.layers[index])
        return found

    def _gather_and_compute(self) -> None:
        weight_kernels.gather[len(self._gathered),](self._source_table, self._gathered, self._kind, *GATHER)
        self._compute()

    def _compute(self) -> None:
        for (left, right), (d_left, d_right), d in zip(self.sides, self._d_sides, self._d_products, strict=True):
            torch.mm(d, right, out=d_left)
            torch.mm(d.mT, left, out=d_right)
        kind, numbers, logs = (False, False, False, False, True), (0.0,) * 6, (0.0, 0.0)
        rows, columns, warps = BLOCK
        for n, programs in self._totals.items():
            training_kernels.totals[len(programs),](
                self._table, programs, (), self._kind, n, rows, columns, num_warps=warps
            )
        grid = (len(self._terms),)
        training_kernels.radials[grid](self._table, self._terms, self._padded, rows, TERMS)
        for n, programs in self._moves.items():
            training_kernels.move[len(programs),](
                self._table, programs, (), numbers, logs, kind, self._kind, n, rows, columns, num_warps=warps
            )
        training_kernels.finish[grid](self._table, self._terms, numbers, logs, 0.0, kind, self._padded, rows, TERMS)


class _Gradients:
    """The gradients of all parameters in one piece of memory, and tensors that autograd may keep as its own."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._sizes = [-(-p.numel() // 4) * 4 for p in parameters]  # each begins at a multiple of 16 bytes
        self._shapes = [p.shape for p in parameters]
        self._flat = torch.zeros(sum(self._sizes), device=parameters[0].device)
        self.views = self._split(self._flat)  # where the kernels write
        self._lent = torch.empty_like(self._flat)
        self._lent_views = self._split(self._lent)
        self._references = self._count()

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split(self._sizes)
        return [part[: shape.numel()].view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._lent.untyped_storage()._cdata)

    def take(self) -> list[Tensor]:
        """Return copies of the gradients, in memory that is used again once none of them is alive."""
        if is_recorded(self._flat):
            return self._split(self._flat.clone())  # a graph of the caller's has memory of its own
        if self._count() != self._references:  # gradients are accumulated, or kept by the caller
            self._lent = torch.empty_like(self._flat)
            self._lent_views = self._split(self._lent)
        self._lent.copy_(self._flat)
        return [*map(Tensor.detach, self._lent_views)]  # autograd copies tensors that others hold, as we the views
