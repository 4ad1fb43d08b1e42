"""Build the weights of all canonical layers of a model together, once per forward pass, by one autograd node.

A weight depends on parameters only, not on the input of its layer. All weights of a network can therefore be built
before its forward pass, and all gradients of sigma, lambda and the vectors be computed after its backward pass, each by
one program over the whole network. In between, the network runs exactly as a plain one.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.convert import canonical_layers, including_tied
from cpnorm.nn.layer_form import Prebuilt, autocast_kind, is_recorded, version_of
from cpnorm.nn.planner import weight_shape
from cpnorm.nn.prebuilt_graph import Terms, WeightsGraph
from cpnorm.nn.prebuilt_op import build_weights, number_of
from cpnorm.nn.renormalizing import make_renormalizer
from cpnorm.nn.weight_programs import Program, make_program


class NetworkWeights:
    """Keep columns unit, and build all weights of a model together before each of its forward passes.

    It is a forward pre-hook of the model. Copies of the model do not have it: their layers build their own weights.

    Args:
        model: a model with canonical layers.
        by_plan: on a CPU, leave layers to their factors where the planner expects that to be faster for inputs such as
            the last ones. False builds all weights, whatever came before, so that a training that is resumed takes the
            same path, and ends with the same bits, as one that was not stopped; compiled code then serves all models of
            one kind, and layers check each weight that they are given.
    """

    def __init__(self, model: nn.Module, *, by_plan: bool = True) -> None:
        self.by_plan = by_plan
        self.enabled = True  # False: columns are kept unit, and layers build their own weights
        self.versions: list[int] = []  # of the parameters when their columns were last unit
        self._layers = list(canonical_layers(model).values())
        tied = including_tied(model, canonical_layers(model)).values()
        self._tied = [[other for other in tied if tie_key(other) == tie_key(layer)] for layer in self._layers]
        self._holders: list[dict[str, Any]] = []  # the dictionaries that hold the parameters, and their names there
        self._names: list[str] = []
        for layer in self._layers:
            modes = [*map(str, range(len(layer.modes)))]
            self._holders += 2 * [layer._parameters] + len(modes) * [layer.factors._parameters]
            self._names += ["sigma", "lambdas", *modes]
        self._parameters: list[Any] = [*self._current()]
        # FSDP's layers hold shards between their calls: they build their own weights, and divide by the norms.
        self._sharded = any(type(parameter).__name__ == "DTensor" for parameter in self._parameters)
        self._factors = [factor for layer in self._layers for factor in layer.factors]
        self._lambdas = [layer.lambdas for layer in self._layers for _ in layer.factors]
        self._terms: list[Tensor] = []
        self._signature: list[Any] = []
        self._addresses: list[Any] = []
        self._autocast: str | None = None  # the kind of device whose autocast gives weights their dtype
        self._inputs: list[Any] | None = None  # shapes and strides of the last forward pass
        self._forms = [[layer._form for layer in group] for group in self._tied]
        self._own: list[Terms] = []  # of each layer: terms, place among all
        for layer in self._layers:
            terms = layer.canonical_parameters()
            start = self._own[-1][1].stop if self._own else 0
            self._own.append((terms, slice(start, start + len(terms))))
        self._place_of = {tuple(map(id, terms)): place for terms, place in self._own}
        self._sizes = [terms[1] for terms, _ in self._own]  # lambdas, as many as there are terms
        self._programs: dict[torch.dtype, Program] = {}
        self._built: dict[Program, tuple[list[int], list[Tensor]]] = {}
        self._trained: list[int] = []  # layers in the programs, by index
        self._graph: WeightsGraph | None = None
        self._node: Callable[[], Any] = lambda: None  # that of the last forward pass, if it is alive
        self._recording = self._recorded = False  # a CUDA graph of the caller's: now, and ever
        self._begun = False  # a forward pass, for which weights are ready
        self._renormalizer: Any = None
        self._captured: list[Any] = []  # old programs and renormalisers, whose buffers CUDA graphs still use
        for layer in (layer for group in self._tied for layer in group):
            layer.renormalizer = self
        self._number = number_of(self)
        _run_uncompiled(NetworkWeights.__call__, AfterForward.__call__)
        self._hooks = [
            model.register_forward_pre_hook(self, prepend=True, with_kwargs=True),
            # Compiled code is bound to the number of a hook that is always called, so that models of one kind would not
            # share it. Without such a hook, which also runs after an error, layers check the weights they are given.
            model.register_forward_hook(AfterForward(self), always_call=by_plan),
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
        self._graph = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NoNetworkWeights:
        return NoNetworkWeights()  # no optimizer renormalises a copy

    def __reduce__(self) -> tuple[Any, ...]:
        return NoNetworkWeights, ()

    # --- the state of the parameters ---

    def _current(self) -> Iterator[Any]:
        return map(dict.get, self._holders, self._names)

    def applies(self) -> bool:
        """Return True if the layers still hold the parameters they had: no fold, no functional_call, no FSDP."""
        return all(map(operator.is_, self._current(), self._parameters))

    def trust_columns(self) -> None:
        """Assume that all columns are unit now; call this only after code that made them so."""
        self.versions = self.current_versions()
        self._built.clear()

    def current_versions(self) -> list[int]:
        """Return how often each parameter was changed in place."""
        return [*map(version_of, self._parameters)]

    def is_unit(self, layer: CPLayer) -> bool:
        """Return True if the columns of the layer are known to be unit.

        Not without gradients, where layers divide by the norms once and keep the weight: averages of parameters, which
        are not unit, are evaluated there, and writing them to ``parameter.data`` leaves no trace.
        """
        if not self.active or self._sharded or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False  # compiled code, which must not depend on versions, divides always
        terms = layer._term_parameters()
        place = self._place_of.get(tuple(map(id, terms)))  # none: functional_call passes other tensors
        if place is None or _transformed():
            return False
        return self.versions[place] == [parameter._version for parameter in terms]

    def trusts(self, terms: Sequence[Tensor]) -> bool:
        """Return True if these are the trained terms, and their columns are known to be unit."""
        own = self.trained_terms()
        return (
            len(own) == len(terms)
            and all(mine.data_ptr() == given.data_ptr() for mine, given in zip(own, terms, strict=True))
            and [*map(Tensor.data_ptr, self._parameters)] == self._addresses[: len(self._parameters)]
            and self.versions == self.current_versions()
        )

    def _refresh(self, *, thoroughly: bool = True) -> None:
        """Forget programs made for other memory, ranks, inputs or, if ``thoroughly``, trainable parameters.

        A frozen parameter in a program costs time only: autograd drops its gradient.
        """
        found: list[Any] = [*map(Tensor.data_ptr, self._parameters)]
        found += map(Tensor.numel, self._sizes)
        found += [forms[0].path for forms in self._forms]
        if found == self._addresses and not thoroughly:
            return
        pointers = len(self._parameters)
        if self._addresses and found[:pointers] != self._addresses[:pointers]:
            self.versions = []  # parameter.data was set, to what may not be unit, and no version shows it
        self._addresses, found = found, list(found)
        found += [p.requires_grad for p in self._parameters]
        for forms in self._forms:
            found += (forms[0].channels_last, forms[0].input_shape if self.by_plan else None)
        if found != self._signature:
            self._captured += [one for one in (*self._programs.values(), self._renormalizer) if _is_captured(one)]
            self._signature, self._renormalizer = found, None
            self._programs.clear()
            self._built.clear()
            self._graph = None
            first = self._sizes[0]
            self._autocast = autocast_kind(first)
            self._trained = [
                index
                for index, layer in enumerate(self._layers)
                if not self._sharded
                and (layer.trains_by_rebuilding() if self.by_plan else layer.path != "factors")
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
        self._refresh(thoroughly=self._renormalizer is None)
        if self._renormalizer is None:
            self._renormalizer = make_renormalizer(self._factors, self._lambdas)
        self._renormalizer()
        self.versions = self.current_versions()
        self._built.clear()  # an optimizer that writes to parameter.data does not change versions
        for forms in self._forms:
            for form in forms:
                form.prebuilt = None

    # --- before a forward pass ---

    def __call__(
        self, model: nn.Module | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        """Build the weights: the forward pre-hook, which may also be called without arguments before a step."""
        if torch.compiler.is_compiling():
            self._trace_build()
            return
        if self._begun:  # a KeyboardInterrupt ended that forward pass, and torch called no hook
            self._after_forward()
        if model is None:
            self._build(None)
        elif torch.is_grad_enabled():  # without gradients, layers build their own weights, and keep them
            self._build([(x.shape, x.stride()) for x in (*args, *(kwargs or {}).values()) if type(x) is Tensor])

    def _build(self, inputs: list[Any] | None) -> None:
        # Under torch.func's transforms, layers build their weights by operations that the transforms support.
        if not torch.is_grad_enabled() or _transformed() or not self.applies():
            return
        seen, self._inputs = inputs is not None and inputs == self._inputs, inputs
        self._refresh(thoroughly=not seen)
        versions = self.current_versions()
        if not (self.enabled and self._trained and self.versions == versions):
            # Parameters were loaded or written: until they are renormalised, layers divide by their norms. The weights
            # of layers that were left alone are of a graph that cannot be used any more.
            for form in (form for forms in self._forms for form in forms):
                if form.prebuilt is not None and form.prebuilt.versions is not None:  # not by ``use_prebuilt``
                    form.prebuilt = None
            return
        program = self.program(self._dtype())
        graph = self._graph
        self._distrust_built()
        if graph is None or not graph.serves(self, program):
            graph = WeightsGraph(self, program, [self._own[index] for index in self._trained])
        self._graph, self._node = graph if program.in_place else None, weakref.ref(graph.node)
        self._begun = True
        for index, prebuilt in zip(self._trained, graph.begin(self, versions), strict=True):
            for form in self._forms[index]:
                form.prebuilt = prebuilt
                # Layers look at inputs of another kind: they may lie differently in memory.
                form.ready = prebuilt if seen and self.by_plan else None

    def _distrust_built(self) -> None:
        """Have weights built again where a CUDA graph of the caller's is recorded, and once there is one.

        It must build its weights at each replay, and computes nothing while it is recorded; replays change parameters
        without a trace. Weights with which a backward pass has still to run stay as they are.
        """
        recording, self._recording = self._recording, is_recorded(self._sizes[0])
        self._recorded |= self._recording
        node = self._node()
        if self._recording != recording or (self._recorded and (node is None or node.pending <= 0)):
            self._built.clear()

    def _trace_build(self) -> None:
        """Have a compiler record the build as one operator; ``_after_forward`` takes the traced weights back."""
        if not self._traces():
            return
        dtype = self._dtype()
        shapes = [weight_shape(layer) for layer in self.trained_layers()]
        # Not ``self.trained_terms()``: functional_call may have put others in their place.
        terms = [p for layer in self.trained_layers() for p in layer.canonical_parameters()]
        weights = build_weights(self._number, dtype, terms, shapes)
        for index, weight in zip(self._trained, weights, strict=True):
            for form in self._forms[index]:
                form.prebuilt = Prebuilt((weight,))

    def _traces(self) -> bool:
        compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        return compiling and self.enabled and len(self._trained) > 0 and torch.is_grad_enabled()

    def _after_forward(self, *_: object) -> None:
        if self._traces():
            for form in (form for forms in self._forms for form in forms):
                form.prebuilt = None
        elif self._begun:
            self._begun = False
            for forms in self._forms:
                for form in forms:
                    form.ready = None

    def _dtype(self) -> torch.dtype:
        """Return the dtype in which torch would multiply by the weights: autocast's if it is on."""
        kind = self._autocast
        if kind is not None and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return self._sizes[0].dtype

    def trained_layers(self) -> list[CPLayer]:
        """Return the layers whose weights the programs build, tied ones once."""
        return [self._layers[index] for index in self._trained]

    def trained_terms(self) -> list[Tensor]:
        """Return their parameters, layer by layer: sigma, lambdas, factors."""
        return self._terms

    def trained_versions(self) -> list[int]:
        """Return how often each of these was changed in place."""
        return [*map(version_of, self._terms)]

    def program(self, dtype: torch.dtype) -> Program:
        """Return the program that computes in this dtype."""
        if dtype not in self._programs:
            self._programs[dtype] = make_program(self.trained_layers(), dtype)
        return self._programs[dtype]

    def built(self, program: Program) -> list[Tensor]:
        """Return the weights of a program, built again if parameters have changed."""
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


def _is_captured(program: Any) -> bool:
    """Return True if a CUDA graph of the caller's has recorded a program or renormaliser.

    The graph uses its buffers by their addresses, and nothing else keeps them.
    """
    return getattr(program, "captured", False)


class NoNetworkWeights:
    """The replacement of ``NetworkWeights`` in a copied or unpickled model, which does nothing."""

    def __call__(self, *_: object) -> None:
        """Do nothing before a forward pass."""

    def is_unit(self, layer: CPLayer) -> bool:
        """Return False: a layer divides by the norms of its columns."""
        return False


def _run_uncompiled(*hooks: Callable[..., None]) -> None:
    """Exclude hooks from compilation when they are called alone; they are traced with the call of the model."""
    dynamo: Any = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for hook in hooks:
        dynamo.set_code_exec_strategy(hook.__code__, dynamo._FrameExecStrategy(skip, skip))


def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None
