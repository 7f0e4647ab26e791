"""The texts that prompts are gone on with, whole or as a stream of chunks."""

from typing import Any

from stageline.inference.decoding.request import Finished, Request, TokenLogprob
from stageline.serving.completion_models import CompletionRequest
from stageline.serving.errors import bad_request
from stageline.serving.live import Out
from stageline.serving.prompts import Prompt, PromptMaker
from stageline.serving.sampling import TEXT_DEFAULT_TOKENS, text_sampling
from stageline.serving.service import Service, UsageCount, copies, forget_large, good_events
from stageline.serving.token_texts import TokenTexts


async def answer_completion(service: Service, asked: CompletionRequest, out: Out) -> None:
    """Goes on with one text or several.

    Raises:
        ApiError: it can't be done.
    """
    sampling = text_sampling(asked, service.settings, num_ids=service.prompts.num_ids)
    given = prompts_of(asked)
    count = asked.n or 1
    if len(given) * count > service.settings.max_n and len(given) > 1 and count > 1:
        raise bad_request(
            f"{len(given)} prompts with {count} answers each came; at most "
            f"{service.settings.max_n} answers are given to more than one prompt.",
            param="n",
        )
    with service.desk.place(len(given) * count) as place:
        prompts = await service.in_thread(_encoded, service.prompts, given)
        requests: list[Request] = []
        for prompt in prompts:
            fitted = service.fitted(
                prompt, sampling, asked.max_tokens, default=TEXT_DEFAULT_TOKENS, field="max_tokens"
            )
            requests += copies(prompt, fitted, count)
        del given, prompts
        forget_large(asked, out)
        events = good_events(place, requests)
        write = _stream if asked.stream else _whole
        await write(service, asked, events, out)


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


async def _whole(service: Service, asked: CompletionRequest, events: Any, out: Out) -> None:
    usage = UsageCount()
    choices: dict[int, dict[str, Any]] = {}
    async for number, event in events:
        if isinstance(event, Finished):
            usage.add(number // (asked.n or 1), event)
            logprobs = _logprobs(asked, event.logprobs, service.texts, offset=0)
            choices[number] = _chunk(number, event.text, logprobs, event.reason)
    await out.whole(
        {
            **service.head("text_completion", "cmpl"),
            "choices": [choices[number] for number in sorted(choices)],
            "usage": usage.as_object(),
        }
    )


async def _stream(service: Service, asked: CompletionRequest, events: Any, out: Out) -> None:
    has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    head = service.head("text_completion", "cmpl")
    if has_usage:
        head["usage"] = None
    usage, offsets = UsageCount(), dict[int, int]()
    async for number, event in events:
        if isinstance(event, Finished):
            usage.add(number // (asked.n or 1), event)
            await out.event({**head, "choices": [_chunk(number, "", None, event.reason)]})
        elif event.text or event.logprobs:
            offset = offsets.get(number, 0)
            offsets[number] = offset + sum(
                len(service.texts.text(one.token_id)) for one in event.logprobs
            )
            logprobs = _logprobs(asked, event.logprobs, service.texts, offset=offset)
            await out.event({**head, "choices": [_chunk(number, event.text, logprobs, None)]})
    if has_usage:
        await out.event({**head, "choices": [], "usage": usage.as_object()})
    await out.end_stream()


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
