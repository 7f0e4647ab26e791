"""Plans the split of a model and what crosses each border: plain data, found by a tracing pass.

A stage begins at its first own layer and ends behind its last one, whatever the code around the
layers does. Whether code is before, in or behind the layers depends on when it is called, not on
its name. What cannot be split exactly is refused.

Places: -1 before the first layer, i in layer i or between it and the next, n behind the last.
Border k is before layer k; border n behind the last layer, before the head.

Shapes: B rows, T tokens, N image tokens of the micro-batch.
"""

import bisect
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from stageline.errors import UserError
from stageline.pipeline.live_bytes import storage_of
from stageline.stages.rehearsal import (
    ForwardTrace,
    Leaf,
    Path,
    TracedCall,
    identity_of,
    rehearse,
    walk,
)

Batch = Mapping[str, torch.Tensor]
Run = Callable[[Batch], object]
Dim = int | str | tuple[str, int]  # a number, a letter, or a letter and so many more
Where = int | str  # a layer, or the name of a module around the layers


@dataclass(frozen=True)
class Slot:
    """A tensor that crosses a border.

    Attributes:
        places: (layer or module around the layers, path in its arguments) where it is taken.
        dims: of its shape: numbers, or "B", "T", "BT", "N" of the micro-batch, or such a letter
            and a number that comes on top.
        is_filled: the code between the layers reads it too, so the model's own tensor is filled.
        instead: layers before the first place that were passed over. One that is called after all
            (it attends to pictures of earlier passes) takes the tensor, in the same place.
    """

    places: tuple[tuple[Where, Path], ...]
    dims: tuple[Dim, ...]
    dtype: torch.dtype
    is_filled: bool = False
    instead: tuple[int, ...] = ()

    def meta(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """A tensor of its shape on the meta device."""

        def size_of(dim: Dim) -> int:
            if isinstance(dim, tuple):
                return sizes[dim[0]] + dim[1]
            return sizes[dim] if isinstance(dim, str) else dim

        return torch.empty([*map(size_of, self.dims)], dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class SplitPlan:
    """The split of one model.

    Attributes:
        layers: module path of the list of layers.
        size: number of layers.
        owners: parameter name, aliases of tied weights included -> places where it is read.
        borders: slots of border 0 to n of a micro-batch without pictures.
        picture_borders: the same of one with pictures; None: the model takes none, or they could
            not be rehearsed.
        outputs: of each layer: its output, as `structure` writes it.
        around: names of the modules around the layers.
        called: modules that are called outside of layers, without pixels -> the first place.
        seen: modules that are called only for pictures, in that order -> last dimension of their
            output, 0 where it is not a tensor.
    """

    layers: str
    size: int
    owners: dict[str, frozenset[int]]
    borders: tuple[tuple[Slot, ...], ...]
    picture_borders: tuple[tuple[Slot, ...], ...] | None
    outputs: tuple[Any, ...]
    around: tuple[str, ...]
    called: Mapping[str, int]
    seen: Mapping[str, int] = field(default_factory=dict)

    @property
    def shared_names(self) -> frozenset[str]:
        """Parameters that are read in several places, and may be on several stages."""
        return frozenset(name for name, places in self.owners.items() if len(places) > 1)

    def slots(self, border: int, *, has_pictures: bool) -> tuple[Slot, ...]:
        """Return the slots that cross a border, hidden states first, integers last."""
        borders = self.picture_borders if has_pictures else None
        return (borders or self.borders)[border]

    def in_dtype(self, dtype: torch.dtype, rehearsed: torch.dtype) -> "SplitPlan":
        """The same plan for a model of another dtype than that of its rehearsal."""

        def changed(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
            return tuple(
                replace(slot, dtype=dtype) if slot.dtype == rehearsed else slot for slot in slots
            )

        pictures = self.picture_borders and tuple(map(changed, self.picture_borders))
        return replace(self, borders=tuple(map(changed, self.borders)), picture_borders=pictures)


@dataclass
class _Watched:
    """One rehearsal with its layers found."""

    log: ForwardTrace
    layers: list[TracedCall | None]  # None: passed over, as layers that look at absent pictures
    given: frozenset[int]  # storages of the batch

    @classmethod
    def of(cls, whole: nn.Module, log: ForwardTrace, layers: str, batch: Batch) -> "_Watched":
        calls = _layer_calls(whole, log, layers)
        return cls(log, calls, frozenset(map(storage_of, batch.values())))

    @functools.cached_property
    def starts(self) -> list[int]:
        """Start times of the layers; one that is passed over begins with the next."""
        found: list[int] = []
        for call in reversed(self.layers):
            found.append(call.start if call else (found[-1] if found else self.end))
        return found[::-1]

    @functools.cached_property
    def end(self) -> int:
        return max(call.end for call in self.layers if call)

    @functools.cached_property
    def given_to(self) -> list[set[int]]:
        """Storages among the arguments of each layer."""
        return [{leaf.identity[0] for leaf in _leaves(call)} for call in self.layers]

    def place(self, time: int) -> int:
        """-1, a layer or n."""
        if time > self.end:
            return len(self.layers)
        return bisect.bisect_right(self.starts, time) - 1


def make_plan(
    whole: nn.Module,
    run: Run,
    batch: Batch,
    *,
    pictures: Batch | None,
    is_pixel: Callable[[str], bool],
    sizes: Callable[[Batch], Mapping[str, int]],
    depth: int | None,
    numbers: Collection[int],
) -> SplitPlan:
    """Rehearse a model that can run, on stand-ins for its weights, and plan its split.

    Args:
        batch: a micro-batch of text.
        pictures: a micro-batch with pictures, if the model takes any.
        is_pixel: whether an input goes only to the first stage.
        sizes: what "B", "T", "BT" and "N" are in a batch; no other number may equal them.
        depth: how many layers the configuration speaks of.
        numbers: that the configuration holds; any other in a shape may follow from the length.

    Raises:
        UserError: the model cannot be split exactly; says why.
    """
    log = rehearse(whole, lambda: run(batch), batch)
    name = _find_layers(whole, log, depth)

    def watch(batch: Batch) -> _Watched:
        return _Watched.of(whole, rehearse(whole, lambda: run(batch), batch), name, batch)

    text = _Watched.of(whole, log, name, batch)
    size, around = len(text.layers), tuple(one for one in log.calls if name.startswith(one + "."))

    again = functools.cache(lambda: watch(longer(batch)))
    owners, called = _owners(whole, name, text), _called(text)
    outputs = text.layers
    picture_borders: tuple[tuple[Slot, ...], ...] | None = None
    seen: dict[str, int] = {}

    def slots_of_any_length(border: int) -> tuple[Slot, ...]:
        """Slots whose dimensions hold for any length.

        A number that the configuration does not name may be the length and some more (prompts of
        the model's own): one token more shows it.
        """
        slots = _slots(whole, text, border, around, sizes(batch))
        odd = {dim for slot in slots for dim in slot.dims if isinstance(dim, int) and dim > 1}
        if odd <= set(numbers):
            return slots
        found, num_tokens = [], sizes(batch)["T"]
        others = _slots(whole, again(), border, around, sizes(longer(batch)))
        for slot, other in zip(slots, others, strict=True):
            dims: list[Dim] = []
            for one, two in zip(slot.dims, other.dims, strict=True):
                is_length = isinstance(one, int) and isinstance(two, int) and two == one + 1
                if one != two and not is_length:
                    why = f"a tensor between its layers is {one} wide for one length and {two} for"
                    raise _refusal(whole, f"{why} the next")
                dims.append(("T", one - num_tokens) if is_length and isinstance(one, int) else one)
            found.append(replace(slot, dims=tuple(dims)))
        return tuple(found)

    borders = tuple(map(slots_of_any_length, range(size + 1)))
    if pictures is not None:
        full = watch(pictures)
        blind = watch({key: value for key, value in pictures.items() if not is_pixel(key)})
        _check_same_positions(whole, full, blind)
        for module, calls in full.log.calls.items():
            if module not in log.calls:
                output = calls[-1].output
                seen[module] = output.shape[-1] if isinstance(output, torch.Tensor) else 0
        owners |= _owners(whole, name, full, only_read=True)
        picture_borders = tuple(
            _slots(whole, full, k, around, sizes(pictures), without=blind) for k in range(size + 1)
        )
        called = {**_called(blind), **called}
        outputs = full.layers
    made = tuple(map(_structure_of, outputs))
    return SplitPlan(name, size, owners, borders, picture_borders, made, around, called, seen)


def _find_layers(whole: nn.Module, log: ForwardTrace, depth: int | None) -> str:
    """The list of modules that are called in a row, of as many as the configuration has layers.

    Takes the one called last of several lists, and the outer one of lists inside each other.
    """
    found = []
    for name, module in whole.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 0:
            calls = [log.calls.get(f"{name}.{leaf}") for leaf in module._modules]
            if any(calls):
                end = max(call.end for one in calls for call in one or ())
                found.append((len(module) == depth, end, -len(name), name))
    if not found:
        raise _refusal(whole, "none of its lists of modules is called")
    return max(found)[-1]


def _layer_calls(whole: nn.Module, log: ForwardTrace, name: str) -> list[TracedCall | None]:
    layers: list[TracedCall | None] = []
    end = 0
    for leaf in whole.get_submodule(name)._modules:
        calls = log.calls.get(f"{name}.{leaf}", [])
        if len(calls) > 1:
            raise _refusal(whole, f"{name}.{leaf} is called {len(calls)} times in one forward pass")
        if calls and calls[0].start < end:
            raise _refusal(whole, f"{name}.{leaf} is called out of its turn")
        if calls and not calls[0].has_graph:
            raise _refusal(whole, f"{name}.{leaf} runs inside of an autograd function of its own")
        end = calls[0].end if calls else end
        layers.append(calls[0] if calls else None)
    return layers


def _called(watched: _Watched) -> dict[str, int]:
    layers = [call for call in watched.layers if call]
    found: dict[str, int] = {}
    for name, calls in watched.log.calls.items():
        for call in calls:
            if not any(layer.start <= call.start < layer.end for layer in layers):
                found.setdefault(name, watched.place(call.start))
    return found


def _owners(
    whole: nn.Module, layers: str, watched: _Watched, *, only_read: bool = False
) -> dict[str, frozenset[int]]:
    """Parameter name -> the places where it is read.

    The first name of a tied weight has all places, each other name those where its own module reads
    it. A weight that is not read (an expert without a token) belongs to its layer, or to
    the side of the layers on which its module is called; else to the front.
    """
    log = watched.log
    names: dict[int, list[str]] = {}
    for name, weight in whole.named_parameters(remove_duplicate=False):
        names.setdefault(storage_of(weight), []).append(name)
    found: dict[str, frozenset[int]] = {}
    for storage, aliases in names.items():
        times = log.weight_reads.get(storage, [])
        if not times:
            if not only_read:
                place = _unread_place(whole, layers, watched, aliases[0])
                found |= dict.fromkeys(aliases, frozenset({place}))
            continue
        found[aliases[0]] = frozenset(map(watched.place, times))
        # transformers saves and reads a tied weight under the name that the tie gives
        given = set((getattr(whole, "all_tied_weights_keys", None) or {}).values())
        for alias in aliases[1:]:
            if alias in given:
                found[alias] = found[aliases[0]]
                continue
            calls = log.calls.get(alias.rpartition(".")[0], [])
            inside = [t for t in times if any(one.start <= t <= one.end for one in calls)]
            found[alias] = frozenset(map(watched.place, inside or times))
    return found


def _unread_place(whole: nn.Module, layers: str, watched: _Watched, name: str) -> int:
    leaf = name.removeprefix(layers + ".").partition(".")[0]
    if name.startswith(layers + "."):
        return list(whole.get_submodule(layers)._modules).index(leaf)
    path = name
    while path := path.rpartition(".")[0]:
        calls = watched.log.calls.get(path)
        if calls and not layers.startswith(path + "."):
            return watched.place(calls[0].start)
    return -1


def _slots(
    whole: nn.Module,
    watched: _Watched,
    border: int,
    around: Sequence[str],
    sizes: Mapping[str, int],
    *,
    without: _Watched | None = None,
) -> tuple[Slot, ...]:
    """The tensors that cross a border, and where the stages behind it take them."""
    if border == len(watched.layers):
        return _last_slots(whole, watched, sizes)
    start, found = watched.starts[border], dict[Any, list[tuple[Where, Leaf]]]()

    def is_read(leaf: Leaf) -> bool:
        return watched.log.last_read.get(leaf.identity[0], 0) > start

    for layer in range(border, len(watched.layers)):
        for leaf in _leaves(watched.layers[layer]):
            if leaf.is_tainted and leaf.born < start and is_read(leaf):
                found.setdefault(leaf.identity, []).append((layer, leaf))
    outside = _outside_reads(watched, border)
    for name in around:
        had = {leaf.path for leaf in without.log.calls[name][0].leaves} if without else set()
        for leaf in watched.log.calls[name][0].leaves:
            storage = leaf.identity[0]
            is_open = storage in outside and leaf.identity not in found and leaf.is_tainted
            # an input that exists only with pictures, and that a later stage cannot make
            is_new = without and leaf.path not in had and storage not in watched.given
            if is_open or (is_new and is_read(leaf)):
                found.setdefault(leaf.identity, []).append((name, leaf))
                outside.pop(storage, None)
    carried = {identity[0] for identity in found}
    for storage, (time, operator) in outside.items():
        if storage not in carried:
            inside = [
                name
                for name, calls in watched.log.calls.items()
                if any(call.start < time < call.end for call in calls)
            ]
            raise _refusal(
                whole,
                f"behind layer {border - 1}, {operator} in "
                f"{max(inside, key=len, default='the model')} reads a tensor from before it that "
                "no layer is given",
            )
    slots = [
        _slot(places, sizes, is_filled=identity[0] in outside) for identity, places in found.items()
    ]
    # layers right behind the border that were not called: the first one that is works on the slot
    behind = (i for i in range(border, len(watched.layers)) if watched.layers[i])
    first = next(behind, border)
    slots = [
        replace(slot, instead=tuple(range(border, first)))
        if slot.places[0] == (first, ("a", 0))
        else slot
        for slot in slots
    ]
    return tuple(sorted(slots, key=lambda slot: not slot.dtype.is_floating_point))


def _leaves(call: TracedCall | None) -> list[Leaf]:
    return call.leaves if call else []


def _outside_reads(watched: _Watched, border: int) -> dict[int, tuple[int, str]]:
    """Tainted tensors made before the border that the code around the layers reads behind it."""
    log, start = watched.log, watched.starts[border]
    found: dict[int, tuple[int, str]] = {}
    for time, storage, operator in log.reads:
        if time < start or log.born.get(storage, 0) >= start:
            continue
        layer = watched.place(time)
        call = watched.layers[layer] if 0 <= layer < len(watched.layers) else None
        if not (call and time < call.end and storage in watched.given_to[layer]):
            found.setdefault(storage, (time, operator))
    return found


def _last_slots(whole: nn.Module, watched: _Watched, sizes: Mapping[str, int]) -> tuple[Slot, ...]:
    """Return slots for the last layer's output that is read; a stage of only the head needs it."""
    layers = list(enumerate(watched.layers))
    last, call = next((i, call) for i, call in reversed(layers) if call)
    slots = []
    for path, value in walk({"o": call.output}):
        if watched.log.is_tainted(value) and watched.log.last_read.get(storage_of(value), 0):
            leaf = Leaf(path, identity_of(value), call.end, True, value)
            slots.append(_slot([(last, leaf)], sizes))
    return tuple(slots)


def _slot(
    places: Sequence[tuple[Where, Leaf]], sizes: Mapping[str, int], *, is_filled: bool = False
) -> Slot:
    value = places[0][1].value
    letters = {number: letter for letter, number in sizes.items() if number > 1}
    return Slot(
        places=tuple((where, leaf.path) for where, leaf in places),
        dims=tuple(letters.get(size, size) for size in value.shape),
        dtype=value.dtype,
        is_filled=is_filled,
    )


def longer(batch: Batch) -> Batch:
    """The same rows with one more token of text each."""
    shape = batch["input_ids"].shape
    return {
        name: torch.cat([value, value[:, -1:]], dim=1) if value.shape[:2] == shape else value
        for name, value in batch.items()
    }


def _check_same_positions(whole: nn.Module, full: _Watched, blind: _Watched) -> None:
    """Refuses masks or positions that come out otherwise where the pixels are not."""
    for index, (one, other) in enumerate(zip(full.layers, blind.layers, strict=True)):
        others = {leaf.path: leaf for leaf in _leaves(other)}
        for leaf in _leaves(one):
            twin = others.get(leaf.path)
            if leaf.is_tainted or twin is None or twin.is_tainted or other is None:
                continue
            is_fake = isinstance(leaf.value, FakeTensor) or isinstance(twin.value, FakeTensor)
            is_same = leaf.value.shape == twin.value.shape and (
                is_fake or torch.equal(leaf.value.nan_to_num(), twin.value.nan_to_num())
            )
            if not is_same:
                path = ".".join(map(str, leaf.path[1:]))
                raise _refusal(
                    whole,
                    f"layer {index} is given {path}, which follows from pixels that only the first "
                    "stage has",
                )


def _structure_of(call: TracedCall | None) -> Any:
    """The output of a layer as nested tuples: what stands in its place where it does not run."""
    if call is None:
        return ("const", None)
    paths: dict[tuple[int, ...], list[tuple[bool, Path]]] = {}
    for leaf in call.leaves:
        paths.setdefault(tuple(leaf.value.shape), []).append((not leaf.is_tainted, leaf.path))

    def structure(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            alike = paths.get(tuple(value.shape))
            return ("like", min(alike, key=lambda one: one[0])[1] if alike else None)
        if isinstance(value, list | tuple):
            return ("items", type(value), tuple(map(structure, value)))
        is_plain = isinstance(value, int | float | str | bool | None)
        return ("const", value if is_plain else None)

    return structure(call.output)


def rebuild(structure: Any, get: Callable[[Path, Path], Any], path: Path = ("o",)) -> Any:
    """An output of a recorded structure.

    Args:
        get: (path of an argument of the same shape, path in the output) -> what stands there.
    """
    kind = structure[0]
    if kind == "like":
        return get(structure[1], path)
    if kind == "const":
        return structure[1]
    items = [rebuild(one, get, (*path, index)) for index, one in enumerate(structure[2])]
    return structure[1](*items) if hasattr(structure[1], "_fields") else structure[1](items)


def _refusal(whole: nn.Module, reason: str) -> UserError:
    config = getattr(whole, "config", None)
    return UserError(
        f"{type(whole).__name__} ({getattr(config, 'model_type', 'no model type')}) cannot be "
        f"split over stages: {reason}. Train it on one GPU or with `dp_shard`, or write a subclass "
        "of StageModel (docs/add_a_model.md)."
    )
