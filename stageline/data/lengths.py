"""What a collate part says of itself: the length of a row before it is collated, and more.

It does so with functions of its own, which get what the part itself gets:
`part.length_of(images, sample, **common) -> int` and `part.packed(rows, **common) -> micro-batch`,
where a row is a list of (images, sample).
"""

import functools
import inspect
from collections.abc import Callable

from stageline.errors import UserError


def companion(collate: Callable, name: str) -> Callable | None:
    """The function `name` of a collate part, with the arguments that are bound to the part."""
    if not isinstance(collate, functools.partial):
        return getattr(collate, name, None)
    inner = companion(collate.func, name)
    return None if inner is None else functools.partial(inner, *collate.args, **collate.keywords)


def padding_argument(collate: Callable, multiple_of: int) -> dict[str, int]:
    """`pad_to_multiple_of` for a collate part; empty where rows are not rounded.

    Raises:
        UserError: rows are to be rounded, and the part does not take the argument.
    """
    if multiple_of == 1:
        return {}
    taken = inspect.signature(collate).parameters
    if "pad_to_multiple_of" in taken or any(
        item.kind is item.VAR_KEYWORD for item in taken.values()
    ):
        return {"pad_to_multiple_of": multiple_of}
    raise UserError(
        f"--pad-to-multiple-of {multiple_of} was given, and the chosen --collate-fn does not take "
        "pad_to_multiple_of. It was expected to, because it pads the rows: add the argument and "
        "hand it to collate_sft or pad_rows, use --collate-fn sft, or leave the option out."
    )
