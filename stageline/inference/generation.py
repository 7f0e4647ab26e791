"""Generates answers to rendered prompts in batches, padded on the left.

Shapes: B prompts of a batch, T tokens of the longest one.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel

from stageline.data.batches.batch import Images, add_image_inputs, encode_sample, pad_rows
from stageline.data.images.images import lies_in_rows
from stageline.data.text.processor import get_pad_token_id, get_tokenizer
from stageline.data.text.rendered import Rendered
from stageline.inference.decoding.request import Failed, Request, Sampling


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
    """Answers each prompt.

    Args:
        temperature: 0 takes the likeliest token; then an answer does not depend, but for rounding,
            on what else is in the batch.
        repetition_penalty: above 1 makes tokens that were there before less likely.
        sampling: with a temperature, further options of the library's `generate` such as top_p.

    Returns:
        For each prompt: text, token_ids (without padding), finish_reason (stop or length).
    """
    is_sampling = temperature > 0
    if is_sampling:
        torch.manual_seed(seed)
        sampling = {**sampling, "temperature": temperature}
    answers: dict[int, dict[str, Any]] = {}
    for places in batch_together(images, processor=processor):
        batch = encode_prompts(
            [prompts[place] for place in places],
            [images[place] for place in places],
            processor=processor,
        )
        found = generate_batch(
            model,
            processor,
            batch,
            max_new_tokens=max_new_tokens,
            do_sample=is_sampling,
            repetition_penalty=repetition_penalty,
            **(sampling if is_sampling else {}),
        )
        answers.update(zip(places, found, strict=True))
    return [answers[place] for place in range(len(prompts))]


def batch_together(images: Sequence[Images], *, processor: Any) -> list[list[int]]:
    """Which rows go into one batch: all, but for models whose layers attend to images.

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
    model: PreTrainedModel,
    processor: Any,
    batch: dict[str, torch.Tensor],
    **options: object,
) -> list[dict[str, Any]]:
    """The answers to a batch of `encode_prompts`; `options` are those of the library."""
    tokenizer = get_tokenizer(processor)
    # the device that embeds; others are reached by the model's own hooks
    device = next(model.get_input_embeddings().parameters()).device
    inputs = {
        name: value.to(device, model.dtype if value.is_floating_point() else None)
        for name, value in batch.items()
    }
    stop_ids = stop_token_ids(model, tokenizer)
    output = cast(Any, model).generate(
        **inputs,
        pad_token_id=get_pad_token_id(processor),
        eos_token_id=stop_ids or None,
        **options,
    )
    return [
        _answer(row.tolist(), tokenizer, stop_ids)
        for row in output[:, batch["input_ids"].shape[1] :]
    ]


def stop_token_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """The ids that end an answer: of the tokenizer, and of the model's generation config."""
    return _with_tokenizers(getattr(model.generation_config, "eos_token_id", None), tokenizer)


def stop_ids_of(folder: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The same of a model's folder: by generation_config.json, or else by the configuration."""
    if (folder / "generation_config.json").is_file():
        of_model = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        of_model = GenerationConfig.from_model_config(config).eos_token_id
    return tuple(_with_tokenizers(of_model, tokenizer))


def _with_tokenizers(of_model: list[int] | int | None, tokenizer: Any) -> list[int]:
    ids = of_model if isinstance(of_model, list) else [of_model]
    return sorted({int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None})


def _answer(token_ids: list[int], tokenizer: Any, stop_ids: list[int]) -> dict[str, Any]:
    ends = [place for place, token_id in enumerate(token_ids) if token_id in stop_ids]
    kept = token_ids[: ends[0]] if ends else token_ids
    return {
        "text": tokenizer.decode(kept, skip_special_tokens=True),
        "token_ids": kept,
        "finish_reason": "stop" if ends else "length",
    }


def engine_answers(
    engine: Any,
    processor: Any,
    *,
    prompts: Sequence[Rendered],
    images: Sequence[Images],
    sampling: Sampling,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Answers each prompt; encodes it, pictures too, when the engine has room for it.

    Each prompt has a seed of its own, which follows from that of `sampling`, its name and its text:
    with one for all, the same chances would decide each answer.

    Yields:
        (place, answer) as answers are done: text, token_ids (without the stop token) and
        finish_reason, or `error` alone.
    """
    tokenizer = get_tokenizer(processor)
    # an engine that has image processors of its own says how it wants a prompt
    own = getattr(engine, "encode", None)

    def encode(prompt: Rendered, row: Images) -> Any:
        return own(prompt, row) if own else encode_prompts([prompt], [row], processor=processor)

    requests = (
        Request(str(place), encode(prompt, row), _with_own_seed(sampling, prompt))
        for place, (prompt, row) in enumerate(zip(prompts, images, strict=True))
    )
    for found in engine.answer(requests):
        if isinstance(found, Failed):
            error = f"{type(found.error).__name__}: {found.error}"
            yield int(found.key), {"error": error}
            continue
        token_ids = list(found.token_ids)
        yield (
            int(found.key),
            {
                "text": tokenizer.decode(token_ids, skip_special_tokens=True),
                "token_ids": token_ids,
                "finish_reason": found.reason,
            },
        )


def _with_own_seed(sampling: Sampling, prompt: Rendered) -> Sampling:
    if sampling.temperature == 0:
        return sampling
    # not its place: that changes where a run is resumed or shared out
    words = repr((sampling.seed, prompt.name, prompt.text)).encode()
    seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 1  # signed
    return replace(sampling, seed=seed)
