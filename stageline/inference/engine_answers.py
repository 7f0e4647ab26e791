"""Answers of a decoding engine in the form that generation.py gives them."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stageline.data.batch import Images
from stageline.data.processor import get_tokenizer
from stageline.data.rendered import Rendered
from stageline.inference.decoding.request import Failed, Request, Sampling
from stageline.inference.generation import encode_prompts


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
