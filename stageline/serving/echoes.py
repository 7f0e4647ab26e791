"""Prompts in front of their answers (`echo`), with the log-probabilities of their tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stageline.inference.decoding.request import Scored, ScoreRequest
from stageline.serving.completion_models import CompletionRequest
from stageline.serving.desk import Place
from stageline.serving.errors import ApiError, bad_request
from stageline.serving.prompts import Prompt
from stageline.serving.service import Service, good_events


@dataclass(frozen=True)
class Echo:
    """What comes before an answer.

    Attributes:
        logprobs: in OpenAI's shape, if they were asked for.
    """

    text: str = ""
    logprobs: dict[str, Any] | None = None
    num_tokens: int = 0

    def before(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """The log-probabilities of prompt and answer."""
        if self.logprobs is None or logprobs is None:
            return self.logprobs or logprobs
        return {name: values and values + logprobs[name] for name, values in self.logprobs.items()}


def check_echo(asked: CompletionRequest) -> None:
    """Refuses to answer with nothing at all.

    Raises:
        ApiError: max_tokens is 0 without echo.
    """
    if asked.max_tokens == 0 and not asked.echo:
        raise bad_request(
            "max_tokens is 0 without echo, so there is nothing to answer: set echo for the prompt "
            "itself, or ask for tokens.",
            param="max_tokens",
        )


def num_scores(asked: CompletionRequest, num_prompts: int) -> int:
    """How many prompts are scored."""
    return num_prompts if asked.echo and asked.logprobs is not None else 0


async def echoes_of(
    service: Service,
    asked: CompletionRequest,
    given: Sequence[str | list[int]],
    prompts: Sequence[Prompt],
    *,
    place: Place,
) -> list[Echo]:
    """What comes before the answers to each prompt; nothing, if that was not asked for.

    Raises:
        ApiError: a prompt is too long, or the engine fails.
    """
    ids = [prompt["input_ids"][0].tolist() for prompt in prompts]
    if not asked.echo:
        return [Echo(num_tokens=len(one)) for one in ids]
    _check_lengths(service, asked, ids)
    scores: dict[int, Scored] = {}
    num_top = asked.logprobs or 0
    if asked.logprobs is not None:
        rows = [number for number, one in enumerate(ids) if len(one) > 1]
        requests = [
            ScoreRequest("score", prompts[number], len(ids[number]) - 1, num_top) for number in rows
        ]
        async for number, event in good_events(place, requests):
            assert isinstance(event, Scored)
            scores[rows[number]] = _checked(event)

    def made() -> list[Echo]:
        return [
            _echo(service, prompt, one, scores.get(number), num_top=asked.logprobs)
            for number, (prompt, one) in enumerate(zip(given, ids, strict=True))
        ]

    return await service.in_thread(made)


def _check_lengths(service: Service, asked: CompletionRequest, ids: list[list[int]]) -> None:
    longest = max(map(len, ids))
    most = service.engine.max_length
    if most is not None and longest > most:  # without an answer nobody else looks
        raise bad_request(
            f"The prompt has {longest} tokens; the model has {most} positions. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    limit = service.settings.max_echo_tokens
    if asked.logprobs is not None and longest > limit:
        raise bad_request(
            f"The prompt has {longest} tokens; log-probabilities are given of at most {limit}. "
            "Shorten the prompt, or leave echo or logprobs out.",
            param="echo",
            code="context_length_exceeded",
        )


def _checked(event: Scored) -> Scored:
    if any(map(math.isnan, event.logprobs)):
        raise ApiError(500, "The model gave no numbers for this prompt.", code="engine_error")
    return event


def _echo(
    service: Service,
    prompt: str | list[int],
    ids: list[int],
    scored: Scored | None,
    *,
    num_top: int | None,
) -> Echo:
    tokenizer = service.texts.tokenizer
    is_text = isinstance(prompt, str)
    text = prompt if is_text else tokenizer.decode(ids, skip_special_tokens=True)
    if num_top is None:
        return Echo(text, None, len(ids))
    return Echo(text, service.texts.prompt(ids, scored, text=text, num_top=num_top), len(ids))
