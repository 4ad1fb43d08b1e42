"""Export models as ONNX files, compared with onnxruntime before they get their name."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cpnorm._checks import Inputs, as_arguments, check_model
from cpnorm.deploy.factorization import choose_forms
from cpnorm.nn.convert import canonical_layers

LARGEST = 2**31 - 2**20  # bytes of one ONNX file


def export_onnx(
    model: nn.Module,
    example_input: Inputs,
    path: str | os.PathLike[str],
    *,
    dynamic_batch: bool = True,
    check: bool = True,
) -> None:
    """Write an ONNX file of the model in eval mode; the model does not change.

    Each canonical layer is written in its smallest form: as a chain of small layers where that has fewer parameters,
    else dense. Call ``factorize`` first for the fastest forms, or ``fold`` for dense layers.

    Args:
        model: a canonical, factorised or plain model.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments.
        path: of the file, which appears under this name only when it is complete and checked.
        dynamic_batch: allow any size of the first dimension of all inputs in the file, else that of the example.
        check: compare the file's outputs with the model's, if onnxruntime is installed.
    """
    missing = [package for package in ("onnx", "onnxscript") if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"export_onnx requires {' and '.join(missing)}: pip install 'cpnorm[onnx]'")
    check_model(model)
    with torch.autocast("cpu", enabled=False):  # whatever surrounds this call
        _export(model, example_input, Path(path), dynamic_batch, check)


def _export(model: nn.Module, example_input: Inputs, path: Path, dynamic_batch: bool, check: bool) -> None:
    if canonical_layers(model):
        choice = choose_forms(model, example_input, measure=False, goal="parameters")
        plain = choice.apply(copy.deepcopy(model).eval()).cpu()
    else:
        plain = copy.deepcopy(model).eval().cpu()
    size = sum(p.numel() * p.element_size() for p in (*plain.parameters(), *plain.buffers()))
    if size > LARGEST:
        raise ValueError(f"expected at most {LARGEST} bytes of parameters, the limit of one ONNX file, got {size}")
    args, kwargs = _arguments(example_input)
    if dynamic_batch:
        args, kwargs = _resized((args, kwargs), 2)  # a batch of one would be taken for a constant
    with torch.no_grad():
        single = isinstance(plain(*args, **kwargs), Tensor)

    if not path.name or not path.parent.is_dir():
        raise FileNotFoundError(f"expected a file in a folder that exists, got {path}")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.onnx")
    try:
        with _quiet():
            program = torch.onnx.export(
                plain,
                args,
                kwargs=kwargs,
                dynamo=True,
                dynamic_shapes=_batch_dimensions(plain, args, kwargs) if dynamic_batch else None,
                output_names=["output"] if single else None,
                verbose=False,
                optimize=False,
            )
            assert program is not None
            _merge_duplicates(program.model)
            program.optimize()
            _forget_traces(program.model.graph)
            program.save(draft, external_data=False)
        if check and importlib.util.find_spec("onnxruntime") is not None:
            for batch in (2, 3) if dynamic_batch else (None,):
                _check(draft, plain, *_resized((args, kwargs), batch))
        os.replace(draft, path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(draft), draft):
            raise  # about some other file
        raise OSError(error.errno, error.strerror, str(path)) from error  # with the name that was asked for
    finally:
        draft.unlink(missing_ok=True)


def _arguments(example_input: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return pytree.tree_map_only(Tensor, lambda x: x.detach().cpu(), as_arguments(example_input))


def _resized(inputs: Any, batch: int | None) -> Any:
    """Return all tensors with this batch size, by repeating their rows; None leaves them as they are."""

    def resize(x: Tensor) -> Tensor:
        if batch is None or x.ndim == 0:
            return x
        if len(x) == 0:
            raise ValueError(f"expected at least one example in example_input, got shape {tuple(x.shape)}")
        return x[torch.arange(batch) % len(x)]

    return pytree.tree_map_only(Tensor, resize, inputs)


def _batch_dimensions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes, batch = torch.export.ShapesCollection(), torch.export.Dim("batch")
    for x in pytree.tree_leaves((args, kwargs)):
        if isinstance(x, Tensor) and x.ndim:
            shapes[x] = {0: batch}
    return shapes.dynamic_shapes(model, args, kwargs)


def _merge_duplicates(model: Any) -> None:
    """Leave one of each constant and repeated node, so that the optimizer has a third of the nodes to go through."""
    from onnx_ir.passes import common

    common.CommonSubexpressionEliminationPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.RemoveUnusedNodesPass()(model)


def _forget_traces(graph: Any) -> None:
    """Remove the source lines that the exporter notes for every node, with the folders of this machine."""
    for part in (graph, *graph.inputs, *graph.initializers.values(), *graph.all_nodes()):
        part.metadata_props.clear()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which warns of its own deprecations and of optional packages; errors still show."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _check(path: Path, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if any(x.dtype == torch.bfloat16 for x in (*tensors, *model.parameters(), *model.buffers())):
        return  # numpy and onnxruntime's kernels do not support it
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except NoKernel:
        return  # onnxruntime has no such layer in this precision, such as a convolution in float64
    feeds = {wanted.name: x.numpy() for wanted, x in zip(session.get_inputs(), tensors, strict=True)}
    with torch.no_grad():
        outputs = [y for y in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(y, Tensor)]
    for expected, value in zip(outputs, session.run(None, feeds), strict=True):
        got = torch.from_numpy(value)
        if got.shape == expected.shape and expected.is_floating_point():  # infinities, as in masks, must be equal
            finite = expected.isfinite()
            if not torch.equal(got[~finite].nan_to_num(), expected[~finite].nan_to_num()):
                raise RuntimeError(f"the ONNX file has other infinities in an output of {tuple(expected.shape)}")
            got, expected = got[finite], expected[finite]
        tolerance = torch.finfo(expected.dtype).eps ** 0.5 if expected.is_floating_point() else 0.0
        error = (got.double() - expected.double()).norm() if got.shape == expected.shape else float("inf")
        if not error <= tolerance * expected.double().norm():
            raise RuntimeError(
                f"the ONNX file differs from the model by {error} in an output of {tuple(expected.shape)}"
            )
