"""All that decides the token ids of rows: it names a token cache, so that none is ever old."""

import datetime
import functools
import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stageline.data.encode import TextEncoder
from stageline.data.images import ImageExpander
from stageline.data.kept_pixels import processor_settings

_PACKAGES = ("transformers", "tokenizers", "jinja2")
_CLOCK = "strftime_now"  # a chat template with it writes the date


def token_key(
    *,
    prompt: str,
    prompt_fn: Callable[..., Any],
    image_token: Callable[..., Any],
    processor: Any,
    collate: Callable[..., Any],
    fingerprint: str | None,
) -> dict[str, Any]:
    """All that matters, by name; of long texts the digest.

    Args:
        collate: the part that encodes rows, with its options.
        fingerprint: of the dataset, where it has one.
    """
    tokenizer = TextEncoder.of(processor).tokenizer  # refuses those without a backend
    templates = [getattr(each, "chat_template", None) for each in (processor, tokenizer)]
    key: dict[str, Any] = {
        "rows": fingerprint,
        "tokenizer": _digest(tokenizer.backend_tokenizer.to_str()),
        "special tokens": {
            name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())
        },
        "tokenizer class": f"{type(processor).__name__} {type(tokenizer).__name__}",
        "chat template": _digest(repr(templates)),
        "prompt": prompt,
        "prompt_fn": _identity(prompt_fn),
        "image_token": _identity(image_token),
        "collate_fn": _identity(collate),
        "images": None,
        "code": _code(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }
    if ImageExpander.of(processor) is not None:
        key["images"] = json.loads(json.dumps(processor_settings(processor), default=str))
    if _CLOCK in repr(templates):
        key["date"] = datetime.date.today().isoformat()
    return key


def _identity(part: Callable[..., Any]) -> dict[str, Any]:
    """A part by its name, the file it is in, and its options."""
    options: dict[str, Any] = {}
    while isinstance(part, functools.partial):
        options = {**dict(enumerate(map(_plain, part.args))), **part.keywords, **options}
        part = part.func
    owner = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    try:
        source = Path(inspect.getfile(owner)).read_bytes()
    except (TypeError, OSError):  # made without a file
        source = b""
    return {
        "name": f"{owner.__module__}.{owner.__qualname__}",
        "file": hashlib.sha256(source).hexdigest(),
        "state": {} if owner is part else _plain(getattr(part, "__dict__", {})),
        "options": {str(name): _plain(value) for name, value in options.items()},
    }


def _plain(value: Any) -> Any:
    """A value as JSON has it; functions by what they are."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _identity(value) if callable(value) else f"{type(value).__name__} {value}"


@functools.cache
def _code() -> str:
    """Of all that this package does to rows: no number that somebody has to remember to raise."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
