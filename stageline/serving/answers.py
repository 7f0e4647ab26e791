"""The answers to chats, and the texts that prompts are gone on with: whole or as streams."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stageline.inference.decoding.grammars import Grammar
from stageline.inference.decoding.request import (
    AnswerPiece,
    Finished,
    Request,
    Sampling,
    Scored,
    ScoreRequest,
    TokenLogprob,
)
from stageline.serving.api_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from stageline.serving.errors import ApiError, bad_request
from stageline.serving.prompts import Prompt, PromptMaker
from stageline.serving.request_queue import Reservation
from stageline.serving.service import (
    Out,
    Service,
    TokenTexts,
    UsageCount,
    copies,
    forget_large,
    good_events,
)
from stageline.serving.settings import TEXT_DEFAULT_TOKENS, base_sampling, chat_sampling
from stageline.serving.tool_calls import FoundCall, ToolReader, form_of, guided_form, shown_tools


async def answer_chat(service: Service, asked: ChatRequest, out: Out) -> None:
    """Answers a chat, or raises an ApiError."""
    sampling = chat_sampling(asked, service.settings, **service.tokens)
    given = asked.model_dump(exclude_none=True)
    tools = shown_tools(given) if asked.tool_choice != "none" else []
    with service.queue.place(asked.n or 1) as place:
        prompt = await service.in_thread(
            service.prompts.of_messages, given["messages"], tools=tools, asked=given
        )
        grammar, is_marked = await service.in_thread(
            form_of,
            asked,
            find_format=lambda: service.prompts.tool_format,
            matchers=service.engine.matchers,
        )
        sampling = _formed(sampling, grammar)
        has_new_name = asked.max_completion_tokens is not None
        sampling = service.fitted(
            prompt,
            sampling,
            asked.max_completion_tokens if has_new_name else asked.max_tokens,
            default=service.settings.default_max_tokens,
            field="max_completion_tokens" if has_new_name else "max_tokens",
        )
        requests = copies(prompt, sampling, asked.n or 1)
        names = [tool["function"]["name"] for tool in tools]
        is_single = asked.parallel_tool_calls is False
        is_marked = is_marked or bool(asked.continue_final_message)  # JSON may have begun before
        readers = [ToolReader(names, is_single=is_single, is_marked=is_marked) for _ in requests]
        del given, tools, prompt
        forget_large(asked, out)
        events = good_events(place, requests)
        if asked.stream:
            await _stream_chat(service, asked, events, readers, out)
        else:
            await _whole_chat(service, events, readers, out)


def _formed(sampling: Sampling, grammar: Grammar | None) -> Sampling:
    if grammar is not None and sampling.min_new_tokens:
        raise bad_request(
            "min_tokens came with a form of the answer, which ends where its form does: leave "
            "one of them out.",
            param="min_tokens",
        )
    return replace(sampling, grammar=grammar)


async def _whole_chat(service: Service, events: Any, readers: list[ToolReader], out: Out) -> None:
    usage = UsageCount()
    choices: dict[int, dict[str, Any]] = {}
    async for number, event in events:
        if isinstance(event, Finished):
            usage.add(0, event)
            choices[number] = _choice(number, event, readers[number], service.texts)
    await _send(service.head("chat.completion", "chatcmpl"), choices, usage, out)


async def _stream_chat(
    service: Service, asked: ChatRequest, events: Any, readers: list[ToolReader], out: Out
) -> None:
    stream = _Stream(service.head("chat.completion.chunk", "chatcmpl"), asked, out)
    chunks = [_ChatChunks(number, reader, service.texts) for number, reader in enumerate(readers)]
    usage = UsageCount()
    async for number, event in events:
        for choice in chunks[number].of(event):
            await stream.send(choice)
        if isinstance(event, Finished):
            usage.add(0, event)
    await stream.end(usage)


def _choice(number: int, event: Finished, reader: ToolReader, texts: TokenTexts) -> dict[str, Any]:
    told = [*reader.add(event.text), *reader.finish()]
    calls = [_call(item) for item in told if isinstance(item, FoundCall)]
    text = "".join(item for item in told if isinstance(item, str))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = calls
    return {
        "index": number,
        "message": message,
        "logprobs": _logprobs(event.logprobs, texts),
        "finish_reason": _reason(event, reader),
    }


class _ChatChunks:
    """The chunks of one answer."""

    def __init__(self, number: int, reader: ToolReader, texts: TokenTexts) -> None:
        self.number = number
        self.reader = reader
        self.texts = texts
        self.num_calls = 0
        self.is_begun = False
        self.logprobs: list[TokenLogprob] = []  # of tokens whose text is not told yet

    def of(self, event: AnswerPiece | Finished) -> list[dict[str, Any]]:
        """What an event makes."""
        made = []
        if not self.is_begun:
            self.is_begun = True
            made.append(self._chunk({"role": "assistant", "content": "", "refusal": None}))
        if isinstance(event, AnswerPiece):
            self.logprobs += event.logprobs
            return made + [self._delta(item) for item in self.reader.add(event.text)]
        made += [self._delta(item) for item in self.reader.finish()]
        if self.logprobs:
            made.append(self._delta(""))
        return [*made, self._chunk({}, _reason(event, self.reader))]

    def _delta(self, item: str | FoundCall) -> dict[str, Any]:
        logprobs, self.logprobs = self.logprobs, []
        if isinstance(item, str):
            return self._chunk({"content": item}, logprobs=logprobs)
        call = {"index": self.num_calls, **_call(item)}
        self.num_calls += 1
        return self._chunk({"tool_calls": [call]}, logprobs=logprobs)

    def _chunk(
        self,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        return {
            "index": self.number,
            "delta": delta,
            "logprobs": _logprobs(logprobs or [], self.texts),
            "finish_reason": reason,
        }


def _call(call: FoundCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reason(event: Finished, reader: ToolReader) -> str:
    return "tool_calls" if reader.num_calls and event.reason == "stop" else event.reason


def _logprobs(logprobs: Any, texts: TokenTexts) -> dict[str, Any] | None:
    return {"content": texts.chat(logprobs), "refusal": None} if logprobs else None


@dataclass(frozen=True)
class Echo:
    """What comes before an answer; `logprobs` in OpenAI's shape, if they were asked for."""

    text: str = ""
    logprobs: dict[str, Any] | None = None
    num_tokens: int = 0

    def before(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """The log-probabilities of prompt and answer."""
        if self.logprobs is None or logprobs is None:
            return self.logprobs or logprobs
        return {name: values and values + logprobs[name] for name, values in self.logprobs.items()}


async def answer_completion(service: Service, asked: CompletionRequest, out: Out) -> None:
    """Continues one text or several, or raises an ApiError."""
    base = base_sampling(asked, service.settings, **service.tokens)
    sampling = replace(base, logprobs=asked.logprobs)
    if asked.max_tokens == 0 and not asked.echo:
        raise bad_request(
            "max_tokens is 0 without echo, so there is nothing to answer: set echo for the prompt "
            "itself, or ask for tokens.",
            param="max_tokens",
        )
    prompt: Any = asked.prompt
    given: list[str | list[int]] = [prompt]
    if not isinstance(prompt, str) and not isinstance(prompt[0], int):
        given = list(prompt)
    count, has_answers = asked.n or 1, asked.max_tokens != 0
    most = service.settings.max_n
    if len(given) * count > most and len(given) > 1 and count > 1:
        raise bad_request(
            f"{len(given)} prompts with {count} answers each came; at most {most} answers are "
            "given to more than one prompt.",
            param="n",
        )
    num_scores = len(given) if asked.echo and asked.logprobs is not None else 0
    with service.queue.place(len(given) * count * has_answers + num_scores) as place:
        prompts = await service.in_thread(_encoded, service.prompts, given)
        grammar = await service.in_thread(guided_form, asked, service.engine.matchers)
        sampling = _formed(sampling, grammar)
        requests: list[Request] = []
        for number, prompt in enumerate(prompts if has_answers else []):
            fitted = service.fitted(
                prompt, sampling, asked.max_tokens, default=TEXT_DEFAULT_TOKENS, field="max_tokens"
            )
            requests += copies(prompt, fitted, count, number=number)
        echoes = await _echoes_of(service, asked, given, prompts, place=place)
        del given, prompt, prompts
        forget_large(asked, out)
        events = good_events(place, requests)
        write = _stream_texts if asked.stream else _whole_texts
        await write(service, asked, echoes, events, out)


def _encoded(maker: PromptMaker, given: list[str | list[int]]) -> list[Prompt]:
    return [
        maker.of_text(prompt) if isinstance(prompt, str) else maker.of_ids(prompt)
        for prompt in given
    ]


async def _whole_texts(
    service: Service, asked: CompletionRequest, echoes: list[Echo], events: Any, out: Out
) -> None:
    usage = UsageCount()
    # where no tokens were asked for, the prompts are all there is
    choices = {
        number: _text_choice(number, echo.text, echo.logprobs, "length")
        for number, echo in _by_choice(asked, echoes, usage)
    }
    async for number, event in events:
        if isinstance(event, Finished):
            usage.add(number // (asked.n or 1), event)
            echo = echoes[number // (asked.n or 1)]
            found = (*event.logprobs, *_of_stop(event))
            logprobs = _text_logprobs(asked, found, service.texts, offset=len(echo.text))
            text = echo.text + event.text
            choices[number] = _text_choice(number, text, echo.before(logprobs), event.reason)
    await _send(service.head("text_completion", "cmpl"), choices, usage, out)


async def _stream_texts(
    service: Service, asked: CompletionRequest, echoes: list[Echo], events: Any, out: Out
) -> None:
    stream = _Stream(service.head("text_completion", "cmpl"), asked, out)
    usage, offsets, ended = UsageCount(), dict[int, int](), set[int]()
    for number, echo in _by_choice(asked, echoes, usage):
        offsets[number] = len(echo.text)
        if echo.text or echo.logprobs:
            await stream.send(_text_choice(number, echo.text, echo.logprobs, None))
    async for number, event in events:
        is_end = isinstance(event, Finished)
        if is_end:
            usage.add(number // (asked.n or 1), event)
            ended.add(number)
        found = _of_stop(event) if is_end else event.logprobs
        text = "" if is_end else event.text
        if is_end or text or found:
            logprobs = _text_logprobs(asked, found, service.texts, offset=offsets[number])
            offsets[number] += sum(len(service.texts.text(one.token_id)) for one in found)
            reason = event.reason if is_end else None
            await stream.send(_text_choice(number, text, logprobs if found else None, reason))
    for number in sorted(offsets.keys() - ended):
        await stream.send(_text_choice(number, "", None, "length"))
    await stream.end(usage)


async def _echoes_of(
    service: Service,
    asked: CompletionRequest,
    given: Sequence[str | list[int]],
    prompts: Sequence[Prompt],
    *,
    place: Reservation,
) -> list[Echo]:
    """What comes before the answers to each prompt; nothing, if that was not asked for."""
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
            if any(map(math.isnan, event.logprobs)):
                message = "The model gave no numbers for this prompt."
                raise ApiError(500, message, code="engine_error")
            scores[rows[number]] = event

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


def _by_choice(
    asked: CompletionRequest, echoes: list[Echo], usage: UsageCount
) -> Iterator[tuple[int, Echo]]:
    """(number of the answer, what comes before it); the prompts are counted."""
    count = asked.n or 1
    for number in range(len(echoes) * count):
        echo = echoes[number // count]
        usage.prompts[number // count] = echo.num_tokens
        yield number, echo


def _of_stop(event: Finished) -> tuple[TokenLogprob, ...]:
    """OpenAI lists the token that ended a text, which is not in the text, with the others."""
    return () if event.stop_logprob is None else (event.stop_logprob,)


def _text_choice(number: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _text_logprobs(
    asked: CompletionRequest,
    logprobs: tuple[TokenLogprob, ...],
    texts: TokenTexts,
    *,
    offset: int,
) -> dict[str, Any] | None:
    if asked.logprobs is None:
        return None
    return texts.plain(logprobs, offset=offset, num_top=asked.logprobs)


async def answer_tokenize(service: Service, asked: TokenizeRequest, out: Out) -> None:
    """Tells the tokens of a prompt, or raises an ApiError."""
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("Either prompt or messages was expected: give one.", param="prompt")
    prompts, given = service.prompts, asked.model_dump(exclude_none=True)
    if asked.prompt is not None:
        is_whole = asked.add_special_tokens is False
        making = functools.partial(prompts.of_text, asked.prompt, is_whole=is_whole)
    else:
        if asked.add_special_tokens:
            raise bad_request(
                "add_special_tokens came with messages, whose template writes the first tokens "
                "itself: leave it out.",
                param="add_special_tokens",
            )
        messages, tools = given["messages"], shown_tools(given)
        making = functools.partial(prompts.of_messages, messages, tools=tools, asked=given)
    ids = (await service.in_thread(making))["input_ids"][0].tolist()
    told = {"count": len(ids), "max_model_len": service.engine.max_length, "tokens": ids}
    texts = prompts.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
    await out.whole({**told, "token_strs": texts})


async def answer_detokenize(service: Service, asked: DetokenizeRequest, out: Out) -> None:
    """Tells the text of tokens, special ones too, or raises an ApiError."""
    largest, num_ids = max(asked.tokens, default=0), service.prompts.num_ids
    if largest >= num_ids:
        raise bad_request(
            f"tokens has the id {largest}; the model has {num_ids} tokens.", param="tokens"
        )
    decode = service.prompts.tokenizer.decode
    await out.whole({"prompt": await service.in_thread(decode, asked.tokens)})


async def _send(
    head: dict[str, Any], choices: dict[int, dict[str, Any]], usage: UsageCount, out: Out
) -> None:
    """Sends an answer in one."""
    in_order = [choices[number] for number in sorted(choices)]
    await out.whole({**head, "choices": in_order, "usage": usage.as_object()})


class _Stream:
    """Sends an answer as events, each with one choice."""

    def __init__(self, head: dict[str, Any], asked: SamplingFields, out: Out) -> None:
        self.has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self.head = {**head, "usage": None} if self.has_usage else head
        self.out = out

    async def send(self, choice: dict[str, Any]) -> None:
        await self.out.event({**self.head, "choices": [choice]})

    async def end(self, usage: UsageCount) -> None:
        if self.has_usage:
            await self.out.event({**self.head, "choices": [], "usage": usage.as_object()})
        await self.out.end_stream()
