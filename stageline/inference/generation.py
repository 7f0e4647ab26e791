"""Asks a model for batches: answers to rendered prompts, and log-probabilities of rows of tokens.

Prompts are padded on the left. Tokens at the border of prompt and continuation are counted as
lm-evaluation-harness counts them (`_encode_pair`, and `get_rolling_token_windows`), so that figures
can be compared.

Shapes: B prompts or rows of a batch, T tokens of the longest one.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from stageline.cache_trial import cache_name
from stageline.data.batches.batch import Images, add_image_inputs, encode_sample, pad_rows
from stageline.data.images.images import lies_in_rows
from stageline.data.text.chat import stop_ids_with
from stageline.data.text.encode import Encoded
from stageline.data.text.processor import get_pad_token_id, get_tokenizer
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError
from stageline.inference.decoding.request import Failed, Scored, ScoreRequest, answer_room
from stageline.inference.decoding.stage_decoder import score_row
from stageline.model_folder import has_trusted_code, is_of_library, short_length


def encode_prompts(
    prompts: Sequence[Rendered], images: Sequence[Images], *, processor: Any
) -> dict[str, torch.Tensor]:
    """Token ids and mask [B, T], padded on the left, with pixels; user text stays plain text."""
    names = [prompt.name or f"prompt {index}" for index, prompt in enumerate(prompts)]
    rows = [
        encode_sample(prompt, row, processor=processor, name=name)
        for prompt, row, name in zip(prompts, images, names, strict=True)
    ]
    batch = pad_rows(rows, pad_token_id=get_pad_token_id(processor), side="left", with_labels=False)
    add_image_inputs(batch, images, processor=processor, names=names, with_pixels=True)
    return batch


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    processor: Any,
    *,
    prompts: Sequence[Rendered],
    images: Sequence[Images],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    **sampling: object,
) -> list[dict[str, Any]]:
    """Answer each prompt.

    Args:
        temperature: 0 takes the likeliest token; then an answer does not depend, but for rounding,
            on what else is in the batch.
        repetition_penalty: above 1 makes tokens that were there before less likely.
        sampling: with a temperature, further options of transformers' `generate` such as top_p.

    Returns:
        For each prompt: text, token_ids (without padding), finish_reason (stop or length); or
        `error` alone, where the model has no positions for it.
    """
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": repetition_penalty}
    if temperature > 0:
        torch.manual_seed(seed)
        options |= {**sampling, "do_sample": True, "temperature": temperature}
    answers: dict[int, dict[str, Any]] = {}
    waiting = batch_together(images, processor=processor)
    positions = longest_row(model)
    while waiting:
        places = waiting.pop(0)
        batch = encode_prompts(
            [prompts[place] for place in places],
            [images[place] for place in places],
            processor=processor,
        )
        lengths = dict(zip(places, batch["attention_mask"].sum(-1).tolist(), strict=True))
        rooms: dict[int, int] = {}
        for place, length in lengths.items():
            try:
                rooms[place] = min(max_new_tokens, answer_room(length, positions))
            except UserError as error:  # the row fails, as in an engine; the others are answered
                answers[place] = failed_answer(Failed("", error))
        is_apart = _is_long(model, batch["input_ids"].shape[1] + max_new_tokens)
        is_apart |= not (batch["attention_mask"].all() or answers_alike(model))
        alone = [place for place in rooms if is_apart or rooms[place] < max_new_tokens]
        together = [place for place in rooms if place not in alone]
        if len(rooms) < len(places) or (alone and len(places) > 1):
            waiting = [*([together] if together else []), *([one] for one in alone)] + waiting
            continue
        room = rooms[places[0]]
        found = generate_batch(model, processor, batch, max_new_tokens=room, **options)
        answers.update(zip(places, found, strict=True))
    return [answers[place] for place in range(len(prompts))]


def batch_together(images: Sequence[Images], *, processor: Any) -> list[list[int]]:
    """Return which rows go into one batch: all, but for models whose layers attend to images.

    There a token before the first image of its row attends to all image places of the row, and
    these are as many as the fullest row has: only rows with as many images leave each other alone.
    """
    if not lies_in_rows(processor):
        return [list(range(len(images)))]
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(images):
        groups.setdefault(len(row or ()), []).append(place)
    return list(groups.values())


def generate_batch(
    model: PreTrainedModel, processor: Any, batch: dict[str, torch.Tensor], **options: object
) -> list[dict[str, Any]]:
    """Answer a batch of `encode_prompts`; `options` are those of transformers' `generate`.

    Nothing but where answers end is taken from the folder's generation config: beams, penalties and
    suppressed tokens there would make other answers than those that were asked for.
    """
    tokenizer, stop_ids = get_tokenizer(processor), stop_token_ids(model, processor)
    of_folder, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = cast(Any, model).generate(
            **_on_device(batch, model),
            pad_token_id=get_pad_token_id(processor),
            eos_token_id=stop_ids or None,
            use_cache=answers_alike(model),
            **options,
        )
    finally:
        model.generation_config = of_folder
    answers = []
    for row in output[:, batch["input_ids"].shape[1] :].tolist():
        end = next((place for place, token_id in enumerate(row) if token_id in stop_ids), None)
        answers.append(
            {
                "text": tokenizer.decode(row[:end], skip_special_tokens=True),
                "token_ids": row[:end],
                "finish_reason": "length" if end is None else "stop",
            }
        )
    return answers


def _on_device(batch: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Move a batch to the device of the embeddings; hooks of the model reach other devices."""
    device = next(model.get_input_embeddings().parameters()).device
    return {
        name: value.to(device, model.dtype if value.is_floating_point() else None)
        for name, value in batch.items()
    }


def stop_token_ids(model: PreTrainedModel, processor: Any) -> list[int]:
    """The ids that end an answer: of the model's generation config, tokenizer and template."""
    return stop_ids_with(getattr(model.generation_config, "eos_token_id", None), processor)


def stop_ids_of(folder: Path, config: Any, processor: Any) -> tuple[int, ...]:
    """The same of a model's folder: by generation_config.json, or else by the configuration."""
    if (folder / "generation_config.json").is_file():
        of_model = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        of_model = GenerationConfig.from_model_config(config).eos_token_id
    return tuple(stop_ids_with(of_model, processor))


@dataclass(frozen=True)
class ScoredRow:
    """A row of tokens.

    Attributes:
        num_targets: number of last tokens that are scored, each given all tokens before it.
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
    kept = list(prompt.pieces)
    while kept and not kept[-1].is_image:
        if text := kept[-1].text.rstrip():
            kept[-1] = replace(kept[-1], text=text)
            break
        kept.pop()
    context = replace(prompt, pieces=tuple(kept), for_generation=True)
    ids = encode_sample(whole, images, processor=processor, name=name).input_ids
    num_context = len(encode_sample(context, images, processor=processor, name=name).input_ids)
    if num_context == 0 and ids:
        first = first_token(processor)
        ids = ids if ids[0] == first else [first, *ids]
        num_context = 1
    if len(ids) <= num_context:
        raise DataError(
            f"{name}: no token is left of the continuation {continuation!r} to score. Correct the "
            "choices of the row."
        )
    return ScoredRow(ids, len(ids) - num_context, name, images)


def text_tokens(rendered: Rendered, *, processor: Any) -> list[int]:
    """The tokens of a text, behind one first token that is given and not scored.

    It is that of the tokenizer, which thus never stands there twice.
    """
    whole = replace(rendered, for_generation=True)  # no end-of-sequence token is scored
    ids = encode_sample(whole, None, processor=processor, name=rendered.name).input_ids
    first = first_token(processor)
    return ids if ids[:1] == [first] else [first, *ids]


def first_token(processor: Any) -> int:
    """Return the token to put before a text: the tokenizer's bos_token, or else its eos_token."""
    tokenizer = get_tokenizer(processor)
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise UserError(
        "The tokenizer has neither a bos_token nor an eos_token to stand before a text. Set one in "
        "tokenizer_config.json."
    )


def windows(num_tokens: int, *, max_length: int, stride: int | None = None) -> Iterator[slice]:
    """Yield the start and end of each window of a text, and how much of it is scored.

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
        cuts: leave the beginning of the prompt out where it is too long, else refuse.
    """
    if max_length is None or len(row.input_ids) - 1 <= max_length:
        return row
    if cuts and not row.images and row.num_targets <= max_length:
        return replace(row, input_ids=row.input_ids[-(max_length + 1) :])
    raise DataError(
        f"{row.name}: prompt and continuation have {len(row.input_ids)} tokens, the model reads "
        f"{max_length}. Shorten the row, or give `model.overlong` cut."
    )


Scores = Iterator[Scored | Failed]  # their keys are the places of the rows


def score_rows(
    model: Any, processor: Any, rows: Sequence[ScoredRow], *, num_together: int
) -> Scores:
    """Scores each row, in any order.

    Args:
        model: a model, or a decoding engine, which orders and batches rows itself.
        num_together: rows of one forward of a model.
    """
    if not isinstance(model, torch.nn.Module):
        yield from model.score(
            ScoreRequest(
                str(place),
                encode_rows([row], processor, side="left", without_last=False),
                row.num_targets,
            )
            for place, row in enumerate(rows)
        )
        return
    whole = cast(PreTrainedModel, model)
    groups: list[list[int]] = []
    for group in batch_together([row.images for row in rows], processor=processor):
        # rows of like length together, the longest first: if memory is short it shows at once
        by_length = sorted(group, key=lambda place: -len(rows[place].input_ids))
        num_long = sum(_is_long(whole, len(rows[place].input_ids) - 1) for place in group)
        groups += [by_length[:num_long], by_length[num_long:]]
    for group in groups:
        for start in range(0, len(group), num_together):
            places = group[start : start + num_together]
            scores = _forward(whole, processor, [rows[place] for place in places])
            for place, (logprobs, is_greedy) in zip(places, scores, strict=True):
                yield Scored(str(place), tuple(logprobs), is_greedy)


def num_positions(model: nn.Module | PretrainedConfig) -> int | None:
    """Return how many tokens a row may have at most; None: the model does not say.

    A table of learned positions with a padding index is used from behind it on: RoBERTa reads
    `max_position_embeddings` - `pad_token_id` - 1 tokens.
    """
    config: Any = model if isinstance(model, PretrainedConfig) else model.config
    text = config.get_text_config(decoder=True)
    most: int | None = getattr(text, "max_position_embeddings", None)
    if most is None or getattr(text, "rope_parameters", None):
        return most
    whole: Any = model
    if isinstance(model, PretrainedConfig):
        if has_trusted_code(config):  # transformers would ask on the terminal
            return most
        try:
            with torch.device("meta"):
                whole = AutoModelForCausalLM.from_config(config)
        except ValueError:  # this kind has no such class
            return most
    tables = [table for name, table in whole.named_modules() if "position" in name]
    padding = [one.padding_idx for one in tables if isinstance(one, nn.Embedding)]
    return most - max((1 + index for index in padding if index is not None), default=0)


def longest_row(model: Any) -> int | None:
    """Return the most tokens the model reads in a row; None where it does not say."""
    if not isinstance(model, torch.nn.Module):
        # vLLM makes one token more than it scores
        return getattr(model, "max_scored", model.max_length)
    return num_positions(model)


def _is_long(model: PreTrainedModel, length: int) -> bool:
    """Whether a row of `length` tokens may change the rotary frequencies of other rows."""
    most = short_length(model.config.get_text_config(decoder=True))
    return most is not None and length > most


@torch.no_grad()
def _forward(
    model: PreTrainedModel, processor: Any, rows: Sequence[ScoredRow]
) -> list[tuple[list[float], bool]]:
    """One forward of rows that are padded on the right, where no token sees the padding."""
    batch = encode_rows(rows, processor, side="right", without_last=True)
    inputs = _on_device(batch, model)
    lengths = [len(row.input_ids) - 1 for row in rows]
    starts = [length - row.num_targets for length, row in zip(lengths, rows, strict=True)]
    first = min(starts)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # apply the head only to places that are asked for: vocabularies are large
        inputs["logits_to_keep"] = torch.arange(
            first, max(lengths), device=inputs["input_ids"].device
        )
    logits_BTV = model(**inputs, use_cache=False).logits
    if logits_BTV.shape[1] != max(lengths) - first:  # it gave all of them
        logits_BTV = logits_BTV[:, first:]
    found = []
    for logits_TV, row, start, length in zip(logits_BTV, rows, starts, lengths, strict=True):
        targets = row.input_ids[-row.num_targets :]
        found.append(score_row(logits_TV[start - first : length - first], targets, num_top=0)[:2])
    return found


def encode_rows(
    rows: Sequence[ScoredRow], processor: Any, *, side: Any, without_last: bool
) -> dict[str, torch.Tensor]:
    """Ids and mask [B, T] with pixels; `without_last`: without the last token, a mere target."""
    lists = [row.input_ids[:-1] if without_last else row.input_ids for row in rows]
    encoded = [Encoded(ids, [False] * len(ids), [False] * len(ids)) for ids in lists]
    pad_token_id = get_pad_token_id(processor)
    batch = pad_rows(encoded, pad_token_id=pad_token_id, side=side, with_labels=False)
    images, names = [row.images for row in rows], [row.name for row in rows]
    add_image_inputs(batch, images, processor=processor, names=names, with_pixels=True)
    return batch


def as_they_are_whole(
    scores: Scores, owners: Sequence[int]
) -> Iterator[tuple[int, list[Scored | Failed]]]:
    """(sample, scores of its rows in order) as soon as all rows of a sample are there."""
    own: dict[int, list[int]] = {}
    for number, owner in enumerate(owners):
        own.setdefault(owner, []).append(number)
    found: dict[int, Scored | Failed] = {}
    for score in scores:
        found[int(score.key)] = score
        owner = owners[int(score.key)]
        if all(n in found for n in own[owner]):
            yield owner, [found.pop(n) for n in own[owner]]


def choice_result(
    scores: Sequence[Scored | Failed], rows: Sequence[ScoredRow], texts: Sequence[str]
) -> dict[str, Any]:
    """Return the likeliest text, and of each: log-probability, tokens, and whether it is greedy."""
    choices: list[dict[str, Any]] = []
    for score, text in zip(scores, texts, strict=True):
        if isinstance(score, Failed):
            return failed_answer(score)
        logprob, num_tokens = sum(score.logprobs), len(score.logprobs)
        choice = {"text": text, "logprob": logprob, "num_tokens": num_tokens}
        choices.append({**choice, "is_greedy": score.is_greedy})
    return {
        "text": max(choices, key=lambda choice: choice["logprob"])["text"],
        "choice_scores": choices,
        "num_context_tokens": [len(row.input_ids) - row.num_targets for row in rows],
        "first_token_id": rows[0].input_ids[0],
    }


def text_result(scores: Sequence[Scored | Failed], text: str) -> dict[str, Any]:
    """Return the log-probability of a text, and its size in tokens, words and bytes."""
    logprob, num_tokens = 0.0, 0
    for score in scores:
        if isinstance(score, Failed):
            return failed_answer(score)
        logprob, num_tokens = logprob + sum(score.logprobs), num_tokens + len(score.logprobs)
    return {
        "text": "",
        "logprob": logprob,
        "num_tokens": num_tokens,
        "num_words": len(re.split(r"\s+", text)),  # lm-evaluation-harness counts words so
        "num_bytes": len(text.encode()),
        "num_windows": len(scores),
    }


def failed_answer(failed: Failed) -> dict[str, str]:
    """Return what is kept of a request that got no answer."""
    return {"error": f"{type(failed.error).__name__}: {failed.error}"}


def answers_alike(model: PreTrainedModel) -> bool:
    """Return whether `generate` gives a row the same answer with padding and a cache as without.

    Models of transformers are taken to do so; code of one's own may ignore a cache that it takes.
    """
    return is_of_library(model) or cache_name(model) is not None
