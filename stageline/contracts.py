"""Build the error of a component that breaks its contract (docs/add_a_part.md).

Knows no register and no key: a part is named by what it is called and where it is written. Who
calls a part looks at what came back.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stageline.errors import ContractError, UserError

# labels and keys of a batch that data writes and stages and losses read
IGNORE = -100
ROW_LENGTHS, SHARED = "row_lengths", "shared_positions"  # SHARED: [S], where all rows are alike

_ROOT = Path(__file__).resolve().parents[1]


def broken(
    register: str,
    part: object,
    came: str,
    *,
    why: str,
    cure: str,
    kind: type[UserError] = ContractError,
) -> UserError:
    """Return the error of a component that breaks its contract.

    Args:
        came: what it did, "returned a dict".
        kind: of error; DataError where a row is wrong.
    """
    guide = "add_a_model.md" if register in ("train_model", "stage model") else "add_a_part.md"
    return kind(f"the {register} {part_name(part)} {came}. {why}: {cure}. Contract: docs/{guide}.")


def call(register: str, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a part; raise ContractError if it does not take these arguments."""
    try:
        return part(*args, **kwargs)
    except TypeError:
        check_call(register, part, *args, **kwargs)
        raise  # a mistake inside, which its traceback tells


def check_call(register: str, part: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Refuse a part that does not take these arguments, without calling it."""
    problem = mismatch(part, *args, **kwargs)
    if problem is not None:
        handed = ", ".join([*("..." for _ in args), *(f"{name}=..." for name in kwargs)])
        raise broken(
            register,
            part,
            f"has the signature {str(inspect.signature(_unwrapped(part)))[:200]} ({problem})",
            why=f"It is called with ({handed})",
            cure="change the signature; **others takes what the part does not need",
        )


def mismatch(part: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Return why a component does not take these arguments; None: it does, or is unknown."""
    while isinstance(part, functools.partial):  # its own signature hides the mismatch
        args, kwargs = (*part.args, *args), {**part.keywords, **kwargs}
        part = part.func
    # each row asks about two functions; a method would keep its object alive
    look = _problem if inspect.isfunction(part) else _problem.__wrapped__
    return look(part, len(args), tuple(kwargs))


@functools.lru_cache
def _problem(part: Callable[..., Any], num_args: int, names: tuple[str, ...]) -> str | None:
    try:
        inspect.signature(part).bind(*[None] * num_args, **dict.fromkeys(names))
    except (TypeError, ValueError) as error:  # built-in functions have no signature to read
        return str(error) if isinstance(error, TypeError) else None
    return None


def _unwrapped(part: Any) -> Any:
    """Return the component itself, without partials or an object around it."""
    if isinstance(part, functools.partial):
        return _unwrapped(part.func)
    if hasattr(part, "__wrapped__") and not inspect.isroutine(part):
        return _unwrapped(part.__wrapped__)
    return part


def part_name(part: object) -> str:
    """Return the name of a component with file and line: `my_loss (my_parts.py:12)`."""
    inner = _unwrapped(part)
    is_named = inspect.isroutine(inner) or inspect.isclass(inner)
    target: Any = inspect.unwrap(inner) if is_named else type(inner)
    name = target.__qualname__
    try:
        file = Path(inspect.getsourcefile(target) or "")
        line = inspect.getsourcelines(target)[1]
    except (TypeError, OSError):  # built into the interpreter, or without a file
        return name
    return f"{name} ({file.relative_to(_ROOT) if file.is_relative_to(_ROOT) else file}:{line})"


def shown(value: object) -> str:
    """Return a short description of a value: its type, and the shape of a tensor."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {list(value.shape)} in {kind}"
    if value is None:
        return "None (a forgotten return?)"
    name = type(value).__name__
    name = f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    if isinstance(value, dict):
        return f"{name} with {', '.join(map(repr, list(value)[:6])) or 'nothing in it'}"
    if isinstance(value, list | tuple):
        inside = [type(item).__name__ for item in value[:4]] + ["..."] * (len(value) > 4)
        return f"{name} of {len(value)} ({', '.join(inside)})"
    text = " ".join(repr(value).split())
    return f"{name}: {text if len(text) <= 60 else f'{text[:60]} ...'}"
