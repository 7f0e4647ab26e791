"""Requests and events as plain values for JSON, and back.

A dataclass becomes its fields and its name, of a short table: what comes in can make nothing else,
unlike a pickle. New fields travel as they are, if JSON can hold them.
"""

from dataclasses import fields, is_dataclass
from typing import Any

from stageline.errors import DataError, MemoryFull, UserError
from stageline.inference.decoding.request import (
    EngineError,
    Failed,
    Finished,
    Piece,
    Request,
    Sampling,
    TokenLogprob,
)

_NAME = "@"
_KINDS = {kind.__name__: kind for kind in (Sampling, TokenLogprob, Piece, Finished)}
# what a server tells apart; any other error is one of the engine
_ERRORS = {kind.__name__: kind for kind in (UserError, DataError, MemoryFull, EngineError)}


def as_plain(value: Any) -> Any:
    """Fields and names in place of dataclasses, lists in place of tuples.

    Raises:
        TypeError: a dataclass of another kind.
    """
    if isinstance(value, Failed):
        return {_NAME: "Failed", "key": value.key, "error": _plain_error(value.error)}
    if is_dataclass(value):
        name = type(value).__name__
        if _KINDS.get(name) is not type(value):
            raise TypeError(f"{name} can't be sent to another replica")
        return {_NAME: name, **{f.name: as_plain(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple | list):
        return [as_plain(one) for one in value]
    return value


def of_plain(value: Any) -> Any:
    """What `as_plain` was given; each list was a tuple, but for those inside of a dict."""
    if isinstance(value, list):
        return tuple(of_plain(one) for one in value)
    if not isinstance(value, dict) or _NAME not in value:
        return value
    given = {name: of_plain(one) for name, one in value.items() if name != _NAME}
    if value[_NAME] == "Failed":
        kind, text = given["error"]
        return Failed(given["key"], _ERRORS[kind](text))
    return _KINDS[value[_NAME]](**given)


def plain_request(request: Request) -> dict[str, Any]:
    """A request without its prompt, which travels as tensors."""
    names = [f.name for f in fields(request) if f.name != "prompt"]
    return {name: as_plain(getattr(request, name)) for name in names}


def request_of(plain: dict[str, Any], prompt: dict[str, Any]) -> Request:
    """What `plain_request` was given."""
    return Request(prompt=prompt, **{name: of_plain(one) for name, one in plain.items()})


def _plain_error(error: Exception) -> list[str]:
    for kind in type(error).__mro__:
        if _ERRORS.get(kind.__name__) is kind:
            return [kind.__name__, str(error)]
    return [EngineError.__name__, f"{type(error).__name__}: {error}"]
