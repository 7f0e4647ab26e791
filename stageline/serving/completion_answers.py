"""The texts that prompts are gone on with, whole or as a stream of chunks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stageline.inference.decoding.request import (
    Finished,
    Request,
    Scored,
    ScoreRequest,
    TokenLogprob,
)
from stageline.serving.errors import ApiError, bad_request
from stageline.serving.prompts import Prompt, PromptMaker
from stageline.serving.request_models import CompletionRequest
from stageline.serving.request_queue import Reservation
from stageline.serving.service import Out, Service, UsageCount, copies, forget_large, good_events
from stageline.serving.settings import TEXT_DEFAULT_TOKENS, text_sampling
from stageline.serving.token_texts import TokenTexts

# -- prompts in front of their answers (`echo`), with the log-probabilities of their tokens -------


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
    place: Reservation,
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
    if isinstance(prompt, str):
        text = prompt
    else:
        text = tokenizer.decode(ids, skip_special_tokens=True)
    if num_top is None:
        return Echo(text, None, len(ids))
    return Echo(text, service.texts.prompt(ids, scored, text=text, num_top=num_top), len(ids))


# -------------------------------------------------------------------------------------------------


async def answer_completion(service: Service, asked: CompletionRequest, out: Out) -> None:
    """Goes on with one text or several.

    Raises:
        ApiError: it can't be done.
    """
    sampling = text_sampling(asked, service.settings, num_ids=service.prompts.num_ids)
    check_echo(asked)
    given = prompts_of(asked)
    count, has_answers = asked.n or 1, asked.max_tokens != 0
    _check_count(service, len(given), count)
    num_answers = len(given) * count * has_answers
    with service.desk.place(num_answers + num_scores(asked, len(given))) as place:
        prompts = await service.in_thread(_encoded, service.prompts, given)
        requests: list[Request] = []
        for prompt in prompts if has_answers else []:
            fitted = service.fitted(
                prompt, sampling, asked.max_tokens, default=TEXT_DEFAULT_TOKENS, field="max_tokens"
            )
            requests += copies(prompt, fitted, count)
        echoes = await echoes_of(service, asked, given, prompts, place=place)
        del given, prompts
        forget_large(asked, out)
        events = good_events(place, requests)
        write = _stream if asked.stream else _whole
        await write(service, asked, echoes, events, out)


def _check_count(service: Service, num_prompts: int, count: int) -> None:
    most = service.settings.max_n
    if num_prompts * count > most and num_prompts > 1 and count > 1:
        raise bad_request(
            f"{num_prompts} prompts with {count} answers each came; at most {most} answers are "
            "given to more than one prompt.",
            param="n",
        )


def prompts_of(asked: CompletionRequest) -> list[str | list[int]]:
    """The prompts one by one: texts or token ids."""
    prompt: Any = asked.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _encoded(maker: PromptMaker, given: list[str | list[int]]) -> list[Prompt]:
    return [
        maker.of_text(prompt) if isinstance(prompt, str) else maker.of_ids(prompt)
        for prompt in given
    ]


async def _whole(
    service: Service, asked: CompletionRequest, echoes: list[Echo], events: Any, out: Out
) -> None:
    usage = UsageCount()
    # where no tokens were asked for, the prompts are all there is
    choices = {
        number: _chunk(number, echo.text, echo.logprobs, "length")
        for number, echo in _by_choice(asked, echoes, usage)
    }
    async for number, event in events:
        if isinstance(event, Finished):
            usage.add(number // (asked.n or 1), event)
            echo = echoes[number // (asked.n or 1)]
            found = (*event.logprobs, *_of_stop(event))
            logprobs = _logprobs(asked, found, service.texts, offset=len(echo.text))
            text = echo.text + event.text
            choices[number] = _chunk(number, text, echo.before(logprobs), event.reason)
    await out.whole(
        {
            **service.head("text_completion", "cmpl"),
            "choices": [choices[number] for number in sorted(choices)],
            "usage": usage.as_object(),
        }
    )


async def _stream(
    service: Service, asked: CompletionRequest, echoes: list[Echo], events: Any, out: Out
) -> None:
    has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    head = service.head("text_completion", "cmpl")
    if has_usage:
        head["usage"] = None
    usage, offsets, ended = UsageCount(), dict[int, int](), set[int]()
    for number, echo in _by_choice(asked, echoes, usage):
        offsets[number] = len(echo.text)
        if echo.text or echo.logprobs:
            await out.event({**head, "choices": [_chunk(number, echo.text, echo.logprobs, None)]})
    async for number, event in events:
        is_end = isinstance(event, Finished)
        if is_end:
            usage.add(number // (asked.n or 1), event)
            ended.add(number)
        found = _of_stop(event) if is_end else event.logprobs
        text = "" if is_end else event.text
        if is_end or text or found:
            logprobs = _logprobs(asked, found, service.texts, offset=offsets[number])
            offsets[number] += sum(len(service.texts.text(one.token_id)) for one in found)
            reason = event.reason if is_end else None
            chunk = _chunk(number, text, logprobs if found else None, reason)
            await out.event({**head, "choices": [chunk]})
    for number in sorted(offsets.keys() - ended):
        await out.event({**head, "choices": [_chunk(number, "", None, "length")]})
    if has_usage:
        await out.event({**head, "choices": [], "usage": usage.as_object()})
    await out.end_stream()


def _by_choice(
    asked: CompletionRequest, echoes: list[Echo], usage: UsageCount
) -> Iterator[tuple[int, Echo]]:
    """(number of the answer, what comes before it); the prompts are counted."""
    count = asked.n or 1
    for number in range(len(echoes) * count):
        echo = echoes[number // count]
        usage.add_prompt(number // count, echo.num_tokens)
        yield number, echo


def _of_stop(event: Finished) -> tuple[TokenLogprob, ...]:
    """OpenAI lists the token that ended a text, which is not in the text, with the others."""
    return () if event.stop_logprob is None else (event.stop_logprob,)


def _chunk(number: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(
    asked: CompletionRequest,
    logprobs: tuple[TokenLogprob, ...],
    texts: TokenTexts,
    *,
    offset: int,
) -> dict[str, Any] | None:
    if asked.logprobs is None:
        return None
    return texts.plain(logprobs, offset=offset, num_top=asked.logprobs)
