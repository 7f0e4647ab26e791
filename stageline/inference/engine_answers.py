"""Answers of a decoding engine in the form that generation.py gives them."""

from collections.abc import Iterator, Sequence
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

    Yields:
        (place, answer) as answers are done: text, token_ids (without the stop token) and
        finish_reason, or `error` alone.
    """
    tokenizer = get_tokenizer(processor)
    requests = (
        Request(str(place), encode_prompts([prompt], [row], processor=processor), sampling)
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
