"""Makes a whole transformers model one stage of itself, by its split plan.

Every stage runs the model's own forward on the micro-batch's own token ids. Layers of other stages
are stand-ins: those before the own ones return zeros of the right shape; at the first own layer
the tensors received over the border replace its arguments; at the first layer after the own ones
the tensors to send are collected, and the forward ends there. Modules that run before the layers
on every stage (embeddings) compute with zeros for weights that only the first stage has.

Names of modules and parameters stay those of the whole model.
"""

import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stageline.errors import UserError
from stageline.modules.pass_through import DONE, PassThrough
from stageline.stages.rehearsal import Key, Path
from stageline.stages.split_plan import Slot, SplitPlan, Where, rebuild

if TYPE_CHECKING:
    from stageline.stages.base import StageModel as _Mixed
else:
    _Mixed = object

Tensors = tuple[torch.Tensor, ...]
Arguments = dict[str, Any]  # "a": positional ones, "k": by name
OTHER_WAY = (
    "This micro-batch runs the model in another way than it was rehearsed in: set layerdrop to 0, "
    "train it on one GPU, or write a subclass of StageModel."
)


class Cut(BaseException):
    """Ends the forward of a stage that has all it sends; no error, so nothing is to catch it."""


class Absent(PassThrough):
    """Stands for a module of other stages, which is not called here; its attributes can be read.

    Descendants that a module of this stage shares are kept, under their own names.
    """

    _is_hf_initialized = True  # transformers may take it for one of its modules; it has no weights

    def __init__(self, original: nn.Module, *, kept: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not a child: its weights are not here
        for name, child in kept.items():
            self._modules[name] = child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in self.__dict__:
                raise  # while it is copied
            return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError(f"{type(self.original).__name__} is on another stage. {OTHER_WAY}")


class ForeignLayer(Absent):
    """Stands for a layer of another stage: `meet` gives what it returns, or ends the forward."""

    meet: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.meet(args, kwargs)


@dataclass(frozen=True)
class _Hollow:
    """A weight of another stage, in a module that is called on this one too."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device | str) -> torch.Tensor:
        """Return a stand-in that takes no memory and that transformers does not initialize."""
        value = torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)
        setattr(value, DONE, True)
        return value


@dataclass
class _Pass:
    """One forward pass of a stage: slot -> its tensor.

    Attributes:
        taken: slots whose tensor a layer has taken in.
        taken_instead: those that a layer took in the place of the one that was meant.
    """

    came: Tensors
    incoming: tuple[Slot, ...]
    outgoing: tuple[Slot, ...]
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    taken_instead: set[int] = field(default_factory=set)

    @functools.cached_property
    def inject(self) -> dict[Where, list[tuple[Path, int]]]:
        return _by_place(self.incoming)

    @functools.cached_property
    def capture(self) -> dict[Where, list[tuple[Path, int]]]:
        return _by_place(self.outgoing)


def _by_place(slots: Sequence[Slot]) -> dict[Where, list[tuple[Path, int]]]:
    found: dict[Where, list[tuple[Path, int]]] = {}
    for number, slot in enumerate(slots):
        others = [(layer, slot.places[0][1]) for layer in slot.instead]
        for where, path in (*slot.places, *others):
            found.setdefault(where, []).append((path, number))
    return found


class Spliced(_Mixed):
    """Mixed into a stage model of a transformers model."""

    plan: SplitPlan
    whole: Any
    layers: range
    _pass: _Pass | None = None
    _hollow: tuple[_Hollow, ...] = ()

    def owns(self, name: str) -> bool:
        """Whether a parameter of the whole model is read on this stage."""
        places = {*self.layers}
        if self.is_first:
            places.add(-1)
        if self.is_last:
            places.add(self.plan.size)
        return not self.plan.owners[name].isdisjoint(places)

    def splice(self, whole: nn.Module) -> None:
        """Drops from a whole model, in place, what this stage never reads."""
        names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
        self._hollow = ()
        self._keep(whole, "", set(filter(self.owns, names)))

    def _keep(self, module: nn.Module, path: str, own: set[str]) -> None:
        """Goes down to the outermost modules without a weight of this stage."""
        prefix = f"{path}." if path else ""
        if path == self.plan.layers:
            for index, leaf in enumerate(module._modules):
                layer = module._modules[leaf]
                if index in self.layers or layer is None:
                    continue
                kept = {}
                for part, inner in layer.named_children():
                    if _is_below(own, f"{prefix}{leaf}.{part}"):
                        self._keep(inner, f"{prefix}{leaf}.{part}", own)
                        kept[part] = inner
                stand_in = ForeignLayer(layer, kept=kept)
                stand_in.__dict__["meet"] = functools.partial(self._meet, index)
                module._modules[leaf] = stand_in
            return
        for name, weight in list(module._parameters.items()):
            if weight is not None and prefix + name not in own:
                del module._parameters[name]
                hollow = _Hollow(path, name, tuple(weight.shape), weight.dtype)
                module.__dict__[name] = hollow.zeros("cpu")
                self._hollow = (*self._hollow, hollow)
        for leaf, child in list(module._modules.items()):
            if child is None or next(child.parameters(), None) is None:
                continue
            here = prefix + leaf
            is_around = self.plan.layers == here or self.plan.layers.startswith(here + ".")
            # it, or a module below it, is called before the own layers, outside of layers
            is_run = not self.is_first and any(
                place < self.layers.start and (name == here or name.startswith(here + "."))
                for name, place in self.plan.called.items()
            )
            if is_around or is_run or _is_below(own, here):
                self._keep(child, here, own)
            else:
                module._modules[leaf] = Absent(child, kept={})

    def enlarge_hollow(self, paths: Sequence[str], num_rows: int) -> None:
        """Give embedding and head of other stages more rows too: token ids may name them."""
        self._hollow = tuple(
            replace(hollow, shape=(max(num_rows, hollow.shape[0]), *hollow.shape[1:]))
            if hollow.path in paths
            else hollow
            for hollow in self._hollow
        )

    def intercept(self) -> None:
        """Puts hooks where tensors of the borders are arguments; once, on the stage's modules."""
        for index, leaf in enumerate(self.whole.get_submodule(self.plan.layers)._modules):
            if index in self.layers:
                layer = self.whole.get_submodule(f"{self.plan.layers}.{leaf}")
                hook = functools.partial(self._exchange, index)
                layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                if index == self.plan.size - 1 and not self.is_last:
                    layer.register_forward_hook(self._leave)  # the next stage has only the head
        for name in self.plan.around:
            hook = functools.partial(self._exchange, name)
            self.whole.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    def run_spliced(
        self, run: Callable[[], Any], came: Tensors, *, has_pictures: bool, ids: torch.Tensor
    ) -> Any:
        """Run the model's forward as this stage, on what the stage before sent.

        Returns:
            What `run` returns on the last stage, else the tensors to send.
        """
        plan = self.plan
        incoming = () if self.is_first else plan.slots(self.layers.start, has_pictures=has_pictures)
        outgoing = () if self.is_last else plan.slots(self.layers.stop, has_pictures=has_pictures)
        assert len(came) == len(incoming), f"{len(came)} tensors for {len(incoming)} slots"
        current = self._pass = _Pass(came, incoming, outgoing)
        output: Any = None
        is_cut = False
        try:
            with self._filled(ids.device):
                output = run()
        except Cut:
            is_cut, output = True, ()
            for number in range(len(outgoing)):
                tensor = current.sent[number]
                # an input that is handed on unchanged would have no pass of its own
                is_input = any(tensor is one for one in came)
                output = (*output, tensor.clone() if is_input else tensor)
        finally:
            self._pass = None
        if (is_cut or self.is_last) and (0 in current.taken or not came):
            return output
        raise UserError(
            f"Stage {self.stage} of {type(self.whole).__name__} ran without a call of its first "
            f"layer or of the next stage's. {OTHER_WAY}"
        )

    def _current(self) -> _Pass:
        assert self._pass is not None, "outside of a pass"
        return self._pass

    @contextmanager
    def _filled(self, device: torch.device) -> Any:
        """Zeros of the right shape, which take no memory, in the place of others' weights."""
        holders = [self.whole.get_submodule(hollow.path).__dict__ for hollow in self._hollow]
        for values, hollow in zip(holders, self._hollow, strict=True):
            values[hollow.name] = hollow.zeros(device)
        try:
            yield
        finally:
            for values, hollow in zip(holders, self._hollow, strict=True):
                values[hollow.name] = hollow.zeros("cpu")

    def _exchange(
        self, where: Where, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Insert received tensors and collect tensors to send; a pre-hook."""
        current = self._pass
        if current is None or (where not in current.inject and where not in current.capture):
            return None  # without a pass, a module is called by itself
        arguments = self._take_in(where, {"a": args, "k": kwargs})
        return arguments["a"], arguments["k"]

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Collect the last layer's output for a stage of only the head, and end the forward."""
        if self._pass is None:
            return
        for number, slot in enumerate(self._pass.outgoing):
            self._pass.sent[number] = reach({"o": output}, slot.places[0][1])
        raise Cut

    def _meet(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A layer of another stage is called."""
        current = self._current()
        arguments = self._take_in(index, {"a": args, "k": kwargs})
        if not self.is_last and len(current.sent) == len(current.outgoing):
            raise Cut
        is_end = index == self.plan.size - 1 and self.layers.start == self.plan.size
        if is_end:  # a stage of only the head begins after the last layer
            current.taken.add(0)
            outputs = {
                slot.places[0][1]: tensor
                for slot, tensor in zip(current.incoming, current.came, strict=True)
            }
            return rebuild(self.plan.outputs[index], lambda _, path: outputs.get(path))

        def zeros(like: Path | None, _: Path) -> torch.Tensor | None:
            # fresh ones: the model may hold the argument under another name, and fill it
            value = None if like is None else reach(arguments, like)
            return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

        return rebuild(self.plan.outputs[index], zeros)

    def _take_in(self, where: Where, arguments: Arguments) -> Arguments:
        current = self._current()
        begins = self.layers.start
        if isinstance(where, str) or begins <= where:
            for path, number in current.inject.get(where, ()):
                if number in current.taken_instead:
                    continue
                if where in current.incoming[number].instead:
                    current.taken_instead.add(number)
                tensor = current.came[number]
                if current.incoming[number].is_filled:
                    # the code around the layers holds the model's own tensor: that one is filled
                    tensor = reach(arguments, path).copy_(tensor)
                arguments = put(arguments, path, tensor)
                current.taken.add(number)
        for path, number in current.capture.get(where, ()):
            if number not in current.sent:
                current.sent[number] = reach(arguments, path)
        return arguments


def _is_below(own: set[str], path: str) -> bool:
    return any(name.startswith(path + ".") for name in own)


def reach(value: Any, path: Path) -> Any:
    """Return the value at a path in nested mappings, lists and tuples; None if there is none."""
    for step in path:
        key = step.value if isinstance(step, Key) else step
        if value is None or (isinstance(value, Mapping) and key not in value):
            return None
        value = value[key]
    return value


def put(value: Any, path: Path, tensor: torch.Tensor) -> Any:
    """`value` with a tensor at a path; mappings that layers share are written in place."""
    if not path:
        return tensor
    step, rest = path[0], path[1:]
    if isinstance(value, MutableMapping):
        key = step.value if isinstance(step, Key) else step
        value[key] = put(value.get(key), rest, tensor)
        return value
    items = list(value) if value is not None else []
    if isinstance(step, int):
        # entries that only earlier stages need are read here too, behind layers that give zeros
        missing = step + 1 - len(items)
        items += [None if rest else torch.zeros_like(tensor) for _ in range(missing)]
        items[step] = put(items[step], rest, tensor)
        return tuple(items) if isinstance(value, tuple) else items
    return {step.value if isinstance(step, Key) else step: put(None, rest, tensor)}
