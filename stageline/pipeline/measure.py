"""Times and weighs the items of a model on a device, piece by piece, with random weights.

No checkpoint is read, and at no time does more of the model exist than one item.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from stageline.modules.checkpointing import recomputes
from stageline.pipeline.actions import Kind
from stageline.pipeline.borders import batch_input, batch_output
from stageline.pipeline.cost import Cost, ModelCosts, hand_over_seconds
from stageline.pipeline.live_bytes import PeakBytes, SavedBytes, tensor_bytes
from stageline.pipeline.outline import Outline
from stageline.pipeline.stage_passes import MicroBatch, StagePasses, Tensors, model_inputs

MOST_REPEATS, SHORT_SECONDS = 30, 0.1  # short passes are repeated more often
LossOf = Callable[[torch.Tensor | Tensors, MicroBatch], torch.Tensor]
LossFor = Callable[[nn.Module], LossOf]


@dataclass(frozen=True)
class Workload:
    """What the items are run on.

    Attributes:
        batch: a micro-batch as stage 0 gets it, pixels included.
        loss_for: the last stage -> its loss, (output, micro-batch) -> scalar.
        repeats: timed passes at least; their median counts.
    """

    batch: MicroBatch
    loss_for: LossFor
    device: torch.device
    repeats: int = 5

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens."""
        return tuple(self.batch["input_ids"].shape)


def measure(outline: Outline, workload: Workload) -> ModelCosts:
    """Measures every item once; layers of one kind are measured as one."""
    overhead, border = _measure_overhead(outline, workload)
    ends = {item: _measure_item(outline, item, workload) for item in (0, outline.num_layers + 1)}
    kinds = {kind: _measure_item(outline, kind + 1, workload) for kind in set(outline.kinds)}
    shared = max((found.shared for found in kinds.values()), default=0)
    return ModelCosts(
        overhead=replace(overhead, saved=shared),
        first=_less(ends[0].cost, overhead, outline.first),
        layers=tuple(
            _less(kinds[kind].cost, overhead, facts)
            for kind, facts in zip(outline.kinds, outline.layers, strict=True)
        ),
        last=_less(ends[outline.num_layers + 1].cost, overhead, outline.last),
        tied=outline.tied,
        border=border,
        hand_over=hand_over_seconds(workload.device.type, border),
        batch=tensor_bytes(iter(workload.batch.values())),
        shape=workload.shape,
        front=outline.front,
    )


def measure_stage(
    model: nn.Module, workload: Workload, *, computes: bool = True, sends: bool
) -> Cost:
    """The seconds of a stage as a whole, for comparison with the sum of its items."""
    with _Run(model, workload, computes=computes, sends=sends) as run:
        return _cost_of(run.time())


@dataclass(frozen=True)
class _Found:
    """Attributes: shared: bytes saved that all layers of a stage have in common."""

    cost: Cost
    shared: int = 0


def _measure_overhead(outline: Outline, workload: Workload) -> tuple[Cost, int]:
    """A stage without layers has a forward pass only: its masks need no gradient."""
    with _Run(outline.empty_piece(workload.device), workload) as run:
        border = tensor_bytes(batch_input(run.model, workload.batch))
        return Cost(forward=run.time()[Kind.FORWARD]), border


def _measure_item(outline: Outline, item: int, workload: Workload) -> _Found:
    piece = outline.piece(item, workload.device)
    computes, sends = outline.computes(item), outline.sends(item)
    with _Run(piece, workload, computes=computes, sends=sends) as run:
        times = run.time()
        saved, shared, transient = run.weigh()
    return _Found(replace(_cost_of(times), saved=saved, transient=transient), shared)


def _cost_of(times: dict[Kind, float]) -> Cost:
    backward = times.get(Kind.BACKWARD, 0.0)
    return Cost(
        forward=times[Kind.FORWARD],
        backward=backward,
        input_grad=times.get(Kind.INPUT_GRAD, 0.0),
        # without an input gradient all of the backward pass is weight gradients
        weight_grad=times.get(Kind.WEIGHT_GRAD, backward),
    )


def _less(cost: Cost, overhead: Cost, facts: Cost) -> Cost:
    """The item without what its stage does anyway, and with its parameters."""
    forward = max(cost.forward - overhead.forward, 0.0)
    return facts + replace(cost, forward=forward)


class _Run:
    """Passes of one piece over one micro-batch; a context manager that frees it all.

    Args:
        computes, sends: see `StagePasses`.
    """

    def __init__(
        self, model: nn.Module, workload: Workload, *, computes: bool = False, sends: bool = False
    ) -> None:
        self.model = model
        self.device = workload.device
        self.repeats = workload.repeats
        self.computes, self.sends = computes, sends
        self.passes = StagePasses(
            model, computes_grad=computes, sends_grad=sends, saving=nullcontext
        )
        batch = {name: value.to(self.device) for name, value in workload.batch.items()}
        # pixels are where the images are
        self.batch = {
            name: value
            for name, value in model_inputs(batch).items()
            if model.is_first or not name.startswith("pixel")
        }
        self.inputs = self._random(batch_input(model, batch))
        if model.is_first:
            self.inputs = (batch["input_ids"],)
        self.grads = self._random(batch_output(model, batch)) or None
        self.loss_of = None
        if model.is_last:
            loss_of = workload.loss_for(model)
            self.loss_of = lambda output: loss_of(output, batch)

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.passes.clear()
        self.model = self.passes = self.inputs = self.grads = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(self) -> dict[Kind, float]:
        """Median seconds of each pass that this piece has."""
        times: dict[Kind, list[float]] = {}
        start = time.perf_counter()
        for index in range(MOST_REPEATS + 1):
            if index > self.repeats and time.perf_counter() - start > SHORT_SECONDS:
                break
            for kinds in self._sequences():
                for kind in kinds:
                    seconds = self._timed(kind)
                    if index:  # the first round warms up
                        times.setdefault(kind, []).append(seconds)
        return {kind: statistics.median(values) for kind, values in times.items()}

    def _sequences(self) -> Sequence[Sequence[Kind]]:
        if not self.computes:
            return [[Kind.FORWARD]]
        whole = [Kind.FORWARD, Kind.BACKWARD]
        parted = [Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD]
        return [whole, parted] if self.sends else [whole]

    def weigh(self) -> tuple[int, int, int]:
        """Bytes saved of its own, saved and shared with other layers, and transient.

        Gradients must be there already, as in all but the first micro-batch of a step.
        """
        tensors = [*self.model.parameters(), *self.model.buffers()]
        saved = SavedBytes(iter(tensors))
        hooks = self._mark_shared(saved)
        meter = PeakBytes(self.device)
        with meter.watch():
            with saved.hooks():
                self._forward()
            forward_peak = meter.lap()
            if self.computes:
                self._backward(Kind.BACKWARD)
        for hook in hooks:
            hook.remove()
        if not self.computes:
            return 0, 0, forward_peak
        for value in self.inputs:  # kept until the backward pass, saved or not
            saved.add(value)
        # the input was there before, so it is in no peak
        made = saved.own_bytes + saved.shared_bytes - tensor_bytes(self.inputs)
        transient = max(forward_peak, meter.peak) - made
        return saved.own_bytes, saved.shared_bytes, max(transient, 0)

    def _mark_shared(self, saved: SavedBytes) -> list[torch.utils.hooks.RemovableHandle]:
        """What a layer gets by name (masks, rotary tables) all layers of a stage get."""
        layers = [self.model.get_submodule(self.model.layer_name(i)) for i in self.model.layers]
        is_recomputed = recomputes(self.model)

        def mark(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
            saved.share((args[1:], _but_hidden(kwargs)), is_held=is_recomputed)

        return [layer.register_forward_pre_hook(mark, with_kwargs=True) for layer in layers]

    def _timed(self, kind: Kind) -> float:
        # on a CPU the time of this thread: what other programs take does not count
        clock = time.perf_counter if self.device.type == "cuda" else time.thread_time
        self._synchronize()
        start = clock()
        self._forward() if kind == Kind.FORWARD else self._backward(kind)
        self._synchronize()
        return clock() - start

    def _forward(self) -> None:
        self.passes.forward(0, self.inputs, self.batch, loss_of=self.loss_of)

    def _backward(self, kind: Kind) -> None:
        self.passes.backward(0, kind, self.grads)
        for value in self.inputs:
            value.grad = None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _random(self, metas: Tensors) -> Tensors:
        return tuple(
            torch.randn(meta.shape, dtype=meta.dtype, device=self.device)
            for meta in metas
            if meta.is_floating_point()
        )


def _but_hidden(kwargs: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in kwargs.items() if name != "hidden_states"}
