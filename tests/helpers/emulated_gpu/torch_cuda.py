"""The interface of `torch.cuda` over emulated cards: streams, events, memory, generators."""

import contextlib
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree

from tests.helpers.emulated_gpu.native import KIND
from tests.helpers.emulated_gpu.order import HOST, Actor
from tests.helpers.emulated_gpu.tensor import CardTensor, entered

if TYPE_CHECKING:
    from tests.helpers.emulated_gpu.cards import Cards

ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class Stream:
    """A `torch.cuda.Stream`; each one is new, where torch hands out the same few."""

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: object
    ) -> None:
        self.device = torch.device(KIND, index_of(device))
        self.priority = priority
        new = entered().native.cards_new_id
        self.stream_id = new() if stream_id is None else stream_id

    @property
    def actor(self) -> Actor:
        """The key of this stream in `order`."""
        return self.device.index, self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.actor == other.actor

    def __hash__(self) -> int:
        return hash(self.actor)

    def __enter__(self) -> "Stream":
        self._inside = on_stream(self)
        self._inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        entered().order.wait(self.actor, event.key)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        entered().note_wait("stream synchronize")
        entered().order.join(HOST, self.actor)

    def query(self) -> bool:
        return True


class Event:
    """A `torch.cuda.Event`; times are those of the host."""

    def __init__(self, *_: object, **__: object) -> None:
        self.key = ("event", entered().native.cards_new_id())
        self.time = time.perf_counter()

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()
        entered().order.record(self.key, (stream or current_stream()).actor)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        entered().note_wait("event synchronize")
        entered().order.wait(HOST, self.key)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 1000 * (other.time - self.time)


def index_of(device: Any = None) -> int:
    """Return the number of a card: of an int, a name or a device; by default the current one."""
    if isinstance(device, Stream):
        device = device.device
    if device is not None and not isinstance(device, int):
        device = torch.device(device).index
    return entered().native.cards_device() if device is None else device


def current_stream(device: Any = None) -> Stream:
    """Act like `torch.cuda.current_stream`."""
    index = index_of(device)
    return Stream(index, stream_id=entered().native.cards_stream(index))


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Act like `torch.cuda.stream`."""
    if stream is None:
        yield
        return
    native, index = entered().native, stream.device.index
    before = native.cards_stream(index)
    with on_card(index):
        native.cards_set_stream(index, stream.stream_id)
        try:
            yield
        finally:
            native.cards_set_stream(index, before)


@contextlib.contextmanager
def on_card(device: Any) -> Iterator[None]:
    """Act like `torch.cuda.device`."""
    native = entered().native
    before = native.cards_device()
    native.cards_set_device(index_of(device))
    try:
        yield
    finally:
        native.cards_set_device(before)


def module() -> Any:
    """Return the module of this kind of card: torch.cuda, or one made as a package would."""
    if not hasattr(torch, KIND):
        torch.utils.rename_privateuse1_backend(KIND)
        torch._register_device_module(KIND, ModuleType(f"torch.{KIND}"))
    return torch.get_device_module(KIND)


def replacements(cards: "Cards") -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, new): what the cards put in the place of torch's own."""
    tables = (_devices(cards), _streams(cards), _memory(cards), _generators(cards))
    yield from ((module(), name, new) for table in tables for name, new in table.items())
    tensor_of = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, list | tuple):  # it reads numbers out of tensors past all dispatch
            data = pytree.tree_map_only(CardTensor, CardTensor.tolist, data)
        return tensor_of(data, *args, **kwargs)

    yield torch, "tensor", tensor
    yield torch.Tensor, "is_pinned", lambda self, *_: cards.memory.is_pinned(self)
    yield torch.Tensor, "pin_memory", lambda self, *_: cards.memory.pin(self.detach().clone())
    # a view of a parameter can't be made of wrappers there
    yield (
        torch,
        "inference_mode",
        lambda mode=True: torch.set_grad_enabled(False) if mode else nothing(),
    )
    from stageline.modules import (
        lora_layer,
    )  # late: what it imports reads tests/conftest.py's wishes

    # these tensors are plain ones that a card would hold, no quantised kind
    yield lora_layer, "PLAIN", (*lora_layer.PLAIN, CardTensor)
    yield dist.Backend, "default_device_backend_map", {KIND: "nccl", "cpu": "gloo"}
    begin = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        cards.is_bound = kwargs.pop("device_id", None) is not None
        begin("gloo", *args, **kwargs)

    yield dist, "init_process_group", init_process_group
    make = distributed_c10d._new_group_with_tag

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kw):
        everybody = range(dist.get_world_size())
        cards.note_group(list(everybody if ranks is None else ranks), len(everybody), backend)
        return make(ranks, timeout, backend, *args, **kw)

    yield distributed_c10d, "_new_group_with_tag", new_group
    wait = dist.Work.wait

    def wait_for_network(self: dist.Work, *args: Any) -> bool:
        done = wait(self, *args)
        cards.await_network()
        return done

    yield dist.Work, "wait", wait_for_network


nothing = contextlib.nullcontext


def _devices(cards: "Cards") -> dict[str, Any]:
    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="an emulated card",
            total_memory=cards.memory.size,
            major=9,
            minor=0,
            multi_processor_count=132,
        )

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: cards.count,
        "current_device": lambda: index_of(),
        "set_device": lambda device: cards.native.cards_set_device(index_of(device)),
        "device": on_card,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties().name,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
    }


def _streams(cards: "Cards") -> dict[str, Any]:
    def synchronize(device: Any = None) -> None:
        cards.note_wait("cuda.synchronize")
        cards.order.join(HOST)

    def set_stream(stream: Stream) -> None:
        cards.native.cards_set_device(stream.device.index)
        cards.native.cards_set_stream(stream.device.index, stream.stream_id)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(device, stream_id=0),
        "synchronize": synchronize,
        "_sleep": lambda cycles: None,
        "is_current_stream_capturing": lambda: False,
        "set_sync_debug_mode": lambda mode: setattr(cards, "warns_of_waits", mode),
        "get_sync_debug_mode": lambda: cards.warns_of_waits,
    }


def _memory(cards: "Cards") -> dict[str, Any]:
    memory = cards.memory

    def reset_peak(device: Any = None) -> None:
        memory.peak[index_of(device)] = memory.allocated[index_of(device)]

    def register(start: int, length: int, flags: int) -> int:
        if any(first < start + length and start < end for first, end in memory.registered.items()):
            return ALREADY_REGISTERED
        memory.registered[start] = start + length
        return 0

    def unregister(start: int) -> int:
        del memory.registered[start]
        return 0

    def free(device: Any = None) -> int:
        return memory.size - memory.allocated[index_of(device)]

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    return {
        "cudart": lambda: runtime,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (free(device), memory.size),
        "memory_allocated": lambda device=None: memory.allocated[index_of(device)],
        "memory_reserved": lambda device=None: memory.allocated[index_of(device)],
        "max_memory_allocated": lambda device=None: memory.peak[index_of(device)],
        "max_memory_reserved": lambda device=None: memory.peak[index_of(device)],
        "reset_peak_memory_stats": reset_peak,
    }


def _generators(cards: "Cards") -> dict[str, Any]:
    def seed_all(seed: int) -> None:
        for generator in cards.generators:
            generator.manual_seed(seed)

    def own(device: Any = None) -> torch.Generator:
        return cards.generators[index_of(device)]

    return {
        "default_generators": cards.generators,
        "manual_seed": lambda seed: own().manual_seed(seed),
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: own(device).get_state(),
        "set_rng_state": lambda state, device=None: own(device).set_state(state),
    }
