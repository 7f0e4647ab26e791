"""Scores rows: log-probabilities of their last tokens, by a model here or by a decoding engine.

Shapes: B rows of a forward, T tokens of the longest one.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from stageline.data.batches.batch import Images, add_image_inputs, encode_sample, pad_rows
from stageline.data.text.encode import Encoded
from stageline.data.text.processor import get_pad_token_id, get_tokenizer
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError
from stageline.inference.decoding.request import Failed, ScoreRequest
from stageline.inference.generation import batch_together

# Rows of tokens whose likelihood is asked for: a prompt with a continuation, windows of a text.
# Tokens are counted at the border as lm-evaluation-harness counts them (`_encode_pair`, and
# `get_rolling_token_windows`), so that figures can be compared. Knows no model; scoring.py asks
# one.


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
        "shorten it, or give `model.overlong` cut, which leaves out the beginning of prompts "
        "without pictures."
    )


@dataclass(frozen=True)
class RowScore:
    """What a row's targets have.

    Attributes:
        logprobs: natural logarithms, one a target.
        is_greedy: whether each target was the likeliest token in its place.
    """

    logprobs: tuple[float, ...]
    is_greedy: bool


Scores = Iterator[tuple[int, RowScore | Exception]]


def score_rows(
    model: Any, processor: Any, rows: Sequence[ScoredRow], *, num_together: int
) -> Scores:
    """Scores each row.

    Args:
        model: a model, or a decoding engine, which orders and batches rows itself.
        num_together: rows of one forward of a model.

    Yields:
        (place of the row, its score, or why it has none), in any order.
    """
    if not isinstance(model, torch.nn.Module):
        yield from _by_engine(model, processor, rows)
        return
    for places in _batches(rows, processor, num_together):
        scores = _forward(
            cast(PreTrainedModel, model), processor, [rows[place] for place in places]
        )
        yield from zip(places, scores, strict=True)


def longest_row(model: Any) -> int | None:
    """So many tokens the model reads at most; None where it does not say."""
    if not isinstance(model, torch.nn.Module):
        # vLLM makes one token more than it scores
        return getattr(model, "max_scored", model.max_length)
    config = cast(PreTrainedModel, model).config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def _batches(rows: Sequence[ScoredRow], processor: Any, num_together: int) -> Iterator[list[int]]:
    """Rows of like length together, the longest first: if memory is short it shows at once."""
    for group in batch_together([row.images for row in rows], processor=processor):
        by_length = sorted(group, key=lambda place: -len(rows[place].input_ids))
        for start in range(0, len(by_length), num_together):
            yield by_length[start : start + num_together]


@torch.no_grad()
def _forward(model: PreTrainedModel, processor: Any, rows: Sequence[ScoredRow]) -> list[RowScore]:
    """One forward of rows that are padded on the right, where no token sees the padding."""
    batch = encode_rows(rows, processor, side="right", without_last=True)
    device = next(model.get_input_embeddings().parameters()).device
    inputs = {
        name: value.to(device, model.dtype if value.is_floating_point() else None)
        for name, value in batch.items()
    }
    lengths = [len(row.input_ids) - 1 for row in rows]
    starts = [length - row.num_targets for length, row in zip(lengths, rows, strict=True)]
    first = min(starts)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # the head is applied to places that are asked for alone: vocabularies are large
        inputs["logits_to_keep"] = torch.arange(first, max(lengths), device=device)
    logits_BTV = model(**inputs, use_cache=False).logits
    if logits_BTV.shape[1] != max(lengths) - first:  # it gave all of them
        logits_BTV = logits_BTV[:, first:]
    return [
        _score(logits_BTV[index, start - first : length - first], row)
        for index, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True))
    ]


def _score(logits_NV: torch.Tensor, row: ScoredRow) -> RowScore:
    """Scores N targets by the logits of the places before them, in float32 at least."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    logprobs_NV = torch.log_softmax(logits_NV.to(wide), dim=-1)
    targets_N = torch.tensor(row.input_ids[-row.num_targets :], device=logits_NV.device)
    found_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0]
    is_greedy = bool((logprobs_NV.argmax(-1) == targets_N).all())
    return RowScore(tuple(found_N.tolist()), is_greedy)


def encode_rows(
    rows: Sequence[ScoredRow], processor: Any, *, side: Any, without_last: bool
) -> dict[str, torch.Tensor]:
    """Ids and mask [B, T] with pixels.

    Args:
        without_last: leave out the last token, which only is to be foretold.
    """
    lists = [row.input_ids[:-1] if without_last else row.input_ids for row in rows]
    encoded = [Encoded(ids, [False] * len(ids), [False] * len(ids)) for ids in lists]
    pad_token_id = get_pad_token_id(processor)
    batch = pad_rows(encoded, pad_token_id=pad_token_id, side=side, with_labels=False)
    images, names = [row.images for row in rows], [row.name for row in rows]
    add_image_inputs(batch, images, processor=processor, names=names, with_pixels=True)
    return batch


def _by_engine(engine: Any, processor: Any, rows: Sequence[ScoredRow]) -> Scores:
    requests = (
        ScoreRequest(
            str(place),
            encode_rows([row], processor, side="left", without_last=False),
            row.num_targets,
        )
        for place, row in enumerate(rows)
    )
    for found in engine.score(requests):
        if isinstance(found, Failed):
            yield int(found.key), found.error
        else:
            yield int(found.key), RowScore(tuple(found.logprobs), found.is_greedy)


def as_they_are_whole(
    scores: Scores, owners: Sequence[int]
) -> Iterator[tuple[int, list[RowScore | Exception]]]:
    """(sample, scores of its rows in order) as soon as all rows of a sample are there."""
    own: dict[int, list[int]] = {}
    for number, owner in enumerate(owners):
        own.setdefault(owner, []).append(number)
    found: dict[int, RowScore | Exception] = {}
    for number, score in scores:
        found[number] = score
        owner = owners[number]
        if all(n in found for n in own[owner]):
            yield owner, [found.pop(n) for n in own[owner]]


def choice_result(
    scores: Sequence[RowScore | Exception], rows: Sequence[ScoredRow], texts: Sequence[str]
) -> dict[str, Any]:
    """The likeliest text, and of each: log-probability, tokens, and whether it is greedy."""
    failed = _failure(scores)
    if failed:
        return failed
    done = [score for score in scores if not isinstance(score, Exception)]
    choices = [
        {
            "text": text,
            "logprob": sum(score.logprobs),
            "num_tokens": len(score.logprobs),
            "is_greedy": score.is_greedy,
        }
        for score, text in zip(done, texts, strict=True)
    ]
    likeliest = max(choices, key=lambda choice: choice["logprob"])
    return {
        "text": likeliest["text"],
        "choice_scores": choices,
        "num_context_tokens": [len(row.input_ids) - row.num_targets for row in rows],
        "first_token_id": rows[0].input_ids[0],
    }


def text_result(scores: Sequence[RowScore | Exception], text: str) -> dict[str, Any]:
    """Log-probability of a text, and its size in tokens, words and bytes."""
    failed = _failure(scores)
    if failed:
        return failed
    done = [score for score in scores if not isinstance(score, Exception)]
    return {
        "text": "",
        "logprob": sum(sum(score.logprobs) for score in done),
        "num_tokens": sum(len(score.logprobs) for score in done),
        "num_words": len(re.split(r"\s+", text)),  # as lm-evaluation-harness counts them
        "num_bytes": len(text.encode()),
        "num_windows": len(scores),
    }


def _failure(scores: Sequence[RowScore | Exception]) -> dict[str, Any] | None:
    error = next((score for score in scores if isinstance(score, Exception)), None)
    return None if error is None else {"error": f"{type(error).__name__}: {error}"}
