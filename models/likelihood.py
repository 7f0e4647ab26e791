"""Model components without generation: likelihoods of given answers, and of whole texts."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from register import model_register
from stageline.data.text.rendered import Rendered
from stageline.errors import DataError, UserError
from stageline.evaluation.rewards import references

TEXT_KEYS = {"prompt": "text", "prompt_fn": "fill", "image_token": "none", "metric": "perplexity"}
Continuations = Literal["choices", "letters", "answer"]


@model_register("loglikelihood", default_keys={"metric": "choice_accuracy"})
def loglikelihood(
    model: Any,
    processor: Any,
    *,
    images: Sequence[Any],
    prompts: Sequence[Rendered],
    samples: Sequence[dict[str, Any]],
    batch_size: int,
    continuations: Continuations = "choices",
    delimiter: str | None = None,
    overlong: Literal["error", "cut"] = "error",
    **generation: object,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Log-likelihood of each choice after the prompt; the likeliest choice is the answer.

    Args:
        continuations: scored texts: those of `choices`, their letters, or the `answer`.
        delimiter: text between prompt and continuation; default: a space, in a chat none.
        overlong: prompts with more tokens than the model reads: error = refuse, cut = drop the
            beginning.
    """
    from stageline.inference.generation import (
        choice_result,
        continuation_row,
        longest_row,
        shortened,
    )

    _needs_tokens(processor, "loglikelihood")
    texts = [_continuations(sample, continuations) for sample in samples]
    rows_of: list[list[Any]] = []
    for place, prompt in enumerate(prompts):
        between = ("" if prompt.is_chat else " ") if delimiter is None else delimiter
        rows = [
            continuation_row(prompt, between + text, images=images[place], processor=processor)
            for text in texts[place]
        ]
        length, cuts = longest_row(model), overlong == "cut"
        rows_of.append([shortened(row, max_length=length, cuts=cuts) for row in rows])
    for place, found in _scored(model, processor, rows_of, batch_size):
        yield place, choice_result(found, rows_of[place], texts[place])


@model_register("perplexity", for_generation=False, default_keys=TEXT_KEYS)
def perplexity(
    model: Any,
    processor: Any,
    *,
    images: Sequence[Any],
    prompts: Sequence[Rendered],
    batch_size: int,
    max_length: int | None = None,
    stride: int | None = None,
    **generation: object,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Log-likelihood of whole texts, each token once; long texts in windows that may overlap.

    Args:
        max_length: window, in tokens; default: the longest that the model reads.
        stride: new tokens of each window but the first; fewer = more context for each.
            Default: max_length.
    """
    from stageline.inference.generation import longest_row, text_result, text_rows, text_tokens

    _needs_tokens(processor, "perplexity")
    if any(images):
        raise UserError(
            "--model perplexity scores whole texts, and the dataset has pictures. Use --model "
            "loglikelihood to score answers."
        )
    length = _window(longest_row(model), max_length, stride)
    rows_of: list[list[Any]] = []
    for prompt in prompts:
        ids = text_tokens(prompt, processor=processor)
        rows_of.append(text_rows(ids, max_length=length, stride=stride, name=prompt.name))
        if not rows_of[-1]:
            raise DataError(
                f"{prompt.name}: the text is empty, and has no likelihood. Leave the row out."
            )
    for place, found in _scored(model, processor, rows_of, batch_size):
        yield place, text_result(found, prompts[place].text)


def _scored(
    model: Any, processor: Any, rows_of: Sequence[Sequence[Any]], batch_size: int
) -> Iterator[tuple[int, Any]]:
    """Yield (sample, scores of its rows) as they are computed."""
    from stageline.inference.generation import as_they_are_whole, score_rows

    rows = [row for own in rows_of for row in own]
    owners = [place for place, own in enumerate(rows_of) for _ in own]
    scores = score_rows(model, processor, rows, num_together=batch_size)
    yield from as_they_are_whole(scores, owners)


def _continuations(sample: dict[str, Any], kind: Continuations) -> list[str]:
    field = "answer" if kind == "answer" else "choices"
    value = sample.get(field)
    if field == "answer" and value is None and sample.get("messages"):
        value = references(sample)[0]
    values = [value] if field == "answer" and isinstance(value, str | int | float) else value
    if not isinstance(values, list | tuple) or not values:
        raise DataError(
            f"sample {sample.get('source') or sample.get('id')}: the field {field} is {value!r}. "
            f"--model.continuations {kind} scores {'text' if field == 'answer' else 'a list'} "
            "there. Correct the row, or choose another."
        )
    if kind == "letters":
        return [chr(ord("A") + index) for index in range(len(values))]
    return [str(one) for one in values]


def _window(longest: int | None, wanted: int | None, stride: int | None) -> int:
    length = wanted or longest
    if length is None or length < 1 or (longest is not None and length > longest):
        known = f"{longest} tokens at once" if longest else "texts of no given length"
        raise UserError(
            f"--model.max_length {wanted} is out of range: the model reads {known}. Give a number "
            "of tokens that it can read."
        )
    if stride is not None and not 1 <= stride <= length:
        raise UserError(
            f"--model.stride {stride} does not fit windows of {length} tokens, since each token is "
            f"scored once. Give a number from 1 to {length}."
        )
    return length


def _needs_tokens(processor: Any, key: str) -> None:
    if processor is None:
        raise UserError(
            f"--model {key} does not go with a remote model: a chat endpoint returns no "
            "likelihoods of given tokens. Use --engine device_map or pipeline."
        )
