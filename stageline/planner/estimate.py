"""Estimate what the parts of a model cost: bytes of weights, caches and passes, and seconds.

The one memory estimate, for three questions: whether a training run fits and how its layers are
placed (`measure` runs each item, `estimate` runs nothing), whether an inference model fits its
devices (`measure_model`), and what a decode step reads (`decode_bytes`). What a device really held
is in training/memory.py.

An item is what is never split: all that comes before the layers (embedding, vision tower,
projector), each layer, and all that comes behind them (final norm, head, loss).
"""

import functools
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.base import get_keys_to_not_convert

from stageline.device import available_memory, empty_cache, is_accelerator, synchronize
from stageline.errors import UserError
from stageline.model_folder import attention_options, called_alike, is_of_library
from stageline.modules.lora import innermost
from stageline.modules.quantised import plain_shape
from stageline.modules.recompute import recomputes
from stageline.pipeline.live_bytes import PeakBytes, SavedBytes, tensor_bytes
from stageline.pipeline.plan import Action, GradFlow, Kind, drop_dead_backward, grad_flow
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.stage_passes import (
    MicroBatch,
    StagePasses,
    Tensors,
    batch_input,
    batch_output,
    model_inputs,
)
from stageline.stage import Stage

META = torch.device("meta")


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of one item, or of several on one stage, with one micro-batch.

    Attributes:
        forward, backward: seconds; the backward pass in one piece.
        input_grad, weight_grad: seconds of the backward pass in two.
        num_parameters, num_trainable: elements.
        weights, gradients, masters: bytes; a parameter in half precision has a float32 master.
        saved: bytes that the backward pass waits for.
        transient: what the fullest moment of a pass has beyond those.
        cache: keys and values of the answers that are drawn at once, of a run whose model answers.
        beyond: what a cache with a window holds of a long prompt until the first step.
        answering: what the fullest moment of a pass that answers has beyond the cache.
        trains: some parameter is trained.
    """

    forward: float = 0.0
    backward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    num_parameters: int = 0
    num_trainable: int = 0
    weights: int = 0
    gradients: int = 0
    masters: int = 0
    saved: int = 0
    transient: int = 0
    cache: int = 0
    beyond: int = 0
    answering: int = 0
    trains: bool = False

    @property
    def while_answering(self) -> int:
        """Bytes at the fullest moment of a model that only answers."""
        return self.weights + self.cache + self.beyond + self.answering

    def __add__(self, other: "Cost") -> "Cost":
        """Add two costs on one stage, this one first.

        Passes come one after the other, so the larger transient counts; that of the first item
        comes when the other one has not saved yet, or is through with its backward pass.
        """
        return Cost(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMMED},
            transient=max(self.transient - other.saved, other.transient),
            answering=max(self.answering, other.answering),
            trains=self.trains or other.trains,
        )

    def seconds(self, *, splits_backward: bool = False) -> float:
        """The least that forward and backward pass of a micro-batch take.

        Also where a schedule parts it, the backward pass of a stage that sends no gradient is one.
        """
        split = self.input_grad + self.weight_grad
        return self.forward + (min(split, self.backward) if splits_backward else self.backward)


_NOT_SUMMED = ("transient", "answering", "trains")
_SUMMED = [item.name for item in fields(Cost) if item.name not in _NOT_SUMMED]


# Between two processes of one machine; assumed where not measured: this ranks ways to run that have
# passes of the same time, and the way with fewer hand-overs is faster.
CPU_LATENCY, CPU_BYTES_PER_SECOND = 1e-3, 1e9
LATENCY, BYTES_PER_SECOND = 2e-5, 2e10  # between accelerators


def hand_over_seconds(num_bytes: int, *, on_cpu: bool) -> float:
    """Return the seconds a tensor takes from a rank to the next, roughly."""
    if on_cpu:
        return CPU_LATENCY + num_bytes / CPU_BYTES_PER_SECOND
    return LATENCY + num_bytes / BYTES_PER_SECOND


@dataclass(frozen=True)
class ModelCosts:
    """All items of a model, for micro-batches of one shape.

    Attributes:
        overhead: what each stage does once however many layers it has: masks, positions.
        first: before the layers.
        last: behind the layers, with the loss.
        tied: weights that first and last stage both hold; on one rank they are held once.
        border: bytes that travel between two stages.
        batch: bytes of a micro-batch as stage 0 gets it.
        shape: rows and tokens.
        hand_over: seconds from a rank to the next.
        front: what `first` is, for people.
        not_counted: what is not in these costs and why, for people.
    """

    overhead: Cost
    first: Cost
    layers: tuple[Cost, ...]
    last: Cost
    tied: Cost = Cost()
    border: int = 0
    batch: int = 0
    shape: tuple[int, int] = (1, 1)
    hand_over: float = 0.0
    front: str = "embedding"
    not_counted: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def stage(self, start: int, end: int) -> Cost:
        """Return the cost of a stage with layers `start` to `end` - 1, including its model ends."""
        return self._stages[start, end]

    def stages(self, partition: Sequence[int]) -> list[Cost]:
        """Return the cost of each stage of a partition."""
        ends = itertools.accumulate(partition)
        return [self.stage(end - count, end) for count, end in zip(partition, ends)]

    @cached_property
    def _stages(self) -> dict[tuple[int, int], Cost]:
        found = {}
        for start in range(self.num_layers):
            cost = self.overhead + self.first if start == 0 else self.overhead
            for end in range(start + 1, self.num_layers + 1):
                cost = cost + self.layers[end - 1]
                is_last = end == self.num_layers
                # a stage keeps the tensors it sends on: the backward pass begins there
                sent = Cost(saved=0 if is_last or not cost.saved else self.border)
                found[start, end] = cost + (self.last if is_last else sent)
        return found


def flow_of(stages: Sequence[Cost]) -> GradFlow:
    """Return what each stage has to do in the backward pass."""
    return grad_flow([stage.trains for stage in stages])


def durations_of(stages: Sequence[Cost]) -> Mapping[tuple[int, Kind], float]:
    """Return the seconds of every pass of every stage, for `simulate`."""
    return {
        (index, kind): getattr(stage, kind.name.lower())
        for index, stage in enumerate(stages)
        for kind in Kind
    }


@dataclass(frozen=True)
class MemoryRules:
    """Memory figures that do not follow from the model.

    Attributes:
        optimizer_bytes: state of the optimizer for each trained element.
        update_bytes: peak of an update, without that state, for each trained element.
        shards: replicas that share weights and optimizer state; in a step each has whole weights
            and gradients in addition to its shares.
        teacher: (stage, stages) -> bytes of a teacher next to it; None: there is none.
    """

    optimizer_bytes: float = 8.0
    update_bytes: float = 0.0
    shards: int = 1
    teacher: Callable[[int, int], int] | None = None


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        masters: float32 copies of weights in half precision.
        activations: at the fullest moment of a step, the running pass included.
        inputs: micro-batches that wait on the device, and tensors under way between ranks.
        update: of the optimizer while it works; activations are gone by then.
        cache: keys and values, while the model answers; gone before it trains.
        answering: of a pass that answers, without the cache.
        teacher: frozen weights of a teacher, and its distributions of a step.
    """

    weights: int
    gradients: int
    masters: int
    optimizer: int
    activations: int
    inputs: int
    update: int
    cache: int = 0
    answering: int = 0
    teacher: int = 0

    @property
    def state(self) -> int:
        """Bytes that training adds to the weights."""
        return self.gradients + self.masters + self.optimizer

    @property
    def lasting(self) -> int:
        """Bytes that are in use at each moment of a step."""
        return self.weights + self.state + self.teacher

    @property
    def peak(self) -> int:
        """The largest sum of bytes at one time, over the phases of a step."""
        return self.lasting + max(self.training, self.answers)

    @property
    def answers(self) -> int:
        """The peak while the model answers, without `lasting`."""
        return self.cache + self.answering

    @property
    def training(self) -> int:
        """The peak in passes that train and in the update, without `lasting`."""
        return self.inputs + max(self.activations, self.update)


def rank_memory(
    costs: ModelCosts,
    partition: Sequence[int],
    schedule: Schedule,
    *,
    num_micro_batches: int,
    rules: MemoryRules,
) -> list[RankMemory]:
    """The memory of every rank of the pipeline."""
    stages = costs.stages(partition)
    orders = drop_dead_backward(schedule.orders(num_micro_batches), flow_of(stages))
    return [
        memory_of(
            costs,
            {stage: stages[stage] for stage in schedule.stages_of(rank)},
            num_stages=len(stages),
            activations=peak_activations(order, stages),
            num_micro_batches=num_micro_batches,
            rules=rules,
        )
        for rank, order in enumerate(orders)
    ]


def memory_of(
    costs: ModelCosts,
    held: Mapping[int, Cost],
    *,
    num_stages: int,
    activations: int,
    num_micro_batches: int,
    rules: MemoryRules,
) -> RankMemory:
    """The memory of a rank that holds these stages."""
    total = sum(held.values(), Cost())
    has_both_ends = 0 in held and num_stages - 1 in held
    tied = costs.tied if has_both_ends else Cost()
    num_trained = total.num_trainable - tied.num_trainable
    weights, masters = total.weights - tied.weights, total.masters - tied.masters
    shares = 0
    if rules.shards > 1:  # the share of a weight in half precision is its float32 master
        shares = (weights - masters // 2) // rules.shards
    # a tensor arrives while another is in use: one for each border
    num_borders = sum((stage > 0) + (stage < num_stages - 1) for stage in held)
    return RankMemory(
        weights=weights + shares,
        gradients=total.gradients - tied.gradients,
        masters=masters // rules.shards,
        optimizer=int(num_trained * rules.optimizer_bytes) // rules.shards,
        activations=activations,
        inputs=(costs.batch * num_micro_batches if 0 in held else 0) + num_borders * costs.border,
        update=int(num_trained * rules.update_bytes) // rules.shards,
        cache=total.cache,
        answering=total.answering,
        teacher=sum(rules.teacher(stage, num_stages) for stage in held) if rules.teacher else 0,
    )


def peak_activations(order: Sequence[Action], stages: Sequence[Cost]) -> int:
    """The most bytes of activations that a rank holds in the course of its order."""
    alive = peak = 0
    for action in order:
        cost = stages[action.stage]
        if action.kind == Kind.FORWARD:
            alive += cost.saved
        peak = max(peak, alive + cost.transient)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            alive -= cost.saved
    return peak


def most_in_flight(schedule: Schedule, num_micro_batches: int) -> list[int]:
    """Return for each stage the most micro-batches whose activations it holds at once."""
    orders, stages = schedule.orders(num_micro_batches), range(schedule.num_stages)
    return [
        peak_activations(
            orders[schedule.rank_of_stage[stage]], [Cost(saved=int(one == stage)) for one in stages]
        )
        for stage in stages
    ]


KEPT_FREE = 0.05  # share of an accelerator for the allocator's gaps and CUDA libraries


def device_capacity(device: torch.device, *, num_local_ranks: int, gib: float | None = None) -> int:
    """Bytes that one rank may fill on this device.

    Args:
        gib: what the user says; None: ask the device.
        num_local_ranks: processes of this machine, which share its memory on a CPU.
    """
    if gib is not None:
        return int(gib * 1024**3)
    if is_accelerator(device):
        module = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        free += module.memory_reserved(device)
        return int(free - KEPT_FREE * total)
    return (available_memory() or sys.maxsize) // num_local_ranks


# -- the items of a stage model, timed and weighed on a device -------------------------------------
# No checkpoint is read, and at no time does more of the model exist than one item.

# (stage=1, num_stages=3, partition=[i, 1, n - i - 1], device=...) -> only layer i
MakePiece = Callable[..., Stage]
FIRST, MIDDLE, LAST = range(3)
MASTER_BYTES = GRADIENT_BYTES = 4  # float32, whatever the weights are


@dataclass(frozen=True, kw_only=True)
class Outline(ModelCosts):
    """The items of a model without their seconds and activations; no weight is made for it.

    Attributes:
        kinds: for each layer the first one that is like it.
        border_of: (rows, tokens) -> bytes that travel between two stages.
        widths: for each layer, numbers saved for each token, roughly; 0 where they are recomputed.
        last_width: the same of head and norm.
        has_tower: the first item looks at images.
    """

    make_piece: MakePiece
    kinds: tuple[int, ...]
    border_of: Callable[[int, int], int]
    widths: tuple[int, ...]
    last_width: int
    has_tower: bool = False

    @cached_property
    def trains(self) -> list[bool]:
        """Whether each item trains: first, layers, last."""
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
    whole = make_piece(stage=0, num_stages=1, partition=None, device=META)
    num_layers = whole.num_layers()
    ends = [
        make_piece(stage=stage, num_stages=3, partition=[0, num_layers, 0], device=META)
        for stage in (FIRST, LAST)
    ]
    first, last = (dict(end.named_parameters()) for end in ends)
    paths = map(whole.layer_name, range(num_layers))
    layers: list[dict[str, torch.Tensor]]
    layers = [dict(whole.get_submodule(path).named_parameters()) for path in paths]
    is_recomputed = recomputes(whole)
    # layers are alike if shapes, settings and what is trained in and before them are
    is_after_trained = any(parameter.requires_grad for parameter in first.values())
    first_of: dict[Hashable, int] = {}
    kinds = []
    for index, layer in enumerate(layers):
        shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.items())
        key = (shapes, whole.layer_kind(index), is_after_trained)
        kinds.append(first_of.setdefault(key, index))
        is_after_trained = is_after_trained or any(p.requires_grad for p in layer.values())
    has_tower = bool(getattr(getattr(whole, "paths", None), "vision_tower", ""))
    return Outline(
        make_piece=make_piece,
        overhead=Cost(),
        first=parameter_cost(first.values()),
        layers=tuple(parameter_cost(layer.values()) for layer in layers),
        last=parameter_cost(last.values()),
        kinds=tuple(kinds),
        tied=parameter_cost(last[name] for name in first.keys() & last.keys()),
        border_of=lambda *shape: tensor_bytes(ends[1].get_example_input(*shape)),
        widths=tuple(0 if is_recomputed else token_width(layer) for layer in layers),
        last_width=token_width(last),
        has_tower=has_tower,
        front="tower+embedding" if has_tower else "embedding",
    )


def token_width(parameters: Mapping[str, torch.Tensor]) -> int:
    """Numbers that matrices take and give for each token: about what their layer saves.

    Experts count once each token, whatever their number.
    """
    plain = {name: p for name, p in parameters.items() if ".lora." not in name}
    shapes = map(plain_shape, plain.values())
    return sum(sum(shape[-2:]) for shape in shapes if len(shape) in (2, 3))


def parameter_cost(parameters: Iterable[torch.Tensor]) -> Cost:
    """Counts and lasting bytes of some parameters."""
    found = list(parameters)
    trained = [parameter for parameter in found if parameter.requires_grad]
    num_trainable = sum(parameter.numel() for parameter in trained)
    num_half = sum(parameter.numel() for parameter in trained if parameter.element_size() == 2)
    return Cost(
        num_parameters=sum(plain_shape(parameter).numel() for parameter in found),
        num_trainable=num_trainable,
        weights=tensor_bytes(found),
        gradients=num_trainable * GRADIENT_BYTES,
        masters=num_half * MASTER_BYTES,
        trains=bool(trained),
    )


MOST_REPEATS, SHORT_SECONDS = 30, 0.1  # short passes are repeated more often
LossOf = Callable[[torch.Tensor | Tensors, MicroBatch], torch.Tensor]
LossFor = Callable[[Any], LossOf]


@dataclass(frozen=True)
class Workload:
    """The micro-batch, loss and device with which the items are run.

    Attributes:
        batch: a micro-batch as stage 0 gets it, pixels included.
        loss_for: the last stage -> its loss, (output, micro-batch) -> scalar.
        repeats: timed passes at least; their median counts.
    """

    batch: MicroBatch
    loss_for: LossFor
    device: torch.device
    repeats: int = 5


def measure(outline: Outline, workload: Workload) -> ModelCosts:
    """Measure every item once; layers of one kind are measured as one."""
    # a stage without layers has a forward pass only: its masks need no gradient
    with ItemRun(outline.piece(None, workload.device), workload) as run:
        border = tensor_bytes(batch_input(run.model, workload.batch))
        overhead = Cost(forward=run.time()[Kind.FORWARD])
    found = {}
    for item in {0, *(kind + 1 for kind in outline.kinds), outline.num_layers + 1}:
        piece = outline.piece(item, workload.device)
        computes, sends = outline.computes(item), outline.sends(item)
        with ItemRun(piece, workload, computes=computes, sends=sends) as run:
            times = run.time()
            saved, shared, transient = run.weigh()
        found[item] = replace(cost_of(times), saved=saved, transient=transient), shared

    def item_cost(item: int, facts: Cost) -> Cost:
        """Without what its stage does anyway, and with its parameters."""
        cost = found[item][0]
        return facts + replace(cost, forward=max(cost.forward - overhead.forward, 0.0))

    rows, tokens = workload.batch["input_ids"].shape
    layers = zip(outline.kinds, outline.layers, strict=True)
    shared = max((found[kind + 1][1] for kind in outline.kinds), default=0)
    return replace(
        outline,
        overhead=replace(overhead, saved=shared),
        first=item_cost(0, outline.first),
        layers=tuple(item_cost(kind + 1, facts) for kind, facts in layers),
        last=item_cost(outline.num_layers + 1, outline.last),
        border=border,
        hand_over=hand_over_seconds(border, on_cpu=workload.device.type == "cpu"),
        batch=tensor_bytes(iter(workload.batch.values())),
        shape=(rows, tokens),
    )


def cost_of(times: dict[Kind, float]) -> Cost:
    """Return the seconds of the passes of an item."""
    backward = times.get(Kind.BACKWARD, 0.0)
    return Cost(
        forward=times[Kind.FORWARD],
        backward=backward,
        input_grad=times.get(Kind.INPUT_GRAD, 0.0),
        # without an input gradient all of the backward pass is weight gradients
        weight_grad=times.get(Kind.WEIGHT_GRAD, backward),
    )


class ItemRun:
    """Passes of one piece over one micro-batch; a context manager that frees it all."""

    def __init__(
        self, model: Stage, workload: Workload, *, computes: bool = False, sends: bool = False
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

    def __enter__(self) -> "ItemRun":
        return self

    def __exit__(self, *error: object) -> None:
        self.passes.clear()
        del self.model, self.passes, self.inputs, self.grads
        gc.collect()
        empty_cache()

    def time(self) -> dict[Kind, float]:
        """Median seconds of each pass that this piece has."""
        # on a CPU the time of this thread: what other programs take does not count
        clock = time.perf_counter if is_accelerator(self.device) else time.thread_time
        times: dict[Kind, list[float]] = {}
        start = time.perf_counter()
        for index in range(MOST_REPEATS + 1):
            if index > self.repeats and time.perf_counter() - start > SHORT_SECONDS:
                break
            for kinds in self.sequences():
                for kind in kinds:
                    synchronize(self.device)
                    began = clock()
                    self.run_pass(kind)
                    synchronize(self.device)
                    if index:  # the first round warms up
                        times.setdefault(kind, []).append(clock() - began)
        return {kind: statistics.median(values) for kind, values in times.items()}

    def sequences(self) -> Sequence[Sequence[Kind]]:
        """Return the passes of this piece, in the orders that schedules have."""
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
        layers = [self.model.get_submodule(self.model.layer_name(i)) for i in self.model.layers]
        is_recomputed = recomputes(self.model)

        def mark(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
            # layers of a stage share their arguments by name (masks, rotary tables)
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            saved.share((args[1:], others), is_held=is_recomputed)

        hooks = [layer.register_forward_pre_hook(mark, with_kwargs=True) for layer in layers]
        meter = PeakBytes(self.device)
        with meter.watch():
            with saved.hooks():
                self.run_pass(Kind.FORWARD)
            forward_peak = meter.lap()
            if self.computes:
                self.run_pass(Kind.BACKWARD)
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

    def run_pass(self, kind: Kind) -> None:
        """Run one pass of the micro-batch."""
        if kind == Kind.FORWARD:
            self.passes.forward(0, self.inputs, self.batch, loss_of=self.loss_of)
            return
        self.passes.backward(0, kind, self.grads)
        for value in self.inputs:
            value.grad = None

    def _random(self, metas: Tensors) -> Tensors:
        return tuple(
            torch.randn(meta.shape, dtype=meta.dtype, device=self.device)
            for meta in metas
            if meta.is_floating_point()
        )


WeighAnswers = Callable[[Stage], Cost]  # a piece on meta -> its `cache` and `answering`


def answering_costs(costs: ModelCosts, outline: Outline, weigh: WeighAnswers) -> ModelCosts:
    """The costs of a run whose model answers before it trains.

    A tower looks at one prompt at a time, and at no less when it trains: what it holds then counts.
    """
    items = {0, *(kind + 1 for kind in outline.kinds), outline.num_layers + 1}
    try:
        found = {item: weigh(outline.piece(item, META)) for item in items}
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
    border = outline.border_of(rows, tokens)
    # weights that are never in few bits and hidden states have one type: bytes of an element
    total = outline.first + outline.last
    item_size = max(1, total.weights // max(1, total.num_parameters))
    last_item = outline.num_layers + 1
    saved_last = rows * tokens * outline.last_width * BYTES_OF_SCORES
    layers = tuple(
        replace(facts, saved=border + rows * tokens * width * item_size)
        if outline.computes(index + 1)
        else facts
        for index, (facts, width) in enumerate(zip(outline.layers, outline.widths, strict=True))
    )
    last = replace(outline.last, saved=saved_last if outline.computes(last_item) else 0)
    return replace(outline, layers=layers, last=last, border=border, shape=shape)


# -- a transformers model on the meta device ------------------------------------------------------


def auto_class_of(config: PretrainedConfig) -> Any:
    """Return the transformers class that builds the model of a config."""
    is_visual = getattr(config, "vision_config", None) is not None
    return AutoModelForImageTextToText if is_visual else AutoModelForCausalLM


def model_on_meta(
    config: PretrainedConfig, *, dtype: torch.dtype | None = None, **options: Any
) -> PreTrainedModel:
    """The model of a config, without weights; `options` are those of `from_config`."""
    given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    given |= attention_options(config, options.pop("attn_implementation", None))
    with META:
        return called_alike(auto_class_of(config).from_config(config, **given, **options).eval())


def module_list(model: nn.Module, path: str) -> nn.ModuleList:
    """The module at a path that `layers_path` gave."""
    return cast(nn.ModuleList, model.get_submodule(path))


def layers_path(model: PreTrainedModel) -> str:
    """Return the path of the one list of decoder layers, a sibling of the token embeddings."""
    text_model = text_model_path(model)
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        f"{text_model}.{name}".lstrip(".")
        for name, child in model.get_submodule(text_model).named_children()
        if isinstance(child, nn.ModuleList) and len(child) == wanted
    ]
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__} has {len(found)} lists of {wanted} layers next to its "
            "embeddings. Use `num_devices` 1, or a builder that makes the device_map."
        )
    return found[0]


def text_model_path(model: PreTrainedModel) -> str:
    """The module that has the token embeddings as its child."""
    names = {id(module): name for name, module in model.named_modules()}
    return names[id(model.get_input_embeddings())].rpartition(".")[0]


@dataclass(frozen=True)
class Stored:
    """The storage format of the quantized linear layers of a model.

    Attributes:
        bits: of a weight.
        group: weights that share a scale; 0: those of a row.
        scale_bytes: of one scale, with its share of what scales have in common.
        table_bytes: of each matrix besides.
        skipped: names of modules that stay as they are.
        linear, experts: linear layers, and matrices of fused experts, are stored so.
    """

    bits: int
    group: int = 0
    scale_bytes: float = 4
    table_bytes: int = 0
    skipped: tuple[str, ...] = ()
    linear: bool = True
    experts: bool = False

    def weight_bytes(self, shape: Iterable[int]) -> int:
        """Return the bytes of one matrix with all that belongs to it."""
        rows, columns = shape
        numel = rows * columns
        scales = (math.ceil(numel / self.group) if self.group else rows) * self.scale_bytes
        return math.ceil(numel * self.bits / 8 + scales) + self.table_bytes


def stored_of(config: PretrainedConfig) -> Stored | None:
    """Return a config's storage of quantized weights; None if it has none or is unknown."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    given: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    skipped = given.get("llm_int8_skip_modules") or given.get("modules_to_not_convert") or ()
    if method.startswith("bitsandbytes") or "load_in_4bit" in given:
        # 64 weights a scale; a code of 16 values. Double: 256 scales in 8 bits share one and a code
        if not given.get("load_in_4bit"):
            found = Stored(8)
        elif given.get("bnb_4bit_use_double_quant"):
            found = Stored(4, 64, 1 + 4 / 256, 16 * 4 + 256 * 4 + 4)
        else:
            found = Stored(4, 64, 4, 16 * 4)
    elif method in ("gptq", "awq", "auto-round"):  # a half scale and a packed zero point a group
        bits = int(given.get("bits") or 4)
        found = Stored(bits, max(0, int(given.get("group_size") or 0)), 2 + bits / 8)
    elif method in ("fp8", "mxfp4"):
        found = Stored(4, 32, 1, linear=False, experts=True)
        if method == "fp8":
            found = Stored(8, math.prod(given.get("weight_block_size") or (128, 128)), experts=True)
        if torch.accelerator.is_available():  # does transformers dequantize on the GPU here?
            quantizer: Any = AutoHfQuantizer.from_config(dict(given))
            quantizer.validate_environment(device_map={"": 0})
            if quantizer.quantization_config.dequantize:
                return None
    else:
        return None
    return replace(found, skipped=tuple(skipped))


def _tensor_sizes(model: PreTrainedModel) -> dict[str, int]:
    """Name -> bytes of each parameter and buffer; one that several modules share has one name."""
    sizes = {name: tensor.nbytes for name, tensor in model.named_parameters()}
    sizes |= {name: tensor.nbytes for name, tensor in model.named_buffers()}
    stored = stored_of(model.config)
    if stored is None:
        return sizes
    skipped = stored.skipped or get_keys_to_not_convert(model)
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        # transformers reads such a list as whole names, and as their beginnings or ends
        is_skipped = any(f".{one}." in f".{name}." for one in skipped)
        if is_skipped:
            continue
        if stored.linear and isinstance(module, nn.Linear) and weight in sizes:
            sizes[weight] = stored.weight_bytes(module.weight.shape)
        if stored.experts and name.endswith(".experts"):
            for leaf, matrices in module.named_parameters(recurse=False):
                if matrices.dim() == 3:
                    sizes[f"{name}.{leaf}"] = len(matrices) * stored.weight_bytes(
                        matrices.shape[1:]
                    )
    return sizes


@dataclass(frozen=True)
class Load:
    """The rows and images that a model answers at once.

    Attributes:
        rows: answers that are made together.
        length: tokens of the longest prompt and its answer.
        images: pictures that the tower sees for each row; tiles of a cut picture count each.
        image_size: side of a picture in pixels, where the model does not say.
    """

    rows: int = 1
    length: int = 2048
    images: int = 0
    image_size: int = 1024

    def __str__(self) -> str:
        rows = f"{self.rows} row{'s' if self.rows > 1 else ''}"
        images = f" and {self.images} images" if self.images else ""
        return f"{rows} of {self.length} tokens{images}"


def pass_bytes(model: PreTrainedModel, load: Load, *, image_tokens: int = 0) -> list[Cost]:
    """Run the decoder on the meta device; return each layer's bytes, without its weights.

    The cache is that of the complete answer, whose last token is in no cache.

    Args:
        image_tokens: of a row, where layers look at images themselves.
    """
    text_model = model.get_submodule(text_model_path(model))
    layers = list(module_list(model, layers_path(model)))
    peaks = [0] * len(layers)  # a layer that looks at images may be left out where there are none
    caches: list[Cache] = []  # that the layers get, by whatever name
    watch = PeakBytes(META)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caches.extend(value for value in (*args, *kwargs.values()) if isinstance(value, Cache))
        watch.lap()

    def after(index: int, *_: object) -> None:
        peaks[index] = watch.lap()

    with on_meta(watch, model), ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(functools.partial(after, index)))
        text_model(**_inputs(model, load, image_tokens), use_cache=True)
    tensors = [layer_tensors(layer) for layer in (caches[0].layers if caches else [])]
    tensors += [[]] * (len(layers) - len(tensors))  # layers that share the cache of others
    found, held_so_far = [], 0
    for own, peak in zip(tensors[: len(layers)], peaks, strict=True):
        kept, held = tensor_bytes(own), sum(one.untyped_storage().nbytes() for one in own)
        held_so_far += held
        # a step joins old and new keys: for a moment both are there
        workspace = max(peak - held_so_far, kept // 2, 0)
        found.append(Cost(cache=kept, beyond=held - kept, answering=workspace))
    return found


@contextmanager
def on_meta(watch: PeakBytes, model: nn.Module) -> Iterator[None]:
    """Have a model make tensors without values, and count them."""
    with torch.no_grad(), META, _light_experts(model), _FusedAttention():
        with watch.watch():
            yield


def layer_tensors(layer: object) -> list[torch.Tensor]:
    """Return the tensors of a layer of a cache, whatever its kind."""
    leaves = pytree.tree_leaves(vars(layer))  # a scalar is a window's size
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.dim() > 0]


def _inputs(model: PreTrainedModel, load: Load, image_tokens: int) -> dict[str, Any]:
    """Hidden states of the prompt: made here, so that they count."""
    config = model.config.get_text_config(decoder=True)
    num_tokens = max(1, load.length - 1)
    inputs: dict[str, Any] = {
        "inputs_embeds": torch.empty(load.rows, num_tokens, config.hidden_size, dtype=model.dtype),
        "position_ids": torch.empty(load.rows, num_tokens, dtype=torch.long),
        "attention_mask": None,
    }
    if load.rows > 1:  # rows of different length: none can do without a mask
        shape = (load.rows, 1, num_tokens, num_tokens)
        inputs["attention_mask"] = torch.empty(shape, dtype=torch.bool)
    if image_tokens and getattr(config, "cross_attention_layers", None):
        states = torch.empty(load.rows, image_tokens, config.hidden_size, dtype=model.dtype)
        inputs["cross_attention_states"] = states
    return inputs


class _FusedAttention(TorchFunctionMode):
    """Counts attention as GPU kernels compute it: the scores are never in memory as a whole."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = _attend if func is F.scaled_dot_product_attention else func
        return chosen(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: object,
    **__: object,
) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)  # the kernels add numbers
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@contextmanager
def _light_experts(model: nn.Module) -> Iterator[None]:
    """Replace experts with one that gets all chosen rows: real routing depends on values."""

    def pass_all(
        experts: nn.Module, hidden: torch.Tensor, *routed: torch.Tensor, **_: object
    ) -> torch.Tensor:
        chosen = next((item for item in routed if item.dtype in (torch.long, torch.int)), None)
        num_chosen = 1 if chosen is None else chosen.shape[-1]
        num_rows = hidden.numel() // hidden.shape[-1] * num_chosen
        shapes = map(plain_shape, innermost(experts).parameters(recurse=False))
        widths = [sum(shape[-2:]) for shape in shapes if len(shape) == 3]
        held = hidden.new_empty((num_rows, sum(widths)))  # counted in addition to the output
        made = torch.empty_like(hidden)
        del held
        return made

    changed = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and not isinstance(module, nn.ModuleList)
    ]
    for module in changed:
        module.forward = functools.partial(pass_all, module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


LOGIT_COPIES = 3  # a step that chooses a token holds this many float32 copies of its logits


@dataclass(frozen=True)
class ModelBytes:
    """A whole model that answers one load.

    Attributes:
        ends: embeddings, norms and head, and the choice of a token; a tied head counts once.
        tower: tower and projector, while they look at the images of all rows.
    """

    layers: tuple[Cost, ...]
    ends: Cost
    tower: Cost = Cost()

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum((*self.layers, self.tower), self.ends).weights


def measure_model(model: PreTrainedModel, load: Load) -> ModelBytes:
    """Measure a model on the meta device; a config with quantised weights counts as such."""
    path, text_path = f"{layers_path(model)}.", text_model_path(model)
    weights = [0] * len(module_list(model, path[:-1]))
    is_visual = getattr(model.config, "vision_config", None) is not None
    head = model.get_output_embeddings()
    ends = vision = 0
    for name, size in _tensor_sizes(model).items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if name.startswith(path):
            weights[int(name[len(path) :].partition(".")[0])] += size
        elif not (is_visual and text_path) or name.startswith(f"{text_path}.") or owner is head:
            ends += size
        else:
            vision += size
    try:
        layers = pass_bytes(model, load, image_tokens=load.images * _image_tokens(model, load))
    except Exception as error:
        if is_of_library(model):
            raise
        print(
            f"what a pass of {type(model).__name__} takes could not be measured "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): layers are dealt out "
            "by their weights",
            file=sys.stderr,
        )
        layers = [Cost()] * len(weights)
    num_logits = load.rows * model.config.get_text_config(decoder=True).vocab_size
    choice = num_logits * (model.dtype.itemsize + 4 * LOGIT_COPIES)
    return ModelBytes(
        tuple(replace(layer, weights=own) for layer, own in zip(layers, weights, strict=True)),
        ends=Cost(weights=ends, answering=choice),
        tower=Cost(weights=vision, answering=_vision_workspace(model, load)),
    )


def _image_tokens(model: PreTrainedModel, load: Load) -> int:
    """Patches of one picture, or of all tiles where the tower always takes several."""
    config = getattr(model.config, "vision_config", None)
    if config is None:
        return 0
    height, width = _pair(getattr(config, "image_size", None) or load.image_size)
    patch_height, patch_width = _pair(getattr(config, "patch_size", None) or 14)
    tiles = getattr(config, "max_num_tiles", 1)
    return (height // patch_height * (width // patch_width) + 1) * tiles


def _vision_workspace(model: PreTrainedModel, load: Load) -> int:
    """Return what the fullest moment of a tower takes with all images of all rows."""
    config, count = getattr(model.config, "vision_config", None), load.rows * load.images
    if config is None or not count:
        return 0
    # all that the linear layers of the widest block take and give, as if at once
    text_path = text_model_path(model)
    widths = [
        sum(sum(p.shape[-2:]) for p in block.parameters() if p.dim() == 2)
        for name, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList) and not name.startswith(f"{text_path}.")
        for block in blocks
    ]
    return count * _image_tokens(model, load) * max(widths, default=0) * model.dtype.itemsize


def _pair(size: int | list[int] | tuple[int, ...]) -> tuple[int, int]:
    height, width = size[:2] if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


def decode_bytes(model: PreTrainedModel) -> tuple[list[int], int]:
    """Bytes of weights that a decode step reads: in each layer, and behind the layers."""

    def read_bytes(module: nn.Module) -> int:
        """Return the bytes of all parameters but those that are looked up by row."""
        own = (child for child in module.modules() if not isinstance(child, nn.Embedding))
        return sum(p.nbytes for child in own for p in child._parameters.values() if p is not None)

    path = layers_path(model)
    layers = [read_bytes(layer) for layer in module_list(model, path)]
    text_model = model.get_submodule(text_model_path(model))
    list_name = path.rpartition(".")[2]
    back = sum(read_bytes(one) for name, one in text_model.named_children() if name != list_name)
    head = model.get_output_embeddings()
    if head is not None:  # its weight may be that of the embeddings: here it is read
        back += sum(parameter.nbytes for parameter in head.parameters())
    return layers, back
