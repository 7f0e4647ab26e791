"""One to four emulated CUDA cards, for tests on a machine without one.

Inside `with Cards(count=2) as cards:` tensors on "cuda:1" hold true values on the host, so all
that a card runs runs here, with true results, and

- an operation on tensors of two devices raises, as a card's kernels do;
- `cards.races` says where memory is used while another stream may write it, or is free while one
  may use it: streams, events, `record_stream` and page-locked memory count (order.py);
- `cards.waits` says where the host waited for a card;
- memory figures are those of torch's allocator, and a card that is full says so.

What it cannot show is listed in docs/gpu.md. native.load() must come before torch is imported.
"""

import contextlib
import ctypes
import functools
import math
import threading
import warnings
from collections import Counter
from typing import Any, NamedTuple, Self
from unittest import mock

import torch
import torch._dynamo  # noqa: F401 (imported late, inside a mode, it would look at torch.cuda)
from torch._decomp import get_decompositions
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tests.helpers.emulated_gpu import torch_cuda
from tests.helpers.emulated_gpu.memory import Memory
from tests.helpers.emulated_gpu.native import KIND, MOST_CARDS
from tests.helpers.emulated_gpu.operations import (
    Facts,
    Place,
    facts_of,
    must_match,
    name_of,
    replaced,
    tensors_in,
    waits,
    written,
)
from tests.helpers.emulated_gpu.order import HOST, Actor, Order
from tests.helpers.emulated_gpu.tensor import CardTensor, values_of

_device._device_constructors()  # remembered before torch.tensor is another one
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_long)
CPU = torch.device("cpu")
NETWORK = -1  # the stream of NCCL on each card


@functools.cache
def _complete_cpu() -> torch.library.Library:
    """Give the CPU two operations that torch calls for tensors of cards only.

    They are the backward pass of its RMSNorm, and products of half factors as float32.
    """
    library = torch.library.Library("aten", "IMPL")  # the cache keeps it, or its kernels end
    backward = torch.ops.aten._fused_rms_norm_backward.default
    if not torch._C._dispatch_has_kernel_for_dispatch_key(backward.name(), "CPU"):
        library.impl(backward, get_decompositions([backward])[backward], "CPU")
    product = torch.ops.aten.mm.dtype
    if not torch._C._dispatch_has_kernel_for_dispatch_key(product.name(), "CPU"):
        library.impl(product, lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")
    return library


class Wait(NamedTuple):
    """A place where the host waited: of the project, and of the other package that it called."""

    place: str
    library: str
    kind: str


class MixedDevices(RuntimeError):
    """An operation got tensors of two devices."""


class Cards:
    """The emulator; entered once at a time.

    Args:
        native: what native.load() returned.
        memory: bytes of each card.

    Attributes:
        entered: those that are there now.
        count: how many cards torch tells; may be set.
        waits: where the host waited -> how often.
        works: operation -> how often a card ran it.
        collectives: in what order this rank took part in which, and on which kind of device:
            gloo and NCCL would wait for each other for ever.
        groups: the process groups in the order in which this rank took part in making them.
        warns_of_waits: "default", "warn" or "error", as `torch.cuda.set_sync_debug_mode` says.
    """

    entered: "Cards | None" = None

    def __init__(self, native: ctypes.CDLL, count: int = 1, *, memory: int = 8 << 30) -> None:
        self.native = native
        self.count = count
        self.order = Order()
        self.memory = Memory(self.order, count=MOST_CARDS, size=memory)
        self.waits: Counter[Wait] = Counter()
        self.works: Counter[str] = Counter()
        self.collectives: list[str] = []
        self.groups: list[str] = []
        self.is_bound = False  # whether the first group was made with its device
        self.warns_of_waits: str | int = "default"
        self.generators = tuple(torch.Generator().manual_seed(i) for i in range(MOST_CARDS))
        self._random = threading.Lock()
        self._sent: set[int] = set()  # cards that NCCL was given work of
        self._stack = contextlib.ExitStack()
        self._listener = LISTENER(self._heard)

    @property
    def races(self) -> Counter[str]:
        """Sentences on memory that was used out of order -> how often."""
        return self.order.races

    def __enter__(self) -> Self:
        assert Cards.entered is None, "cards are there already"
        Cards.entered = CardTensor.cards = self
        self.native.cards_guard()
        _complete_cpu()
        self.native.cards_listen(self._listener)
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        # parameters keep their identity when a module moves, which they do on a card
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        self._stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)
        for owner, name, new in torch_cuda.replacements(self):
            self._stack.enter_context(mock.patch.object(owner, name, new, create=True))
        self._stack.enter_context(_in_every_thread(self))
        self._stack.enter_context(_Watch(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.native.cards_listen(LISTENER(0))
        Cards.entered = CardTensor.cards = None

    def clear(self) -> None:
        """Forget what was seen; pending work stays."""
        self.waits.clear()
        self.works.clear()
        self.collectives.clear()
        self.groups.clear()
        self.races.clear()

    # -- what torch.cuda asks --

    def stream_of(self, device: torch.device) -> Actor:
        """Return the current stream of a card in this thread."""
        return device.index, self.native.cards_stream(device.index)

    def wait_for_card(self, kind: str, device: torch.device) -> None:
        """Let the host wait for the current stream of a card."""
        self.note_wait(kind)
        self.order.join(HOST, self.stream_of(device))

    def note_wait(self, kind: str) -> None:
        """Count a wait of the host, and warn if torch was told to."""
        place = Place()
        self.waits[Wait(place.own(), place.library(), kind)] += 1
        if self.warns_of_waits not in ("default", 0) and not kind.endswith("synchronize"):
            text = f"called a synchronizing CUDA operation ({kind}) at {place}"
            if self.warns_of_waits in ("error", 2):
                raise RuntimeError(text)
            warnings.warn(text, stacklevel=2)

    def record_stream(self, tensor: CardTensor, stream: "torch_cuda.Stream") -> None:
        """Act like `Tensor.record_stream`."""
        key = self.memory.key(tensor)
        assert key is not None
        self.order.record_stream(key, stream.actor)

    def _heard(self, kind: int, event: int, device: int, stream: int) -> None:
        """Follow what autograd records and waits for by itself."""
        key = ("autograd", event)
        if kind == 0:
            self.order.record(key, (device, stream))
        else:
            self.order.wait((device, stream), key)

    # -- operations --

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation on tensors of a card, or one that makes some."""
        facts = facts_of(func)
        wanted = self._wanted(kwargs) if kwargs else None
        if facts.is_collective:
            return self._collective(func, args, kwargs)
        if facts.is_composite:
            with _Watch(self):
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if facts.is_copy:
            return self._copy(func, args, kwargs, wanted)
        tensors = tensors_in(args, kwargs) if kwargs else tensors_in(*args)
        ours = [x for x in tensors if isinstance(x, CardTensor)]
        device = self._one_device(facts, tensors, ours, wanted)
        target = wanted or device
        inner_args, inner_kwargs = tuple([replaced(x, values_of) for x in args]), kwargs
        pins = False
        if kwargs:
            inner_kwargs = replaced(kwargs, values_of)
            if "device" in inner_kwargs:
                inner_kwargs["device"] = CPU
            pins = bool(inner_kwargs.pop("pin_memory", False))
        if waits(facts, tensors):
            self.wait_for_card(facts.name, device)
        if facts.made_by_size and target.type == KIND:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            self.memory.refuse(math.prod(args[0]) * dtype.itemsize, target.index)
        made = self._compute(facts, inner_args, inner_kwargs, target)
        if target.type != KIND:
            return self.memory.pin(made) if pins else made
        if facts.name in ("set_", "resize_"):
            args[0].storage_key = None
        stream = self.stream_of(target)
        if facts.returns_first and not facts.is_valueless:  # written in place
            self._note_work(facts, args, kwargs, stream, ours, ())
            return args[0]
        out = replaced(made, lambda values: self.memory.place(values, target, stream))
        if not facts.is_valueless:
            self._note_work(facts, args, kwargs, stream, ours, out)
        if facts.returns_alias:
            return return_and_correct_aliasing(func, args, kwargs, out)
        return out

    def on_host(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation on the host, and follow it if its memory is page-locked."""
        facts = facts_of(func)
        if facts.is_collective:
            self._note_collective(func, "cpu")
        pins = bool(kwargs.get("pin_memory"))
        made = func(*args, **({**kwargs, "pin_memory": False} if pins else kwargs))
        if pins:
            self.memory.pin(made)
        if self.memory.has_pinned() and not facts.is_valueless:
            pinned = [x for x in tensors_in(args, kwargs) if self.memory.is_pinned(x)]
            if pinned:
                reads = {self.memory.host_part(x) for x in pinned}
                writes = {self.memory.part(x) for x in written(func, args, kwargs)}
                self.order.work(HOST, reads, reads & writes, _told(func))
        return made

    def _note_work(
        self, facts: Facts, args: tuple, kwargs: dict, stream: Actor, ours: list, out: Any
    ) -> None:
        old = {self.memory.part(x) for x in ours}
        known = {part[0] for part in old if part is not None}
        writes = {self.memory.part(x) for x in tensors_in(out) if self.memory.key(x) not in known}
        if facts.written:
            writes.update(self.memory.part(x) for x in written(facts.func, args, kwargs))
        old.discard(None)
        writes.discard(None)
        self.works[facts.name] += 1
        self.order.work(stream, old, writes, _told(facts.func))

    def _wanted(self, kwargs: dict[str, Any]) -> torch.device | None:
        if kwargs.get("device") is None:
            return None
        device = torch.device(kwargs["device"])
        if device.type == KIND and device.index is None:
            device = torch.device(KIND, self.native.cards_device())
        if device.type == KIND and device.index >= self.count:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal {device.index}: {self.count} cards are there"
            )
        return device

    def _one_device(
        self,
        facts: Facts,
        tensors: list[torch.Tensor],
        ours: list[CardTensor],
        wanted: torch.device | None,
    ) -> torch.device:
        """Return the card that an operation runs on.

        Raises:
            MixedDevices: its tensors are on two.
        """
        if not ours:
            return wanted
        device = ours[0].device
        hosts = [x for x in tensors if not isinstance(x, CardTensor)]
        if any(x.device != device for x in ours[1:]) or any(must_match(facts, x) for x in hosts):
            found = ", ".join(f"{list(x.shape)} on {x.device}" for x in tensors)
            raise MixedDevices(
                f"Expected all tensors to be on the same device, and {facts.func} got {found}, "
                f"at {Place()}"
            )
        if facts.is_index and any(x.dim() for x in hosts):
            self.wait_for_card("index on the host", device)
        return device

    def _compute(self, facts: Facts, args: tuple, kwargs: dict, device: torch.device) -> Any:
        """Compute the values, random ones with the card's generator."""
        func = facts.func
        if facts.on_a_cpu is not None:
            return facts.on_a_cpu(func, *args, **kwargs)
        if not facts.is_random or device.type != KIND or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        generator, own = torch.default_generator, self.generators[device.index]
        with self._random:
            before = generator.get_state()
            generator.set_state(own.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                own.set_state(generator.get_state())
                generator.set_state(before)

    def _copy(
        self, func: Any, args: tuple, kwargs: dict[str, Any], wanted: torch.device | None
    ) -> torch.Tensor:
        if func is aten_copy_:
            target, source = args[:2]
            is_async = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            values_of(target).copy_(values_of(source))
            self._transfer(source, target, is_async)
            return target
        source, is_async = args[0], bool(kwargs.get("non_blocking"))
        device = wanted or source.device
        options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        made = func(values_of(source), **options)
        if device.type == KIND:
            made = self.memory.place(made, device, self.stream_of(device))
        elif is_async:  # torch takes page-locked memory then
            self.memory.pin(made)
        self._transfer(source, made, is_async)
        return made

    def _transfer(self, source: torch.Tensor, target: torch.Tensor, is_async: bool) -> None:
        """Puts a copy into its stream; the host waits unless it is asynchronous and page-locked."""
        ends = source, target
        cards = [x.device for x in ends if isinstance(x, CardTensor)]
        stream = self.stream_of(cards[0])
        other = self.stream_of(cards[-1])
        if other != stream:  # between cards, torch orders the current streams of both
            self._pass(other, stream)
        read, wrote = (
            self.memory.part(x) if isinstance(x, CardTensor) else self.memory.host_part(x)
            for x in ends
        )
        self.works["copy"] += 1
        self.order.work(stream, [read], [wrote], _told("copy"))
        if other != stream:
            self._pass(stream, other)
        if len(cards) == 1:
            host = target if isinstance(source, CardTensor) else source
            way = "to the host" if host is target else "to the card"
            if not (is_async and self.memory.is_pinned(host)):
                kind = "pageable" if is_async else "blocking"
                self.wait_for_card(f"{kind} copy {way}", cards[0])

    def _pass(self, before: Actor, after: Actor) -> None:
        self.order.join(before, HOST)
        self.order.join(after, before)

    def _collective(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run it on the host's values by gloo, and order it like NCCL, on a stream of its own."""
        self._note_collective(func, KIND)
        tensors = tensors_in(args, kwargs)
        ours = {id(x.values): x for x in tensors if isinstance(x, CardTensor)}
        for x in ours.values():
            stream, network = self.stream_of(x.device), (x.device.index, NETWORK)
            self._pass(stream, network)
            part = self.memory.part(x)
            writes = [] if name_of(func) == "send" else [part]
            self.order.work(network, [part], writes, _told(name_of(func)))
            self.order.record_stream(part[0], network)  # NCCL holds what it works on
            self._sent.add(x.device.index)
        found = func(*replaced(args, values_of), **replaced(kwargs, values_of))
        return replaced(found, lambda x: ours.get(id(x), x))

    def _note_collective(self, func: Any, kind: str) -> None:
        if not name_of(func).startswith(("send", "recv")):
            self.collectives.append(f"{name_of(func)} on {kind} at {Place()}")

    def note_group(self, ranks: list[int], world_size: int, backend: str | None) -> None:
        """Record that a group of this run is made.

        Raises:
            RuntimeError: some ranks would split the NCCL group of all, the others not.
        """
        self.groups.append(f"{ranks} by {backend or 'all backends'} at {Place()}")
        has_nccl = backend is None or "nccl" in backend
        if self.is_bound and not has_nccl and len(ranks) < world_size:
            raise RuntimeError(
                f"ranks outside of {ranks} wait for them at {Place()}: where a device is bound, "
                f"torch has them take part in a split of the NCCL group of all, and {ranks}, "
                f"which want {backend} alone, do not"
            )

    def await_network(self) -> None:
        """Order later work of the current streams after all that was sent so far."""
        for index in self._sent:
            self.order.join(self.stream_of(torch.device(KIND, index)), (index, NETWORK))


aten_copy_ = torch.ops.aten.copy_.default


class _Watch(TorchDispatchMode):
    """A mode that sees what makes tensors on a card out of none, and what the host does."""

    def __init__(self, cards: Cards) -> None:
        super().__init__()
        self._cards = cards

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        is_made = device is not None and torch.device(device).type == KIND
        if is_made or CardTensor in types:
            return self._cards.run(func, args, kwargs)
        return self._cards.on_host(func, args, kwargs)


@contextlib.contextmanager
def _in_every_thread(cards: Cards):
    """Threads that are started in here see the cards as well: torch keeps modes by thread."""
    run = threading.Thread.run

    def watched(self: threading.Thread) -> None:
        if CardTensor.cards is not cards:
            return run(self)
        with _Watch(cards):
            return run(self)

    with mock.patch.object(threading.Thread, "run", watched):
        yield


def _told(func: Any):
    """Return a function that formats the operation and its place, for when they are needed."""
    place = Place()
    return lambda: f"{func if isinstance(func, str) else name_of(func)} at {place}"
