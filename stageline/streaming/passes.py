"""One call of the engine: its micro-batches on their way through the slots of a plan.

The controller goes through (slot, micro-batch) in wavefront order and puts work into the queues of
lanes. Between stages there is no graph: a backward stage begins with detached inputs, and hands
their gradients to the stage before. Layers that ran forward without a graph are recomputed, with
the random numbers of the first time.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stageline.device import is_accelerator
from stageline.streaming.host_weights import Home, HostWeights, offsets, shell_of, view_at
from stageline.streaming.lanes import (
    DONE,
    Buffer,
    DeviceBudgetError,
    Lane,
    Mark,
    Queue,
    mark_of_caller,
)
from stageline.streaming.plan import Plan, wavefront
from stageline.streaming.recompute import running

LossFn = Callable[[Any, Any], torch.Tensor | Sequence[torch.Tensor]]
FORWARD, TURN, BACKWARD = "forward", "turn", "backward"
Slot = tuple[str, range, Sequence[range]]  # kind, layers, what of them is recomputed at once
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbours get far seeds
_SEEDS = 1 << 63


@dataclass
class Flow:
    """A value of one micro-batch between two layers, or its gradients.

    It is on the device of `lane` (None: on the host), ready there at `mark`.
    """

    value: Any
    lane: Lane | None = None
    mark: Mark = DONE


def layer_seed(base: int, layer: int, part: int, num_parts: int) -> int:
    """Return the seed of a layer for a micro-batch: the same on any lane and plan."""
    return (base + _GOLDEN * (1 + layer * num_parts + part)) % _SEEDS


def on_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The value with the function's result in place of each tensor."""
    return pytree.tree_map_only(torch.Tensor, function, value)


def can_have(tensor: torch.Tensor) -> bool:
    """Whether it is of a dtype that has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


class Fixed:
    """Tensors that travel with a value and have no gradients: masks, position embeddings.

    Without it a float mask would ask for a gradient of its own size in every layer.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        self.tensors = tuple(tensors)


pytree.register_pytree_node(
    Fixed, lambda fixed: (list(fixed.tensors), None), lambda tensors, _: Fixed(tensors)
)


def _is_fixed(value: Any) -> bool:
    return isinstance(value, Fixed)


def float_leaves(value: Any) -> list[torch.Tensor]:
    """The tensors that can have gradients, in order."""
    leaves = pytree.tree_leaves(value, is_leaf=_is_fixed)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and can_have(leaf)]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def detached(value: Any, *, requires_grad: bool) -> Any:
    """The same numbers as the beginning of a new graph."""

    def cut(leaf: Any) -> Any:
        if _is_fixed(leaf):
            return on_tensors(torch.Tensor.detach, leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensor = leaf.detach()
        return tensor.requires_grad_(requires_grad and can_have(tensor))

    return pytree.tree_map(cut, value, is_leaf=_is_fixed)


def on_host(value: Any) -> Flow:
    """Return a flow of the caller's value; if it is on a GPU, ready when its stream gets here."""
    return Flow(value, mark=mark_of_caller(tensors_of(value)))


def read_by(queue: Queue, *flows: Flow) -> None:
    """Keep values for the queue whose work, which calls this, reads them."""
    for flow in flows:
        for tensor in tensors_of(flow.value):
            queue.uses(tensor)


def bring(flow: Flow, lane: Lane | None) -> Flow:
    """The value on another device, or on the host for None; between devices through the host."""
    device = torch.device("cpu") if lane is None else lane.device
    here = torch.device("cpu") if flow.lane is None else flow.lane.device
    if here == device:
        return flow  # its value may not be there yet: work in a queue fills it in
    if flow.lane is not None and here.type != "cpu":
        flow = _copied(flow, flow.lane.outward, None, torch.device("cpu"))
    return flow if lane is None else _copied(flow, lane.inward, lane, device)


def _copied(flow: Flow, queue: Queue, lane: Lane | None, device: torch.device) -> Flow:
    arrived = Flow(None, lane)

    def copy() -> None:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            queue.uses(tensor)
            if device.type == "cpu" and is_accelerator(tensor.device):
                landing = torch.empty_like(tensor, device="cpu", pin_memory=True)
                return landing.copy_(tensor, non_blocking=True)
            if is_accelerator(device) and tensor.device.type == "cpu" and not tensor.is_pinned():
                tensor = tensor.pin_memory()  # else this thread waits until the stream gets here
            return tensor.to(device, non_blocking=True)

        arrived.value = on_tensors(move, flow.value)

    queue.after(flow.mark)
    queue.run(copy)
    arrived.mark = queue.record()
    return arrived


class StagePass:
    """A stage on a lane for one pass over the micro-batches: its weights come, compute and go.

    Nothing waits here: each piece of work is put into a queue behind the marks that it needs.

    Args:
        is_recomputed: its layers ran before in this pass: buffers start from `snapshots`, by id.
    """

    def __init__(
        self,
        lane: Lane,
        hosted_layers: Sequence[HostWeights],
        *,
        makes_gradients: bool,
        is_recomputed: bool,
        snapshots: dict[int, torch.Tensor],
    ) -> None:
        self.lane, self.hosted_layers = lane, hosted_layers
        self.makes_gradients, self.is_recomputed = makes_gradients, is_recomputed
        self.shells: list[Any] = []
        self._snapshots = snapshots
        homes = [home for hosted in hosted_layers for home in hosted.homes]
        self._homes = {id(home.parameter): home for home in homes}
        self._buffers = {id(each): each for hosted in hosted_layers for each in hosted.buffers}
        self._on_device: dict[int, torch.Tensor] = {}
        self._weights: Buffer | None = None
        self._gradients: Buffer | None = None
        self.used: set[int] = set()  # ids of parameters that got a gradient, as work is done
        self._waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # (layer, view, host)
        self._num_bytes = 0
        self._arrived: dict[int, Mark] = {}  # layer of the stage -> its weights and those before

    def upload(self, share: float) -> None:
        """Put a share of the weights, from the first, on their way; without room `open` does."""
        if self._weights is None:
            try:
                self._begin_upload()
            except DeviceBudgetError:
                return
        left = self._num_bytes * (1.0 - share)
        queue = self.lane.inward
        while self._waiting and sum(host.nbytes for _, _, host in self._waiting) > left:
            layer, view, host = self._waiting.pop(0)
            queue.run(functools.partial(view.copy_, host, non_blocking=True))
            if not self._waiting or self._waiting[0][0] != layer:
                self._arrived[layer] = queue.record()

    def await_layer(self, number: int) -> None:
        """Let the compute queue wait for the weights of one layer of the stage."""
        arrived = [layer for layer in self._arrived if layer <= number]
        if arrived:  # else neither it nor one before has weights of its own
            self.lane.compute.after(self._arrived[max(arrived)])

    def open(self) -> None:
        """Make the stage ready to compute; missing layers are copied now, one by one."""
        if self._weights is None:
            self._begin_upload()
        self.upload(1.0)
        if self.makes_gradients:
            self._make_gradients()
        self.shells = [shell_of(hosted.layer, self._on_device) for hosted in self.hosted_layers]

    def close(self) -> Mark:
        """Send gradients and buffers to the host, where they are at the mark; free the memory."""
        computed = self.lane.compute.record()
        outward = self.lane.outward
        outward.after(computed)
        for hosted, home in self.sent:
            if hosted.collected is not None:  # else the staged gradients are still being added up
                hosted.collected.result()
            leaf = self._on_device[id(home.parameter)]
            outward.run(functools.partial(_stage_gradient, self.used, hosted, home, leaf))
        if not self.is_recomputed and self._buffers:
            layers, shells = self.hosted_layers, self.shells

            def buffers_home() -> None:
                for hosted, shell in zip(layers, shells, strict=True):
                    # read these from the shell: a layer may put a new tensor in place of a buffer
                    for host, device in zip(hosted.buffers, shell.buffers(), strict=True):
                        host.copy_(device, non_blocking=True)

            outward.run(buffers_home)
        gone = outward.record()
        assert self._weights is not None
        self.lane.pool.give(self._weights, gone if self._buffers else computed)
        if self._gradients is not None:
            self.lane.pool.give(self._gradients, gone)
        self._let_go()
        return gone

    def abandon(self) -> None:
        """Free the memory after an error; the results are lost."""
        held = [each for each in (self._weights, self._gradients) if each is not None]
        if held:
            mark = self.lane.all_done()  # copies on their way in must not reach the next user
            for buffer in held:
                self.lane.pool.give(buffer, mark)
        self._let_go()

    def _let_go(self) -> None:
        """Keep no view of the buffers: the pool must be able to free them."""
        self._weights = self._gradients = None
        self._on_device, self._waiting, self.shells = {}, [], []

    @property
    def sent(self) -> list[tuple[HostWeights, Home]]:
        """Return the target of each gradient; that of a parameter of several layers goes once."""
        if not self.makes_gradients:
            return []
        first = {
            id(home): (hosted, home)
            for hosted in reversed(self.hosted_layers)
            for home in hosted.homes
            if home.parameter.requires_grad
        }
        return list(first.values())

    def _begin_upload(self) -> None:
        parameters = [home.parameter.detach() for home in self._homes.values()]
        # buffers that the device changes are copied before the forward pass, and recomputation
        # starts from the copy: changes come back while recomputation may be on its way already
        new = self._buffers.keys() - self._snapshots.keys()
        self._snapshots |= {key: self._kept(self._buffers[key]) for key in new}
        origin = self._snapshots if self.is_recomputed else self._buffers
        buffers = [origin[key] for key in self._buffers]
        hosts = parameters + buffers
        starts, self._num_bytes = offsets(hosts)
        self._weights = self.lane.pool.take(max(self._num_bytes, 1))
        self.lane.inward.after(self._weights.mark)
        # .data: a buffer that a layer changes must not count as a change of its neighbours, whose
        # values a graph has saved
        views = [
            view_at(self._weights.data, start, host).data
            for start, host in zip(starts, hosts, strict=True)
        ]
        keys = [*self._homes, *self._buffers]
        first_use = {
            id(value): number
            for number, hosted in reversed(list(enumerate(self.hosted_layers)))
            for value in (*(home.parameter for home in hosted.homes), *hosted.buffers)
        }
        uploads = zip((first_use[key] for key in keys), views, hosts, strict=True)
        self._waiting = sorted(uploads, key=lambda one: one[0])
        self._on_device = dict(zip(keys, views, strict=True))

    def _kept(self, buffer: torch.Tensor) -> torch.Tensor:
        """A copy on the host; pinned for a GPU, since this thread would wait for another one."""
        is_pinned = is_accelerator(self.lane.device)
        return torch.empty_like(buffer, pin_memory=is_pinned).copy_(buffer)

    def zero_gradients(self) -> None:
        """Queue the zeros that gradients are added to, before the first backward pass."""
        assert self._gradients is not None
        self.lane.compute.after(self._gradients.mark)
        self.lane.compute.run(self._gradients.data.zero_)

    def _make_gradients(self) -> None:
        """Return leaves that add their gradients up in one run of bytes; see `zero_gradients`."""
        trained = [home for home in self._homes.values() if home.parameter.requires_grad]
        starts, num_bytes = offsets([home.parameter for home in trained])
        self._gradients = self.lane.pool.take(max(num_bytes, 1))
        page, used = self._gradients.data, self.used
        for home, start in zip(trained, starts, strict=True):
            key = id(home.parameter)
            leaf = self._on_device[key].detach().requires_grad_(True)
            leaf.grad = view_at(page, start, home.parameter)
            leaf.register_post_accumulate_grad_hook(lambda _, key=key: used.add(key))
            self._on_device[key] = leaf


def _stage_gradient(used: set[int], hosted: HostWeights, home: Home, leaf: torch.Tensor) -> None:
    # not used, it has none, as in PyTorch, and not zeros to decay by
    if id(home.parameter) in used and leaf.grad is not None:
        hosted.staged_for(home).copy_(leaf.grad, non_blocking=True)


@dataclass
class PassPart:
    """One micro-batch.

    Attributes:
        inputs: (args, kwargs) of the first layer.
        flow: what the next forward stage begins with.
        saved: what each backward segment begins with, by its first layer.
        gradients: of what the last backward stage began with, a tensor or None for each tensor
            that can have gradients.
    """

    inputs: Flow
    label: Any = None
    flow: Flow | None = None
    saved: dict[int, Flow] = field(default_factory=dict)
    gradients: Flow | None = None
    loss: Flow | None = None
    output: Flow | None = None


@dataclass(eq=False)
class Pass:
    """Runs slots: through all of a plan, or through its forward ones first.

    Attributes:
        seed: base of the layers' seeds; None: generators are left alone.
        by_layer: recompute layer by layer, not stage by stage.
        input_gradients: the call's inputs want gradients.
        loss_fn, keeps_outputs: of a call that runs forward and backward.
        landed: seats whose gradients are on their way home.
    """

    hosted_layers: Sequence[HostWeights]
    lanes: Sequence[Lane]
    name: str
    parts: list[PassPart]
    seed: int | None
    by_layer: bool
    input_gradients: bool
    loss_fn: LossFn | None = None
    keeps_outputs: bool = True
    landed: list[tuple[StagePass, Mark]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._snapshots: dict[int, torch.Tensor] = {}
        self._aside_bytes = 0  # inputs of layers that the backward pass will read
        self._kept: dict[Hashable, tuple] = {}  # values that layers save for recomputation
        trained = [number for number, hosted in enumerate(self.hosted_layers) if hosted.is_trained]
        first = min(trained, default=len(self.hosted_layers))
        self._first_graph = 0 if self.input_gradients else first

    def forward(self, stages: Sequence[range], segments: Sequence[range] = ()) -> None:
        """Run layers without a graph; keep the input of each segment."""
        self._go([(FORWARD, stage, ()) for stage in stages], keeps={s.start for s in segments})
        for part in self.parts:
            part.output = part.flow

    def forward_backward(self, plan: Plan) -> None:
        """Run a whole plan; gradients end on the host weights and in the parts."""
        turn, *later = plan.backward
        slots: list[Slot] = [(FORWARD, stage, ()) for stage in plan.forward]
        slots.append((TURN, turn, (turn,)))
        slots += self._backward_slots(later)
        self._go(slots, keeps={s.start for _, _, segments in slots for s in segments})

    def backward(self, stages: Sequence[range]) -> None:
        """Run backward from `part.gradients`, which are those of the outputs."""
        self._go(self._backward_slots(stages), keeps=set())

    def segments(self, stages: Sequence[range]) -> list[range]:
        """Return the ranges of layers that are recomputed at once."""
        if not self.by_layer:
            return list(stages)
        return [range(layer, layer + 1) for stage in stages for layer in stage]

    def _backward_slots(self, stages: Sequence[range]) -> list[Slot]:
        """Return the backward slots, without stages before the first trained layer."""
        wanted = [stage for stage in stages if stage.stop > self._first_graph]
        return [(BACKWARD, stage, tuple(self.segments([stage]))) for stage in wanted]

    def _go(self, slots: Sequence[Slot], *, keeps: set[int]) -> None:
        num_lanes = len(self.lanes)
        seats = [
            StagePass(
                self.lanes[number % num_lanes],
                [self.hosted_layers[layer] for layer in stage],
                makes_gradients=kind != FORWARD,
                is_recomputed=kind == BACKWARD,
                snapshots=self._snapshots,
            )
            for number, (kind, stage, _) in enumerate(slots)
        ]
        try:
            for number, place in wavefront(len(slots), num_lanes, len(self.parts)):
                (kind, stage, segments), seat = slots[number], seats[number]
                if place == 0:
                    seat.open()
                name = f"{self.name} {kind} of layers {stage.start}-{stage[-1]}"
                with torch.profiler.record_function(f"{name}, micro-batch {place}"):
                    if kind == FORWARD:
                        self._forward(seat, stage, place, keeps)
                    elif kind == TURN:
                        self._turn(seat, stage, place)
                    else:
                        for segment in reversed(segments):
                            self._backward(seat, stage, segment, place)
                if number + num_lanes < len(seats):  # meanwhile the lane's next weights come
                    seats[number + num_lanes].upload((place + 1) / len(self.parts))
                if place == len(self.parts) - 1:
                    self.landed.append((seat, seat.close()))
        except BaseException:
            for seat in seats:
                seat.abandon()
            self.landed.clear()
            raise

    def _forward(self, seat: StagePass, stage: range, place: int, keeps: set[int]) -> None:
        part, lane = self.parts[place], seat.lane
        began = bring(part.flow or part.inputs, lane)
        saved = {layer: Flow(None, lane) for layer in stage if layer in keeps}
        ended = Flow(None, lane)

        graph = self._queue_layers(seat, stage, stage, place, began, saved=saved)
        lane.compute.run(lambda: setattr(ended, "value", graph.value))
        ended.mark = lane.compute.record()
        for layer, flow in saved.items():
            flow.mark = ended.mark
            # one lane keeps what it will need, if it may; of several another one may need it
            limit = lane.inputs_budget
            self._aside_bytes += sum(each.nbytes for each in tensors_of(flow.value))
            stays = len(self.lanes) == 1 and (limit is None or self._aside_bytes <= limit)
            part.saved[layer] = flow if stays else bring(flow, None)
        part.flow = ended

    def _turn(self, seat: StagePass, stage: range, place: int) -> None:
        """Forward, loss and backward of the deepest layers."""
        part, lane = self.parts[place], seat.lane
        began = bring(part.flow or part.inputs, lane)
        label = bring(on_host(part.label), lane)
        loss, output, leaving = Flow(None, lane), Flow(None, lane), Flow(None, lane)
        part.loss, part.output, part.gradients = loss, output, leaving
        loss_fn = self.loss_fn
        assert loss_fn is not None

        graph = self._queue_layers(seat, stage, stage, place, began, label)

        def finish() -> None:
            with torch.enable_grad():
                graph.losses = loss_fn(graph.value, label.value)
            loss.value = detached(graph.losses, requires_grad=False)
            if self.keeps_outputs:
                output.value = detached(graph.value, requires_grad=False)

        def go_back() -> None:
            is_one = isinstance(graph.losses, torch.Tensor)
            torch.autograd.backward([graph.losses] if is_one else list(graph.losses))
            leaving.value = [leaf.grad for leaf in float_leaves(graph.start)]

        lane.compute.run(finish)
        # the caller may read the loss and prepare the next step during the backward pass
        loss.mark = output.mark = lane.compute.record()
        if place == 0:
            seat.zero_gradients()
        lane.compute.run(go_back)
        leaving.mark = lane.compute.record()

    def _backward(self, seat: StagePass, stage: range, segment: range, place: int) -> None:
        """Compute a segment again with a graph, and then its gradients."""
        part, lane = self.parts[place], seat.lane
        began = bring(part.saved.pop(segment.start, part.inputs), lane)
        assert part.gradients is not None
        arriving = bring(part.gradients, lane)
        leaving = part.gradients = Flow(None, lane)

        graph = self._queue_layers(seat, stage, segment, place, began, arriving)

        def go_back() -> None:
            pairs = [
                (leaf, gradient)
                for leaf, gradient in zip(float_leaves(graph.value), arriving.value, strict=True)
                if gradient is not None and leaf.requires_grad
            ]
            if pairs:
                leaves, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(leaves, gradients)
            leaving.value = [leaf.grad for leaf in float_leaves(graph.start)]

        if place == 0 and segment.stop == stage.stop:
            seat.zero_gradients()
        lane.compute.run(go_back)
        leaving.mark = lane.compute.record()

    def _queue_layers(
        self,
        seat: StagePass,
        stage: range,
        segment: range,
        place: int,
        began: Flow,
        *others: Flow,
        saved: Mapping[int, Flow] | None = None,
    ) -> SimpleNamespace:
        """Queue the forward pass of layers, once all values are there: from `start` to `value`.

        Args:
            saved: layers whose inputs are kept; without a graph. None: with a graph.
        """
        queue, layers, graph = seat.lane.compute, self._layers(seat, stage), SimpleNamespace()

        def begin() -> None:
            read_by(queue, began, *others)
            # the input of a graph needs gradients if anything before it does
            needs = self.input_gradients or segment.start > self._first_graph
            graph.start = graph.value = (
                began.value if saved is not None else detached(began.value, requires_grad=needs)
            )

        def work(some: range) -> None:
            with torch.set_grad_enabled(saved is None):
                for layer in some:
                    if saved and layer in saved:
                        saved[layer].value = detached(graph.value, requires_grad=False)
                    graph.value = layers(layer, graph.value, place)

        for flow in (began, *others):
            queue.after(flow.mark)
        queue.run(begin)
        for layer in segment if place == 0 else ():  # the first micro-batch awaits the weights
            seat.await_layer(layer - stage.start)
            queue.run(functools.partial(work, range(layer, layer + 1)))
        if place > 0:
            queue.run(functools.partial(work, segment))
        return graph

    def _layers(self, seat: StagePass, stage: range) -> Callable[[int, Any, int], Any]:
        """Return a function that runs a layer of a stage, with random numbers of its own."""
        # not of the seat, which drops them when it is closed: work may run after that
        shells, lane, seed = seat.shells, seat.lane, self.seed

        def run(layer: int, value: Any, place: int) -> Any:
            if seed is not None:
                lane.seed(layer_seed(seed, layer, place, len(self.parts)))
            shell = shells[layer - stage.start]
            if (kept := self._kept.get((layer, place))) is not None:
                # saved where the layer ran first: that may be another lane
                read_by(lane.compute, Flow(kept))
                self._kept[layer, place] = on_tensors(
                    lambda each: each.to(lane.device) if is_accelerator(each.device) else each, kept
                )
            with running(self._kept, (layer, place), is_recomputed=seat.is_recomputed):
                if layer > 0:
                    return shell(value)
                args, kwargs = value
                return shell(*args, **kwargs)

        return run
