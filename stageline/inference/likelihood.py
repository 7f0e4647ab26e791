"""Rows of tokens whose likelihood is asked for: a prompt with a continuation, windows of a text.

Tokens are counted at the border as lm-evaluation-harness counts them (`_encode_pair`, and
`get_rolling_token_windows`), so that figures can be compared. Knows no model; scoring.py asks one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stageline.data.batch import Images, encode_sample
from stageline.data.processor import get_tokenizer
from stageline.data.rendered import Piece, Rendered
from stageline.errors import DataError, UserError


@dataclass(frozen=True)
class ScoredRow:
    """A row of tokens.

    Attributes:
        num_targets: so many of its last tokens are scored, each given all tokens before it.
        name: what errors call it.
        images: that its image tokens stand for.
    """

    input_ids: list[int]
    num_targets: int
    name: str = ""
    images: Images = None


def continuation_row(
    prompt: Rendered, continuation: str, *, images: Images, processor: Any
) -> ScoredRow:
    """A prompt and what follows it, tokenized together.

    Spaces at the end of the prompt count as the continuation's, because tokenizers put a space and
    the word after it into one token. Where nothing is before the continuation, the tokenizer's
    first token (else its last) goes there; none is put there twice.

    Raises:
        DataError: nothing of the continuation is left to score.
    """
    name = prompt.name or "a prompt"
    pieces = (*prompt.pieces, Piece(continuation, is_user=True))
    whole = replace(prompt, pieces=pieces, for_generation=True)
    context = replace(prompt, pieces=_without_last_spaces(prompt.pieces), for_generation=True)
    ids = encode_sample(whole, images, processor=processor, name=name).input_ids
    num_context = len(encode_sample(context, images, processor=processor, name=name).input_ids)
    if num_context == 0 and ids:
        first = first_token(processor)
        ids = ids if ids[0] == first else [first, *ids]
        num_context = 1
    if len(ids) <= num_context:
        raise DataError(
            f"{name}: no token is left of the continuation {continuation!r}. At least one was "
            "expected, because its likelihood is asked for: correct the choices of the row."
        )
    return ScoredRow(ids, len(ids) - num_context, name, images)


def _without_last_spaces(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    kept = list(pieces)
    while kept and not kept[-1].is_image:
        text = kept[-1].text.rstrip()
        if text:
            kept[-1] = replace(kept[-1], text=text)
            break
        kept.pop()
    return tuple(kept)


def text_tokens(rendered: Rendered, *, processor: Any) -> list[int]:
    """The tokens of a text, behind one first token that is given and not scored.

    It is that of the tokenizer, which thus never stands there twice.
    """
    whole = replace(rendered, for_generation=True)  # no end-of-sequence token is scored
    ids = encode_sample(whole, None, processor=processor, name=rendered.name).input_ids
    first = first_token(processor)
    return ids if ids[:1] == [first] else [first, *ids]


def first_token(processor: Any) -> int:
    """What stands before a text that has nothing before it: the first token, or else the last.

    Raises:
        UserError: the tokenizer has neither.
    """
    tokenizer = get_tokenizer(processor)
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise UserError(
        "the tokenizer has neither a bos_token nor an eos_token. One was expected, because the "
        "first token of a text is scored too and something has to stand before it: set one in "
        "tokenizer_config.json."
    )


def windows(num_tokens: int, *, max_length: int, stride: int | None = None) -> Iterator[slice]:
    """Where the windows of a text begin and end, and how much of each is scored.

    Counts in a list of `num_tokens` tokens to be scored with the first token before them. The model
    reads all tokens of a window but its last, at most `max_length`.

    Args:
        stride: new tokens of each window after the first; None: `max_length`, which gives the
            first of them one token of context, as lm-evaluation-harness does.

    Yields:
        `slice(start, end, num_targets)`; each token is a target of one window.
    """
    stride = stride or max_length
    done = min(num_tokens, max_length)
    if num_tokens:
        yield slice(0, done + 1, done)
    while done < num_tokens:
        new = min(num_tokens - done, stride)
        done += new
        yield slice(done - max_length, done + 1, new)


def text_rows(
    token_ids: list[int], *, max_length: int, stride: int | None, name: str
) -> list[ScoredRow]:
    """The windows of a text as rows; `token_ids` as `text_tokens` gives them."""
    found = windows(len(token_ids) - 1, max_length=max_length, stride=stride)
    return [ScoredRow(token_ids[w.start : w.stop], w.step, name) for w in found]


def shortened(row: ScoredRow, *, max_length: int | None, cuts: bool) -> ScoredRow:
    """The row, of which a model reads at most `max_length` tokens (all but the last).

    Args:
        cuts: leave the beginning of the prompt out where it is too long.

    Raises:
        DataError: it is too long, and may not or can't be cut.
    """
    if max_length is None or len(row.input_ids) - 1 <= max_length:
        return row
    if cuts and not row.images and row.num_targets <= max_length:
        return replace(row, input_ids=row.input_ids[-(max_length + 1) :])
    raise DataError(
        f"{row.name}: prompt and continuation have {len(row.input_ids)} tokens, and the model "
        f"reads {max_length}. A shorter row was expected, because the model has no more places: "
        "shorten it, or give --model.overlong cut, which leaves out the beginning of prompts "
        "without pictures."
    )
