"""Runtimes of benchmarks/runtimes.py: each makes a network for 32 x 32 images run, and says how large its file is."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn

import cpnorm

LARGEST_BATCH = 32

Run = Callable[[Tensor], Tensor]
Made = tuple[Run, int]  # the network in a runtime, and the bytes of its file


def torch_eager(model: nn.Module, _: Tensor, path: Path) -> Made:
    cpnorm.save(model, file := path.with_suffix(".safetensors"))
    return model, file.stat().st_size


def torch_compile(model: nn.Module, _: Tensor, path: Path) -> Made:
    return torch.compile(copy.deepcopy(model), dynamic=False), torch_eager(model, _, path)[1]


def torchao_linear(model: nn.Module, _: Tensor, path: Path) -> Made:
    """Store the weights of linear layers in int8; torchao has no such convolutions."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    torch.save(quantized.state_dict(), file := path.with_suffix(".pt"))
    return quantized, file.stat().st_size


def torchao_static(model: nn.Module, calibration: Tensor, path: Path) -> Made:
    """Quantise convolutions and linear layers to int8 for x86 by torchao; torch.compile makes kernels of them."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    quantized = convert_pt2e(_observed(model, calibration, quantizer, prepare_pt2e))
    torch.save(quantized.state_dict(), file := path.with_suffix(".pt"))
    # Only with frozen weights does torch.compile use int8 kernels. For the whole process, as options= has no effect on
    # what torch traces: this runtime is the last one.
    torch._inductor.config.freezing = True
    return torch.compile(quantized, dynamic=False), file.stat().st_size


def _observed(model: nn.Module, calibration: Tensor, quantizer: Any, prepare: Callable[..., Any]) -> Any:
    prepared = prepare(_exported(model).module(), quantizer)
    for rows in calibration.split(LARGEST_BATCH):
        prepared(rows)
    return prepared


def _exported(model: nn.Module, batch: int | None = None) -> Any:
    """Export for one size of batches, or for any up to the largest."""
    shapes = ({0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH)},) if batch is None else None
    # Weights with channels last would give the shortcuts' slices another layout than ExecuTorch plans for.
    model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return torch.export.export(model, (torch.zeros(batch or 2, 3, 32, 32),), dynamic_shapes=shapes)


def onnxruntime_float(model: nn.Module, _: Tensor, path: Path) -> Made:
    file = path.with_suffix(".onnx")
    if not file.exists():
        cpnorm.export_onnx(model, torch.zeros(2, 3, 32, 32), file)
    return _session(file), file.stat().st_size


def onnxruntime_int8(model: nn.Module, calibration: Tensor, path: Path) -> Made:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    onnxruntime_float(model, calibration, path)
    ready, file = path.with_suffix(".ready.onnx"), path.with_suffix(".int8.onnx")
    quant_pre_process(path.with_suffix(".onnx"), ready)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        batches = iter(calibration.split(LARGEST_BATCH))

        def get_next(self) -> dict[str, Any] | None:
            rows = next(self.batches, None)
            return None if rows is None else {_input_name(ready): rows.numpy()}

    quantize_static(ready, file, Reader(), per_channel=True, weight_type=QuantType.QInt8)
    return _session(file), file.stat().st_size


def _input_name(file: Path) -> str:
    import onnx

    return str(onnx.load(file, load_external_data=False).graph.input[0].name)


def _session(file: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def openvino_float(model: nn.Module, calibration: Tensor, path: Path) -> Made:
    import openvino

    onnxruntime_float(model, calibration, path)
    return _compiled(openvino.convert_model(path.with_suffix(".onnx")), path.with_suffix(".xml"))


def openvino_int8(model: nn.Module, calibration: Tensor, path: Path) -> Made:
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    onnxruntime_float(model, calibration, path)
    read = openvino.convert_model(path.with_suffix(".onnx"))
    images = nncf.Dataset([rows.numpy() for rows in calibration.split(1)])
    return _compiled(nncf.quantize(read, images, subset_size=len(calibration)), path.with_suffix(".int8.xml"))


def _compiled(read: Any, file: Path) -> Made:
    import openvino

    openvino.save_model(read, file, compress_to_fp16=False)
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    settings["INFERENCE_PRECISION_HINT"] = "f32"  # some CPUs would compute in bfloat16
    compiled = openvino.Core().compile_model(file, "CPU", settings)
    size = file.stat().st_size + file.with_suffix(".bin").stat().st_size
    return lambda x: torch.from_numpy(compiled(x.numpy())[0].copy()), size


def executorch_float(model: nn.Module, _: Tensor, path: Path) -> Made:
    return _lowered(model, path.with_suffix(".pte"))


def executorch_int8(model: nn.Module, calibration: Tensor, path: Path) -> Made:
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = xnnpack.XNNPACKQuantizer().set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True))
    quantized = convert_pt2e(_observed(model, calibration, quantizer, prepare_pt2e))
    return _lowered(quantized, path.with_suffix(".int8.pte"))


def _lowered(model: nn.Module, file: Path) -> Made:
    """Write a program for single images and one for the largest batch: each has one size of inputs."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime as ExecuTorch

    programs, methods = {}, {}  # a program must live as long as its methods
    for batch in (LARGEST_BATCH, 1):
        lowered = to_edge_transform_and_lower(_exported(model, batch), partitioner=[XnnpackPartitioner()])
        own = file.with_suffix(f".{batch}{file.suffix}")
        own.write_bytes(lowered.to_executorch().buffer)
        programs[batch] = ExecuTorch.get().load_program(own)
        methods[batch] = programs[batch].load_method("forward")

    def run(x: Tensor, _alive: object = programs) -> Tensor:
        return methods[len(x)].execute([x.contiguous()])[0].clone()

    return run, own.stat().st_size


@dataclasses.dataclass(frozen=True)
class Runtime:
    """How to make a network run somewhere."""

    title: str
    make: Callable[[nn.Module, Tensor, Path], Made]
    int8: bool = False


RUNTIMES = {
    "eager": Runtime("torch, eager", torch_eager),
    "compile": Runtime("torch.compile", torch_compile),
    "onnxruntime": Runtime("ONNX Runtime", onnxruntime_float),
    "onnxruntime-int8": Runtime("ONNX Runtime, static int8", onnxruntime_int8, int8=True),
    "openvino": Runtime("OpenVINO", openvino_float),
    "openvino-int8": Runtime("OpenVINO, static int8 (NNCF)", openvino_int8, int8=True),
    "executorch": Runtime("ExecuTorch (XNNPACK)", executorch_float),
    "executorch-int8": Runtime("ExecuTorch (XNNPACK), static int8", executorch_int8, int8=True),
    "torchao": Runtime("torchao, dynamic int8, linear layers only", torchao_linear, int8=True),
    "torchao-static": Runtime("torchao, static int8, torch.compile", torchao_static, int8=True),
}
