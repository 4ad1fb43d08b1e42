"""Ways to compress a trained network to a number of parameters: cpnorm, and what users reach for otherwise.

Every method takes the dense network, the parameters that may be left and the calibration batches, and returns a new
network. None of the peers is needed by cpnorm: one that is not installed raises ImportError when it is called.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import cpnorm
from small_layers import (
    allowed_loss,
    compressible,
    filled,
    matrix_of,
    mode_energies,
    parameters,
    plain_svd,
    rank_for,
    replaced,
    separable,
    shape_of,
    term_size,
    two_layers,
)

Batches = Sequence[tuple[Tensor, Tensor]]  # normalised images, labels
Method = Callable[[nn.Module, int, Batches], nn.Module]
RANDOM_STATE = 0


# --- cpnorm -------------------------------------------------------------------------------------------------------


def cpnorm_default(model: nn.Module, budget: int, batches: Batches) -> nn.Module:
    """Return the network in canonical form, truncated with the calibration data and all other settings at default."""
    canonical = cpnorm.canonical_norm(copy.deepcopy(model))
    cpnorm.truncate(canonical, params=budget, data=batches)
    return canonical


def cpnorm_outputs(model: nn.Module, budget: int, batches: Batches) -> nn.Module:
    """Return the network in canonical form, truncated by overlaps, output vectors fitted to the calibration data."""
    canonical = cpnorm.canonical_norm(copy.deepcopy(model))
    cpnorm.truncate(canonical, params=budget, data=batches, criterion="gram", refit="outputs")
    return canonical


def cpnorm_weights(model: nn.Module, budget: int, batches: Batches) -> nn.Module:
    """Return the network in canonical form, truncated and refitted to its weights; looks at no data."""
    canonical = cpnorm.canonical_norm(copy.deepcopy(model))
    cpnorm.truncate(canonical, params=budget, criterion="gram", refit="als")
    return canonical


# --- singular values ----------------------------------------------------------------------------------------------


def svd(model: nn.Module, budget: int, batches: Batches) -> nn.Module:
    """Return the network with two layers in place of each: the SVD of its weight, equal relative errors everywhere."""
    layers = compressible(model)
    found = {}
    for name, layer in layers.items():
        matrix = matrix_of(layer).double()
        values, vectors = torch.linalg.eigh(matrix @ matrix.mT)  # squared singular values, left singular vectors
        found[name] = (vectors.flip(1), values.flip(0).clamp_min(0))
    return _projected(model, budget, layers, found)


def whitened_svd(model: nn.Module, budget: int, batches: Batches) -> nn.Module:
    """Return the network with two layers in place of each, of least squared error in its outputs on the data.

    The SVD of the weight times the square root of its inputs' second moments. Its left singular vectors are the
    eigenvectors of the second moments of the layer's outputs, and the weight is projected onto them.
    """
    layers = compressible(model)
    moments = output_moments(model, layers, batches)
    found = {}
    for name in layers:
        values, vectors = torch.linalg.eigh(moments[name])
        found[name] = (vectors.flip(1), values.flip(0).clamp_min(0))
    return _projected(model, budget, layers, found)


def output_moments(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Batches
) -> dict[str, Tensor]:  # -> (O, O) each
    """Return y y^T summed over positions and images, for the outputs y of each layer without its bias."""
    moments: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: Any, _: Any, output: Tensor) -> None:
            y = output.transpose(0, 1).flatten(1) if output.ndim == 4 else output.mT
            y = y if layer.bias is None else y - layer.bias[:, None]
            moments[name] = moments.get(name, 0.0) + (y @ y.mT).double()

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    model.eval()
    with torch.no_grad():
        for images, _ in batches:
            model(images)
    for handle in handles:
        handle.remove()
    return moments


def _projected(
    model: nn.Module,
    budget: int,
    layers: Mapping[str, nn.Module],
    found: Mapping[str, tuple[Tensor, Tensor]],  # orthonormal columns (O, O), the energy along each (O,)
) -> nn.Module:
    def rank(name: str, lost: float) -> int:
        return rank_for(found[name][1], lost)

    def cost(name: str, lost: float) -> int:
        outputs, inputs = matrix_of(layers[name]).shape
        return min(rank(name, lost) * (outputs + inputs), outputs * inputs)

    lost = allowed_loss(model, budget, layers, cost)
    twins = {}
    for name, layer in layers.items():
        if cost(name, lost) < matrix_of(layer).numel():
            columns = found[name][0][:, : rank(name, lost)]
            twins[name] = two_layers(layer, columns, columns.mT @ matrix_of(layer).double())
    return replaced(model, twins)


# --- TensorLy -----------------------------------------------------------------------------------------------------


def tucker2(model: nn.Module, budget: int, batches: Batches) -> nn.Module:
    """Return the network with three convolutions in place of each: TensorLy's Tucker-2, ranks by equal errors."""
    import tensorly
    from tensorly.decomposition import partial_tucker

    tensorly.set_backend("pytorch")
    layers = compressible(model)
    energies = {name: mode_energies(layer) for name, layer in layers.items()}

    def ranks(name: str, lost: float) -> list[int]:
        return [rank_for(energy, lost) for energy in energies[name]]

    def cost(name: str, lost: float) -> int:
        outputs, inputs, positions = shape_of(layers[name])
        r, s = ranks(name, lost)
        if positions == 1:
            return min(min(r, s) * (outputs + inputs), outputs * inputs)
        return min(outputs * r + r * s * positions + s * inputs, outputs * inputs * positions)

    lost = allowed_loss(model, budget, layers, cost)
    twins: dict[str, nn.Module] = {}
    for name, layer in layers.items():
        outputs, inputs, positions = shape_of(layer)
        if cost(name, lost) == outputs * inputs * positions:
            continue
        r, s = ranks(name, lost)
        if positions == 1:
            twins[name] = plain_svd(layer, min(r, s))
            continue
        (core, (out, into)), _ = partial_tucker(layer.weight.detach(), rank=[r, s], modes=[0, 1], n_iter_max=10)
        first = nn.Conv2d(inputs, s, 1, bias=False)
        middle = nn.Conv2d(s, r, layer.kernel_size, layer.stride, layer.padding, bias=False)
        last = nn.Conv2d(r, outputs, 1, bias=layer.bias is not None)
        twins[name] = filled([first, middle, last], [into.mT, core, out], layer, layer.weight.dtype)
    return replaced(model, twins)


def cp_als(model: nn.Module, budget: int, batches: Batches) -> nn.Module:
    """Return the network with four convolutions in place of each: TensorLy's CP-ALS, one share for all layers."""
    import tensorly
    from tensorly.decomposition import parafac

    tensorly.set_backend("pytorch")
    layers = compressible(model)

    def rank(name: str, lost: float) -> int:
        outputs, inputs, positions = shape_of(layers[name])
        return max(1, int((1 - lost) * outputs * inputs * positions / term_size(layers[name])))

    def cost(name: str, lost: float) -> int:
        return rank(name, lost) * term_size(layers[name])

    lost = allowed_loss(model, budget, layers, cost)
    twins: dict[str, nn.Module] = {}
    for name, layer in layers.items():
        terms = rank(name, lost)
        if shape_of(layer)[2] == 1:
            twins[name] = plain_svd(layer, min(terms, *matrix_of(layer).shape))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about fits that it cannot improve
            scales, (out, into, rows, columns) = parafac(
                layer.weight.detach(), terms, n_iter_max=30, init="random", random_state=RANDOM_STATE, tol=1e-7
            )
        twins[name] = separable(layer, out * scales, into, rows, columns)
    return replaced(model, twins)


def tensorly_torch(model: nn.Module, budget: int, batches: Batches) -> nn.Module:
    """Return the network in tensorly-torch's Tucker layers, at the ranks that it chooses for a share of each layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own dependencies
        from tltorch import FactorizedConv
    layers = {name: layer for name, layer in compressible(model).items() if isinstance(layer, nn.Conv2d)}
    fixed = parameters(model) - sum(layer.weight.numel() for layer in layers.values())
    share = wanted = (budget - fixed) / (parameters(model) - fixed)

    def made(decompose: bool) -> nn.Module:
        settings = {"factorization": "tucker", "implementation": "reconstructed", "rank": share}
        convert = FactorizedConv.from_conv
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            copies = {n: convert(copy.deepcopy(y), decompose_weights=decompose, **settings) for n, y in layers.items()}
        return replaced(model, copies)

    for _ in range(20):  # the share that it is asked for is not quite the share that it leaves
        count = parameters(made(decompose=False))
        if 0.98 * budget < count <= budget or share < wanted / 10:
            break
        share *= min(0.99, budget / count) if count > budget else 1.01
    return made(decompose=True)


# --- pruning ------------------------------------------------------------------------------------------------------


def torch_pruning(model: nn.Module, budget: int, batches: Batches) -> nn.Module:
    """Return the network with fewer channels: Torch-Pruning, all layers at once, by Taylor scores on the data."""
    import torch_pruning as pruning

    image = batches[0][0][:1]
    # The classes stay, and so do channels that a shortcut without parameters hands on: they belong to each other.
    kept = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1:]
    if any(type(module).__name__ == "PaddedShortcut" for module in model.modules()):
        kept += ["conv1", *(f"{name}.conv2" for name, block in model.named_modules() if hasattr(block, "shortcut"))]

    def pruned(ratio: float) -> nn.Module:
        twin = copy.deepcopy(model).eval()
        pruner = pruning.pruner.BasePruner(
            twin,
            image,
            pruning.importance.GroupTaylorImportance(),
            global_pruning=True,
            pruning_ratio=ratio,
            max_pruning_ratio=0.97,
            ignored_layers=[twin.get_submodule(name) for name in kept],
        )
        twin.zero_grad()
        for images, labels in batches:
            nn.functional.cross_entropy(twin(images), labels).backward()
        pruner.step()
        twin.zero_grad(set_to_none=True)
        return twin

    low, high = 0.0, 0.99
    best = None
    for _ in range(8):
        middle = (low + high) / 2
        found = pruned(middle)
        if parameters(found) <= budget:
            best, high = found, middle
        else:
            low = middle
    if best is None:
        raise ValueError(f"channels alone do not bring this network down to {budget:,} parameters")
    return best


METHODS: dict[str, Method] = {
    "cpnorm": cpnorm_default,
    "cpnorm-outputs": cpnorm_outputs,
    "cpnorm-weights": cpnorm_weights,
    "svd": svd,
    "whitened-svd": whitened_svd,
    "tucker2": tucker2,
    "cp-als": cp_als,
    "tensorly-torch": tensorly_torch,
    "torch-pruning": torch_pruning,
}
