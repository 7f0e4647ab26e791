"""Adds tokens to a tokenizer: ordinary ones, that text from the data may hold.

They are added tokens, not special and not normalised: a text is cut at them before anything else,
and they stay in decoded text. Not here: their rows in the model (`stageline/modules/new_rows.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from stageline.data.plain_tokenizer import PlainTokenizer
from stageline.data.processor import get_tokenizer, load_processor
from stageline.errors import CheckpointError, UserError


@dataclass(frozen=True)
class NewTokens:
    """New tokens, and what they were before.

    Attributes:
        pieces: for each the ids that its text was split into without it.
        fresh: ids of those that the weights' own tokenizer lacks.
        rowless: ids of those that the tokenizer had, and the weights have no row for.
    """

    ids: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    fresh: frozenset[int]
    rowless: frozenset[int] = frozenset()


def add_new_tokens(
    processor: Any, texts: Sequence[str], *, weights_processor: Any | None = None
) -> NewTokens:
    """Adds tokens to a processor, in place; one that is there already stays what it is.

    Args:
        weights_processor: of the folder with the weights, if it is another one.

    Raises:
        UserError: a text is a special token, or a part of the vocabulary that was learnt.
    """
    tokenizer = get_tokenizer(processor)
    known = _known(tokenizer, texts)
    trained = known
    if weights_processor is not None:
        trained = _known(get_tokenizer(weights_processor), texts)
    pieces = tuple(_pieces(tokenizer, text, known) for text in texts)
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in texts if text not in known]
    )
    ids = tuple(tokenizer.convert_tokens_to_ids(list(texts)))
    fresh = {token for token, text in zip(ids, texts, strict=True) if trained.get(text) != token}
    return NewTokens(ids, pieces, frozenset(fresh))


def with_rowless(processor: Any, tokens: NewTokens | None, num_rows: int) -> NewTokens | None:
    """The tokens and all others of the tokenizer for which an embedding of `num_rows` is too small.

    What these were before is not known: nothing is split into pieces for them.
    """
    known = () if tokens is None else tokens.ids
    ids = {token for token in get_tokenizer(processor).get_vocab().values() if token >= num_rows}
    rowless = tuple(sorted(ids.difference(known)))
    if not rowless:
        return tokens
    pieces = ((),) * len(rowless)
    before = tokens or NewTokens((), (), frozenset())
    return NewTokens(
        before.ids + rowless,
        before.pieces + pieces,
        before.fresh | set(rowless),
        frozenset(rowless),
    )


def processor_of_weights(folder: str | None, *, trust_remote_code: bool = False) -> Any | None:
    """The processor in a folder with weights; None: it has none."""
    if folder is None:
        return None
    try:
        return load_processor(folder, trust_remote_code=trust_remote_code)
    except (UserError, CheckpointError):
        return None


def _known(tokenizer: Any, texts: Sequence[str]) -> dict[str, int]:
    """Text -> id of those that are added tokens already."""
    added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
    vocabulary = tokenizer.get_vocab()
    for text in texts:
        is_special = text in tokenizer.all_special_tokens or (text in added and added[text].special)
        if is_special or (text in vocabulary and text not in added):
            what = "a special token" if is_special else "a word of its own vocabulary"
            raise UserError(
                f"--new-tokens has {text!r}, which the tokenizer has as {what} (id "
                f"{vocabulary[text]}); a text that it splits was expected: a new token gets a row "
                "of its own. Choose another text, such as one in angle brackets."
            )
    return {text: vocabulary[text] for text in texts if text in added}


def _pieces(tokenizer: Any, text: str, known: dict[str, int]) -> tuple[int, ...]:
    """The ids that a text is split into where none of the new tokens is known."""
    if known:
        plain = PlainTokenizer(tokenizer, known)
        return tuple(token for token, _, _ in plain.encode(text, is_first=True))
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
