"""Times and weighs the items of a model on a device, piece by piece, with random weights.

No checkpoint is read, and at no time does more of the model exist than one item. For a device that
is not there, `count` has the same passes without numbers, and its seconds from a data sheet.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from stageline.device import empty_cache, is_accelerator, synchronize
from stageline.modules.quantised import num_weights
from stageline.modules.recompute import recomputes
from stageline.pipeline.live_bytes import PeakBytes, SavedBytes, tensor_bytes
from stageline.pipeline.plan import Kind
from stageline.pipeline.stage_passes import (
    MicroBatch,
    StagePasses,
    Tensors,
    batch_input,
    batch_output,
    model_inputs,
)
from stageline.planner.cost import Cost, ModelCosts, hand_over_seconds
from stageline.stage import Stage

# (stage=1, num_stages=3, partition=[i, 1, n - i - 1], device=...) -> layer i alone
MakePiece = Callable[..., Stage]
FIRST, MIDDLE, LAST = range(3)
MASTER_BYTES = GRADIENT_BYTES = 4  # float32, whatever the weights are


@dataclass(frozen=True)
class Outline:
    """The items of a model without their seconds and activations; no weight is made for it.

    Attributes:
        first, layers, last: parameters of the items.
        kinds: for each layer the first one that is like it.
        tied: what first and last item both hold.
        border: (rows, tokens) -> bytes that travel between two stages.
        widths: for each layer, numbers saved for each token, roughly; 0 where they are recomputed.
        last_width: the same of head and norm.
        has_tower: the first item looks at images.
    """

    make_piece: MakePiece
    first: Cost
    layers: tuple[Cost, ...]
    last: Cost
    kinds: tuple[int, ...]
    tied: Cost
    border: Callable[[int, int], int]
    widths: tuple[int, ...]
    last_width: int
    has_tower: bool = False

    @property
    def front(self) -> str:
        """What the first item holds, for people."""
        return "tower+embedding" if self.has_tower else "embedding"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def trains(self) -> list[bool]:
        """Of all items: first, layers, last."""
        return [item.trains for item in (self.first, *self.layers, self.last)]

    def computes(self, item: int) -> bool:
        """Whether an item has a backward pass."""
        return any(self.trains[: item + 1])

    def sends(self, item: int) -> bool:
        """Whether an item passes a gradient on to the one before."""
        return any(self.trains[:item])

    def piece(self, item: int | None, device: torch.device) -> Stage:
        """An item alone, on a device; None: a stage between others without a layer."""
        stage, partition = MIDDLE, [0, 0, self.num_layers]
        if item in (0, self.num_layers + 1):
            stage, partition = LAST if item else FIRST, [0, self.num_layers, 0]
        elif item is not None:
            partition = [item - 1, 1, self.num_layers - item]
        return self.make_piece(stage=stage, num_stages=3, partition=partition, device=device)


def outline_of(make_piece: MakePiece) -> Outline:
    """Looks at a model on the meta device."""
    meta = torch.device("meta")
    whole = make_piece(stage=0, num_stages=1, partition=None, device=meta)
    num_layers = whole.num_layers()
    ends = [
        make_piece(stage=stage, num_stages=3, partition=[0, num_layers, 0], device=meta)
        for stage in (FIRST, LAST)
    ]
    first, last = (dict(end.named_parameters()) for end in ends)
    paths = map(whole.layer_name, range(num_layers))
    layers: list[dict[str, torch.Tensor]]
    layers = [dict(whole.get_submodule(path).named_parameters()) for path in paths]
    is_recomputed = recomputes(whole)
    return Outline(
        make_piece=make_piece,
        first=parameter_cost(first.values()),
        layers=tuple(parameter_cost(layer.values()) for layer in layers),
        last=parameter_cost(last.values()),
        kinds=_kinds(whole, layers, is_after_trained=any(p.requires_grad for p in first.values())),
        tied=parameter_cost(last[name] for name in first.keys() & last.keys()),
        border=lambda *shape: tensor_bytes(ends[1].get_example_input(*shape)),
        widths=tuple(0 if is_recomputed else token_width(layer) for layer in layers),
        last_width=token_width(last),
        has_tower=bool(getattr(getattr(whole, "paths", None), "vision_tower", "")),
    )


def token_width(parameters: Mapping[str, torch.Tensor]) -> int:
    """Numbers that matrices take and give for each token: about what their layer saves.

    Experts count once each token, whatever their number.
    """
    plain = {name: p for name, p in parameters.items() if ".lora." not in name}
    return sum(sum(p.shape[-2:]) for p in plain.values() if p.dim() in (2, 3))


def parameter_cost(parameters: Iterable[torch.Tensor]) -> Cost:
    """Counts and lasting bytes of some parameters."""
    found = list(parameters)
    trained = [parameter for parameter in found if parameter.requires_grad]
    num_trainable = sum(parameter.numel() for parameter in trained)
    num_half = sum(parameter.numel() for parameter in trained if parameter.element_size() == 2)
    return Cost(
        num_parameters=sum(map(num_weights, found)),
        num_trainable=num_trainable,
        weights=tensor_bytes(found),
        gradients=num_trainable * GRADIENT_BYTES,
        masters=num_half * MASTER_BYTES,
        trains=bool(trained),
    )


def _kinds(
    whole: Stage, layers: list[dict[str, torch.Tensor]], *, is_after_trained: bool
) -> tuple[int, ...]:
    """Layers are alike if shapes, settings and what is trained in and before them are."""
    first_of: dict[Hashable, int] = {}
    kinds = []
    for index, layer in enumerate(layers):
        shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.items())
        key = (shapes, whole.layer_kind(index), is_after_trained)
        kinds.append(first_of.setdefault(key, index))
        is_after_trained = is_after_trained or any(p.requires_grad for p in layer.values())
    return tuple(kinds)


MOST_REPEATS, SHORT_SECONDS = 30, 0.1  # short passes are repeated more often
LossOf = Callable[[torch.Tensor | Tensors, MicroBatch], torch.Tensor]
LossFor = Callable[[Any], LossOf]


@dataclass(frozen=True)
class Workload:
    """What the items are run on.

    Attributes:
        batch: a micro-batch as stage 0 gets it, pixels included.
        loss_for: the last stage -> its loss, (output, micro-batch) -> scalar.
        repeats: timed passes at least; their median counts.
        flops_per_second: set by `count`: passes are counted, not timed.
    """

    batch: MicroBatch
    loss_for: LossFor
    device: torch.device
    repeats: int = 5
    flops_per_second: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens."""
        rows, tokens = self.batch["input_ids"].shape
        return rows, tokens


def measure(outline: Outline, workload: Workload) -> ModelCosts:
    """Measures every item once; layers of one kind are measured as one."""
    overhead, border = _measure_overhead(outline, workload)
    ends = {item: _measure_item(outline, item, workload) for item in (0, outline.num_layers + 1)}
    kinds = {kind: _measure_item(outline, kind + 1, workload) for kind in set(outline.kinds)}
    shared = max((shared for _, shared in kinds.values()), default=0)
    on_cpu = workload.device.type == "cpu" and not workload.flops_per_second
    return ModelCosts(
        overhead=replace(overhead, saved=shared),
        first=_less(ends[0][0], overhead, outline.first),
        layers=tuple(
            _less(kinds[kind][0], overhead, facts)
            for kind, facts in zip(outline.kinds, outline.layers, strict=True)
        ),
        last=_less(ends[outline.num_layers + 1][0], overhead, outline.last),
        tied=outline.tied,
        border=border,
        hand_over=hand_over_seconds(border, on_cpu=on_cpu),
        batch=tensor_bytes(iter(workload.batch.values())),
        shape=workload.shape,
        front=outline.front,
    )


def count(outline: Outline, workload: Workload, *, flops_per_second: float) -> ModelCosts:
    """The costs on a GPU that is not there: exact bytes, and the seconds of its data sheet.

    Tensors have shapes and no numbers, so a model of any size is counted on any machine. No real
    pass is as fast.

    Args:
        workload: on the CPU, whose attention saves what that of a GPU does.
        flops_per_second: of matrix products in the type of the weights.

    Raises:
        DynamicOutputShapeException, DataDependentOutputException: of torch; the model looks at
            numbers in its forward pass, as most vision towers do.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = {name: torch.zeros_like(value) for name, value in workload.batch.items()}
        counted = replace(workload, batch=batch, flops_per_second=flops_per_second)
        return measure(replace(outline, make_piece=_filled(outline.make_piece)), counted)


def _filled(make_piece: MakePiece) -> MakePiece:
    """Builds pieces on meta, then gives them tensors of the mode around; tied ones stay tied."""

    def make(*, device: torch.device, **others: Any) -> Stage:
        piece = make_piece(device=torch.device("meta"), **others)
        made: dict[int, torch.Tensor] = {}
        for store in (s for m in piece.modules() for s in (m._parameters, m._buffers)):
            for name, old in store.items():
                if old is None:
                    continue
                new = torch.empty(old.shape, dtype=old.dtype, device=device)
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=old.requires_grad)
                store[name] = made.setdefault(id(old), new)  # type: ignore[assignment]
        return piece

    return make


# what torch's counter leaves out, by the shapes of the arguments: attention of a CPU, and experts,
# of which each row meets one
_ATEN = torch.ops.aten
_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda *qkv, **_: sdpa_flop_count(*qkv[:3]),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda *gqkv, **_: (
        sdpa_backward_flop_count(*gqkv[:4])
    ),
    _ATEN._grouped_mm: lambda rows, weights, *_, **__: 2 * rows[0] * rows[1] * weights[-1],
}


def _measure_overhead(outline: Outline, workload: Workload) -> tuple[Cost, int]:
    """A stage without layers has a forward pass only: its masks need no gradient."""
    with _Run(outline.piece(None, workload.device), workload) as run:
        border = tensor_bytes(batch_input(run.model, workload.batch))
        return Cost(forward=run.time()[Kind.FORWARD]), border


def _measure_item(outline: Outline, item: int, workload: Workload) -> tuple[Cost, int]:
    """The item's cost, and the bytes saved that all layers of a stage have in common."""
    piece = outline.piece(item, workload.device)
    computes, sends = outline.computes(item), outline.sends(item)
    with _Run(piece, workload, computes=computes, sends=sends) as run:
        times = run.time()
        saved, shared, transient = run.weigh()
    return replace(_cost_of(times), saved=saved, transient=transient), shared


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
    """Passes of one piece over one micro-batch; a context manager that frees it all."""

    def __init__(
        self, model: Stage, workload: Workload, *, computes: bool = False, sends: bool = False
    ) -> None:
        self.model = model
        self.device = workload.device
        self.repeats, self.flops_per_second = workload.repeats, workload.flops_per_second
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
        del self.model, self.passes, self.inputs, self.grads
        gc.collect()
        empty_cache()

    def time(self) -> dict[Kind, float]:
        """Median seconds of each pass that this piece has."""
        if self.flops_per_second is not None:
            passes = [kind for kinds in self._sequences() for kind in kinds]
            return {kind: self._flops(kind) / self.flops_per_second for kind in passes}
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
        saved = SavedBytes(itertools.chain(self.model.parameters(), self.model.buffers()))
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
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            saved.share((args[1:], others), is_held=is_recomputed)

        return [layer.register_forward_pre_hook(mark, with_kwargs=True) for layer in layers]

    def _timed(self, kind: Kind) -> float:
        # on a CPU the time of this thread: what other programs take does not count
        clock = time.perf_counter if is_accelerator(self.device) else time.thread_time
        synchronize(self.device)
        start = clock()
        self._forward() if kind == Kind.FORWARD else self._backward(kind)
        synchronize(self.device)
        return clock() - start

    def _flops(self, kind: Kind) -> int:
        with FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS) as counter:
            self._forward() if kind == Kind.FORWARD else self._backward(kind)
        return counter.get_total_flops()

    def _forward(self) -> None:
        self.passes.forward(0, self.inputs, self.batch, loss_of=self.loss_of)

    def _backward(self, kind: Kind) -> None:
        self.passes.backward(0, kind, self.grads)
        for value in self.inputs:
            value.grad = None

    def _random(self, metas: Tensors) -> Tensors:
        return tuple(
            torch.randn(meta.shape, dtype=meta.dtype, device=self.device)
            for meta in metas
            if meta.is_floating_point()
        )


ROUND_TRIPS = 7


def transfer_seconds(device: torch.device, num_bytes: int) -> float | None:
    """What a tensor takes to the next rank of this machine, timed; None: it has one accelerator.

    With more, a copy to the next one, where a context stays; on a CPU a message through gloo.
    """
    if not is_accelerator(device):
        return _gloo_seconds(num_bytes)
    if torch.accelerator.device_count() < 2:
        return None
    here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty_like(here, device=torch.device(device.type, 1 - min(1, device.index or 0)))
    took = []
    for _ in range(ROUND_TRIPS + 1):
        synchronize(device)
        start = time.perf_counter()
        there.copy_(here)
        synchronize(device)
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def _gloo_seconds(num_bytes: int) -> float:
    """There and back between two threads, halved."""
    store, limit = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(1) as other:
        joined = other.submit(dist.ProcessGroupGloo, store, 1, 2, limit)
        ours: Any = dist.ProcessGroupGloo(store, 0, 2, limit)  # its stub lacks send and recv
        theirs: Any = joined.result()

        def echo() -> None:
            tensor = torch.empty(num_bytes, dtype=torch.uint8)
            for _ in range(ROUND_TRIPS + 1):
                theirs.recv([tensor], 0, 0).wait()
                theirs.send([tensor], 0, 0).wait()

        echoed = other.submit(echo)
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        took = []
        for _ in range(ROUND_TRIPS + 1):
            start = time.perf_counter()
            ours.send([tensor], 1, 0).wait()
            ours.recv([tensor], 1, 0).wait()
            took.append((time.perf_counter() - start) / 2)
        echoed.result()
    return statistics.median(took[1:])


WeighAnswers = Callable[[Stage], Cost]  # a piece on meta -> its `cache` and `answering`


def answering_costs(costs: ModelCosts, outline: Outline, weigh: WeighAnswers) -> ModelCosts:
    """The costs of a run whose model answers before it trains.

    A tower looks at one prompt at a time, and at no less when it trains: what it holds then counts.
    """
    items = {0, *(kind + 1 for kind in outline.kinds), outline.num_layers + 1}
    try:
        found = {item: weigh(outline.piece(item, torch.device("meta"))) for item in items}
    except Exception as error:  # a forward pass that looks at numbers, or has no kernel on meta
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return replace(costs, not_counted=f"keys and values of the answers ({why})")

    def added(cost: Cost, item: int) -> Cost:
        return replace(cost, cache=found[item].cache, answering=found[item].answering)

    first = added(costs.first, 0)
    if outline.has_tower:
        looking = costs.first.saved + costs.first.transient
        first = replace(first, answering=max(first.answering, looking))
    layers = zip(costs.layers, outline.kinds, strict=True)
    return replace(
        costs,
        first=first,
        layers=tuple(added(cost, kind + 1) for cost, kind in layers),
        last=added(costs.last, outline.num_layers + 1),
    )


BYTES_OF_SCORES = 4  # the loss is computed in float32


def estimate(outline: Outline, *, shape: tuple[int, int]) -> ModelCosts:
    """The costs for micro-batches of `shape` (rows, tokens), without running anything.

    For the check at the start of a run: bytes of weights and their state are exact, there are no
    seconds, and activations are rather too small than too large, so that nothing is refused that
    would have fitted. `measure` knows better.
    """
    rows, tokens = shape
    border = outline.border(rows, tokens)
    # weights and hidden states have one type: bytes of an element of either
    total = sum((*outline.layers, outline.first), Cost())
    item_size = max(1, total.weights // max(1, total.num_parameters))
    last_item = outline.num_layers + 1
    saved_last = rows * tokens * outline.last_width * BYTES_OF_SCORES
    layers = tuple(
        replace(facts, saved=border + rows * tokens * width * item_size)
        if outline.computes(index + 1)
        else facts
        for index, (facts, width) in enumerate(zip(outline.layers, outline.widths, strict=True))
    )
    return ModelCosts(
        overhead=Cost(),
        first=outline.first,
        layers=layers,
        last=replace(outline.last, saved=saved_last if outline.computes(last_item) else 0),
        tied=outline.tied,
        border=border,
        batch=0,
        shape=shape,
        front=outline.front,
    )
