"""Which token ids are no text, by what a configuration and those inside it name.

Known without a tokenizer: padding, begin and end, the places of pictures and sounds.
"""

import re
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

NAMES = re.compile(
    r".*(token_ids?|token_index|_start_id|_end_id|newline_id|patch_id|(pad|eos|bos|unk|mask)_index)"
)


def is_token(name: str) -> bool:
    """Whether a field of this name tells the id of a token, or several."""
    return bool(NAMES.fullmatch(name)) and "layer" not in name


def parts_of(config: PretrainedConfig) -> dict[str, PretrainedConfig]:
    """The configurations inside this one, by the names of their fields."""
    found = {name: config.__dict__.get(name) for name in config.to_dict()}
    return {name: part for name, part in found.items() if isinstance(part, PretrainedConfig)}


def walk_config(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """The fields of a configuration, and of those inside it."""
    parts = parts_of(config)
    yield {name: value for name, value in config.to_dict().items() if name not in parts}
    for part in parts.values():
        yield from walk_config(part)


def special_tokens(config: PretrainedConfig) -> frozenset[int]:
    """The ids of all tokens that are not text."""
    return frozenset(
        one
        for told in walk_config(config)
        for name, value in told.items()
        if is_token(name)
        for one in (value if isinstance(value, list) else [value])
        if isinstance(one, int)
    )
