"""Requests and events as plain values for JSON, and back.

A dataclass becomes its fields and its name. What comes in can make nothing but the dataclasses of
`decoding.request`, unlike a pickle; new fields and kinds there travel as the others do.
"""

from dataclasses import fields, is_dataclass
from typing import Any

import stageline.inference.decoding.request as kinds
from stageline.errors import DataError, MemoryFull, UserError
from stageline.inference.decoding.request import EngineError, Failed

_NAME, _PROMPT = "@", "prompt"
_classes = {name: value for name, value in vars(kinds).items() if isinstance(value, type)}
_KINDS = {name: one for name, one in _classes.items() if is_dataclass(one)}
# what a server tells apart; any other error is one of the engine
_ERRORS: dict[str, type[Exception]] = {
    **{kind.__name__: kind for kind in (UserError, DataError, MemoryFull)},
    **{name: one for name, one in _classes.items() if issubclass(one, EngineError)},
}


def as_plain(value: Any) -> Any:
    """Fields and names in place of dataclasses, lists in place of tuples.

    A prompt is left out: it travels as tensors.

    Raises:
        TypeError: a dataclass of another kind.
    """
    if isinstance(value, Failed):
        return {_NAME: "Failed", "key": value.key, "error": _plain_error(value.error)}
    if is_dataclass(value):
        name = type(value).__name__
        if _KINDS.get(name) is not type(value):
            raise TypeError(f"{name} can't be sent to another replica")
        names = [field.name for field in fields(value) if field.name != _PROMPT]
        return {_NAME: name, **{name: as_plain(getattr(value, name)) for name in names}}
    if isinstance(value, tuple | list):
        return [as_plain(one) for one in value]
    return value


def of_plain(value: Any, **more: Any) -> Any:
    """What `as_plain` was given; each list was a tuple, but for those inside of a dict.

    Args:
        more: fields that were left out.
    """
    if isinstance(value, list):
        return tuple(of_plain(one) for one in value)
    if not isinstance(value, dict) or _NAME not in value:
        return value
    given = {name: of_plain(one) for name, one in value.items() if name != _NAME}
    if value[_NAME] == "Failed":
        kind, text = given["error"]
        return Failed(given["key"], _ERRORS[kind](text))
    return _KINDS[value[_NAME]](**given, **more)


def _plain_error(error: Exception) -> list[str]:
    for kind in type(error).__mro__:
        if _ERRORS.get(kind.__name__) is kind:
            return [kind.__name__, str(error)]
    return [EngineError.__name__, f"{type(error).__name__}: {error}"]
