"""Run one training step: compiled and recorded as a CUDA graph on a GPU, eager elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cpnorm
from cpnorm.lab.data.images import ImageSet, normalize
from cpnorm.lab.training import compiling
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.forward import (
    Loss,
    Parts,
    batch_loss,
    batch_outputs,
    compiled_loss,
    compiled_parts,
    loss_of,
    use_arithmetic,
)
from cpnorm.lab.training.prebuilt import (
    PrebuiltWeights,
    compiled_rebuild,
    front_and_back,
    rebuilt_weight,
    trained_layers,
    training_paths,
)

log = logging.getLogger("cpnorm.lab")

COMPILE_FROM_STEPS = 50_000  # compiling takes 10 s and more, and saves 0.1 ms a step (LeNet-like) and more
# A network whose canonical layers are all prebuilt is compiled once for all ranks: it pays for a fine-tuning too.
COMPILE_PREBUILT_FROM_STEPS = 5_000
COMPILE_FROM_TESTS = 500_000  # images a run is tested on in all its epochs; reckoned, not measured: 2 us less for each
TEST_BATCH = 2500  # images
WARM_UP_STEPS = 3  # before a capture, so that libraries have chosen their kernels and buffers exist


class Step:
    """Train on one batch: gather, augment, forward, backward, update, renormalise, without a copy to the host."""

    mode = "eager"

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: ImageSet,  # on the device
        *,
        precision: str,
        compile: bool,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.config, self.model, self.optimizer, self.data = config, model, optimizer, data
        self.precision, self.rank, self.world = precision, rank, world
        self.device = data.train_labels.device
        self.on_gpu = self.device.type == "cuda"
        augment = config.augment
        if augment == "auto":
            augment = "crop-flip" if config.data in ("cifar10", "svhn") else "none"
        self.recipe = (data.mean, data.std, augment, config.label_smoothing, precision)
        self.runner: nn.Module = model
        self.join()
        self.layers = list(cpnorm.canonical_layers(model).values())
        self.network: cpnorm.NetworkWeights | None = None
        if self.layers and config.renormalize:
            cpnorm.renormalize(model)
            self.network = cpnorm.NetworkWeights(model, by_plan=False)  # a plan depends on the inputs before
            self.network.trust_columns()

        count = len(data.train_labels)
        self.order = torch.arange(count, device=self.device)
        self.offsets = torch.arange(config.batch_size, device=self.device)
        self.cursor = torch.zeros((), dtype=torch.long, device=self.device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, right answers, images
        self.random = torch.Generator(self.device)  # a run's own, whatever others do meanwhile
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.captures = compile and self.on_gpu and world == 1
        self.kernels: list[cpnorm.FusedTrainStep] | None = None  # not asked for yet
        self.prebuilt: PrebuiltWeights | None = None  # while a captured step is recorded
        self.recorded: list[PrebuiltWeights] = []  # whose tensors the graphs read
        self.test_prebuilt: PrebuiltWeights | None = None  # as it was recorded
        self.test_compiled = False
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.on_gpu else None
        self._beside = (
            torch.cuda.Stream(self.device) if self.on_gpu else None
        )  # for work whose results are needed later

    def join(self) -> None:
        """Average gradients with the other processes from here on, if there are any; they join, too."""
        if self.world > 1 and self.runner is self.model:
            self.runner = DistributedDataParallel(self.model)

    def leave(self) -> None:
        """Let go of the group of processes, so that it can be taken down; ``join`` before the next step."""
        self.runner = self.model

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run the block on this run's stream, with its own arithmetic and random numbers."""
        use_arithmetic(self.precision)
        if self._stream is None:
            yield
            return
        default = torch.cuda.default_generators[self.device.index or 0]
        others = default.graphsafe_get_state()
        default.graphsafe_set_state(self.random)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            default.graphsafe_set_state(others)

    def begin_epoch(self, epoch: int) -> None:
        """Draw the order of the images and reseed; both depend on seed and epoch alone."""
        self.order.copy_(self._order(epoch))
        self.cursor.zero_()
        self.sums.zero_()
        self._take_notice()
        self.random.manual_seed((self.config.seed * 100_003 + epoch) * 1_009 + self.rank)

    def _take_notice(self) -> None:
        """Update what the next step starts from, after something other than a step changed the parameters."""
        for group in self.kernels or ():
            group.refresh()
        if self.network:
            self.network.trust_columns()

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed * 100_003 + epoch)
        return torch.randperm(len(self.order), generator=generator)

    def __call__(self, batch: int) -> None:
        """Train on batch number ``batch`` of the epoch."""
        start = batch * self.config.batch_size
        size = min(self.config.batch_size, len(self.order) - start)
        if self.captures and size not in self.graphs:
            self._capture(size)
        if size in self.graphs:
            self.graphs[size].replay()
        elif self.on_gpu:
            self._take(size, batch_loss)
        else:
            others = torch.get_rng_state()
            torch.set_rng_state(self.random.get_state())
            self._take(size, batch_loss)
            self.random.set_state(torch.get_rng_state())
            torch.set_rng_state(others)

    def _take(self, size: int, loss: Loss, parts: Parts | None = None) -> None:
        """Take one step; with ``parts``, train the last layers while the backward pass continues."""
        data, offsets = self.data, self.offsets[:size][self.rank :: self.world]
        *recipe, smoothing, precision = self.recipe
        self.optimizer.zero_grad(set_to_none=True)
        if self.network:
            self.network.enabled = self.prebuilt is None
        if self.prebuilt:
            self.prebuilt.hold()
        batch = (data.train_images, data.train_labels, self.order, self.cursor, offsets)
        if parts:
            front, back = front_and_back(self.model)
            outputs, answers = parts[0](front, *batch, *recipe, precision)
            between = outputs.detach().requires_grad_()
            summed, totals = parts[1](back, between, answers, smoothing, precision)
        else:
            summed, totals = loss(self.runner, *batch, *self.recipe)
        objective = summed * (self.world / size)  # processes average their gradients, whatever their share of the batch
        if self.config.lambda_l1:
            objective = objective + self.config.lambda_l1 * cpnorm.lambda_penalty(self.model)
        objective.backward()
        if parts:
            with self._train_beside():
                outputs.backward(between.grad)
        if self.prebuilt:
            self.prebuilt.backward(early_done=bool(parts))
            self.prebuilt.release()
        self.optimizer.step()
        by_kernels = sum(len(group.layers) for group in self.prebuilt.trained) if self.prebuilt else 0
        if self.network and by_kernels < len(self.layers):
            self.network.renormalize()
        self.cursor += size
        self.sums += totals

    @contextmanager
    def _train_beside(self) -> Iterator[None]:
        """Train the last layers on another stream while the block runs."""
        early = self.prebuilt.early if self.prebuilt else None
        assert early
        if self._beside is None:
            early.step()
            yield
            return
        here = torch.cuda.current_stream()
        self._beside.wait_stream(here)
        with torch.cuda.stream(self._beside):
            early.step()
        yield
        here.wait_stream(self._beside)

    def totals(self) -> Tensor:  # (3,)
        """Return loss, right answers and images of the epoch so far, summed over processes."""
        sums = self.sums.clone()
        if self.world > 1:
            torch.distributed.all_reduce(sums)
        return sums

    # --- testing ---

    def tested_fast(self, images: Tensor, labels: Tensor) -> Tensor:  # (3,)
        """Return what ``tested`` returns, with the test compiled if the steps are."""
        if self.test_compiled:
            try:
                with torch.no_grad(), compiling.ready(self.model):
                    self._take_notice()
                    if self.test_prebuilt:
                        self.test_prebuilt.hold()
                    return self.tested(self.model, images, labels, compiled_loss())
            except Exception as error:  # as in _capture
                self.test_compiled = False
                log.warning("tests not compiled: %s", "; ".join(str(error).split("\n")[:3]) or repr(error))
            finally:
                if self.test_prebuilt:
                    self.test_prebuilt.release()
        return self.tested(self.model, images, labels)

    @torch.no_grad()
    def tested(
        self, model: nn.Module, images: Tensor, labels: Tensor, loss_function: Loss = batch_loss
    ) -> Tensor:  # (3,)
        """Return loss, right answers and images, summed on the device and over processes."""
        mean, std, *_ = self.recipe
        recipe = (mean, std, "none", 0.0, self.precision)
        order, nowhere = torch.arange(len(labels), device=self.device), torch.zeros_like(self.cursor)
        sums = torch.zeros_like(self.sums)
        model.eval()
        for part in order[self.rank :: self.world].split(TEST_BATCH):
            function = loss_function if len(part) == TEST_BATCH else batch_loss  # one size is compiled
            sums += function(model, images, labels, order, nowhere, part, *recipe)[1]
        model.train()
        if self.world > 1:
            torch.distributed.all_reduce(sums)
        return sums

    # --- capturing ---

    def _capture(self, size: int) -> None:
        """Record the step for this batch size; log what cannot be compiled or recorded, and do without it."""
        steps = self.config.epochs * len(self.order) // self.config.batch_size
        whole = size == self.config.batch_size  # not the last, smaller batch of an epoch
        every = steps < COMPILE_FROM_STEPS  # every layer is prebuilt
        with self.stream():  # first of all: what stays must not lie scattered among what is freed again
            trained = self._trained(early=not every)
        for compiles, prebuilds in ((True, True), (True, False), (False, True), (False, False)):
            pays = whole and steps >= (COMPILE_PREBUILT_FROM_STEPS if prebuilds else COMPILE_FROM_STEPS)
            if (compiles and not pays) or (prebuilds and not self.layers):
                continue
            mode = ("compiled, " if compiles else "") + "CUDA graph" + (", prebuilt weights" if prebuilds else "")
            loss, parts = compiled_loss() if compiles else batch_loss, None
            before = self._snapshot()
            try:
                with self.stream(), compiling.ready(self.model) if compiles else nullcontext():
                    if prebuilds:
                        images = normalize(self.data.train_images[:size], *self.recipe[:2], torch.float32)
                        paths = training_paths(self.model, images)
                        if every and compiles:
                            paths = dict.fromkeys(paths, "rebuild")
                        rebuild = compiled_rebuild() if compiles and not every else rebuilt_weight
                        self.prebuilt = PrebuiltWeights(paths, self.precision, rebuild, trained)
                        if self.prebuilt.early:
                            parts = compiled_parts() if compiles else (batch_outputs, loss_of)
                        self._take_notice()
                    for _ in range(WARM_UP_STEPS):
                        self._take(size, loss, parts)
                        self.cursor.zero_()
                    # Gradients that do not exist yet are written, not added to, by the captured backward pass.
                    self.optimizer.zero_grad(set_to_none=True)
                    self.graphs[size] = self._recorded(size, loss, parts)
                if self.prebuilt:
                    self.recorded.append(self.prebuilt)
                if whole:
                    self.mode, self.test_prebuilt = mode, self.prebuilt
                    tests = self.config.epochs * len(self.data.test_labels)
                    self.test_compiled = compiles and tests >= COMPILE_FROM_TESTS
                return
            except Exception as error:  # any of a dozen kinds, from the compiler down to the driver
                cause: BaseException = error
                while cause.__context__ is not None:  # what broke a capture is reported only as its context
                    cause = cause.__context__
                log.warning("training step not %s: %s", mode, "; ".join(str(cause).split("\n")[:3]) or repr(cause))
            finally:
                if self.prebuilt:
                    self.prebuilt.release()
                    self.prebuilt = None
                torch.cuda.synchronize()
                self._restore(before)
                self._take_notice()
        self.captures = False

    def _trained(self, *, early: bool) -> list[cpnorm.FusedTrainStep]:
        """Return the layers that kernels train; found once and shared by the graphs of all batch sizes."""
        if self.kernels is None:
            self.kernels = []
            if self.config.lambda_l1 == 0:  # the kernels have lambdas' gradients to themselves
                try:
                    self.kernels = trained_layers(self.model, self.optimizer, self.precision, early=early)
                except (ImportError, ValueError) as error:
                    log.warning("canonical layers trained by torch instead of kernels: %s", error)
        return self.kernels

    def _recorded(self, size: int, loss: Loss, parts: Parts | None) -> torch.cuda.CUDAGraph:
        """Return the step as a CUDA graph that shares no memory with those of other runs.

        Matrix products write partial sums to a workspace that belongs to their stream, and torch has 32 streams in all:
        those of several runs are the same ones. Forgotten before the recording, a workspace is taken from the memory of
        the graph itself; forgotten after it, it stays there alone.
        """
        graph = torch.cuda.CUDAGraph()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._take(size, loss, parts)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return graph

    def _snapshot(self) -> dict[str, Any]:
        tensors = [*self.model.parameters(), *self.model.buffers(), self.cursor, self.sums]
        state = self.optimizer.state
        return {
            "tensors": [(t, t.detach().clone()) for t in tensors],
            "optimizer": {p: {k: v.clone() for k, v in s.items() if isinstance(v, Tensor)} for p, s in state.items()},
            "random": self.random.get_state(),
        }

    @torch.no_grad()
    def _restore(self, before: dict[str, Any]) -> None:
        for tensor, value in before["tensors"]:
            tensor.copy_(value)
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):  # state the warm-up made starts from zero
                    value.copy_(before["optimizer"].get(parameter, {}).get(key, torch.zeros_like(value)))
        self.random.set_state(before["random"])

    # --- saving ---

    def state(self) -> dict[str, Any]:
        """Return the position in the epoch and the random state."""
        return {"cursor": self.cursor, "sums": self.sums, "random": self.random.get_state()}

    def load_state(self, state: dict[str, Any], epoch: int) -> None:
        """Continue from ``state()`` in this epoch."""
        self.order.copy_(self._order(epoch))
        self.cursor.copy_(state["cursor"])
        self.sums.copy_(state["sums"])
        self.random.set_state(state["random"].cpu())
        self._take_notice()
