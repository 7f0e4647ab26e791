"""Operations of torch that differ between a card and a CPU: those that wait, copy or touch nothing.

Only facts about operations; no state.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
HERE = str(Path(__file__).parent)
aten = torch.ops.aten

COPIES = {aten._to_copy.default, aten.copy_.default}
# they take indices that are on the host, and copy them over
INDEXING = {
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default),
    *(aten._unsafe_index.Tensor, aten._unsafe_index_put.default, aten._index_put_impl_.default),
}
# a result's size or value is asked for on the host
WAITING = frozenset(
    "_local_scalar_dense nonzero equal masked_select _unique _unique2 unique_dim bincount "
    "unique_consecutive is_nonzero linalg_eig _linalg_svd linalg_qr".split()
)
# these kernels take no number on the host as an argument, only as a tensor on another device
STRICT = frozenset("mm bmm addmm baddbmm embedding index_select gather scatter cat stack".split())
# they look at no value: no kernel reads or writes
VALUELESS = frozenset(
    "detach alias view _unsafe_view expand t transpose permute slice select unsqueeze squeeze "
    "split split_with_sizes unbind as_strided _reshape_alias lift_fresh unfold diagonal empty "
    "empty_like empty_strided new_empty new_empty_strided is_same_size sym_size narrow chunk "
    "is_pinned record_stream set_ resize_ view_as_real view_as_complex".split()
)

MADE_BY_SIZE = ("empty", "empty_strided", "zeros", "ones", "full")


def _histc(func: Any, values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return func(values.float(), *args, **kwargs).to(values.dtype)


def _softmax(func: Any, values: torch.Tensor, dim: int, widens: bool) -> torch.Tensor:
    return func(values.float() if widens else values, dim, False)


def _softmax_backward(
    func: Any, grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    return func(grad, output, dim, grad.dtype).to(dtype)


# a CPU has these in fewer types, or none that a card narrows and widens by the way
ON_A_CPU: dict[str, Callable[..., torch.Tensor]] = {
    "histc": _histc,
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
}


class Facts:
    """Facts of an operation that no call changes; `facts_of` keeps them.

    Attributes:
        name: `add` of aten::add.Tensor.
        is_composite: whether it is made of others; only autograd takes it apart, for gradients.
        is_collective: whether ranks take part in it.
        is_random: whether it draws from a generator.
        returns_alias: whether what it returns is an argument, or a view of one.
        returns_first: whether that is the first argument, into which it writes.
        written: places and names of the arguments that it writes into.
    """

    def __init__(self, func: Any) -> None:
        self.func = func  # so that its identity belongs to nothing else
        self.name = func._schema.name.partition("::")[2]
        key = "CompositeImplicitAutograd"
        self.is_composite = func.namespace == "aten" and (
            torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
        )
        self.is_collective = func.namespace in ("c10d", "_c10d_functional")
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.is_copy = func in COPIES
        self.is_index = func in INDEXING
        self.is_valueless = self.name in VALUELESS
        self.waits = self.name in WAITING
        self.made_by_size = self.name in MADE_BY_SIZE
        self.on_a_cpu = ON_A_CPU.get(self.name)
        self.returns_alias = any(each.alias_info is not None for each in func._schema.returns)
        arguments = list(enumerate(func._schema.arguments))
        self.written = [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]
        self.returns_first = (
            [i for i, _ in self.written] == [0]
            and len(func._schema.returns) == 1
            and func._schema.returns[0].alias_info is not None
        )


_FACTS: dict[int, Facts] = {}


def facts_of(func: Any) -> Facts:
    """Return the facts of an operation, by identity: its hash is computed in Python."""
    found = _FACTS.get(id(func))
    if found is None:
        found = _FACTS[id(func)] = Facts(func)
    return found


def name_of(func: Any) -> str:
    """`add` of aten::add.Tensor."""
    return facts_of(func).name


def replaced(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Nested lists, tuples and dicts with other tensors in them: faster than torch's pytree."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)([replaced(each, change) for each in value])
    if type(value) is dict:
        return {name: replaced(each, change) for name, each in value.items()}
    return value


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return all tensors in nested lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += tensors_in(*value)
        elif type(value) is dict:
            found += tensors_in(*value.values())
    return found


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments that an operation writes into."""
    for index, name in facts_of(func).written:
        value = args[index] if index < len(args) else kwargs.get(name)
        yield from tensors_in(value)


def waits(facts: Facts, tensors: list[torch.Tensor]) -> bool:
    """Whether the host waits for the card to see a value; a mask's number of hits is one."""
    if facts.is_index:
        return facts.waits or any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:])
    return facts.waits


def must_match(facts: Facts, tensor: torch.Tensor) -> bool:
    """Whether a tensor on the host is refused next to tensors of a card."""
    if tensor.dim() == 0:
        return facts.name in STRICT
    return not (facts.is_index and not tensor.is_floating_point())


class Place:
    """The current place of the host: in the project, and in another package that it called.

    It keeps code and offset, and finds the line when it is told: each operation makes one.
    """

    def __init__(self) -> None:
        self._own = self._library = None
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            kind = _kind(code.co_filename)
            if kind == "own":
                self._own = code, frame.f_lasti
                break
            if kind == "library" and self._library is None:
                self._library = code, frame.f_lasti
            frame = frame.f_back

    def own(self) -> str:
        """`folder/file.py:line` of the innermost frame of the project; "?" without one."""
        if self._own is None:
            return "?"
        return f"{Path(self._own[0].co_filename).relative_to(ROOT)}:{_line(*self._own)}"

    def library(self) -> str:
        """`file.py:line` of the innermost frame of a library below it, torch apart; or ""."""
        if self._library is None:
            return ""
        return f"{Path(self._library[0].co_filename).name}:{_line(*self._library)}"

    def __str__(self) -> str:
        library = self.library()
        return f"{library} < {self.own()}" if library else self.own()


def _line(code: CodeType, offset: int) -> int | None:
    return next(line for start, end, line in code.co_lines() if start <= offset < end)


@functools.cache
def _kind(file: str) -> str:
    """Return the owner of a file: "own" (project), "library" or "" (torch, Python, tests)."""
    if "site-packages" in file:
        return "" if "/torch/" in file else "library"
    return "own" if file.startswith(f"{ROOT}/") and not file.startswith(HERE) else ""
