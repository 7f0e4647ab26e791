"""The answers to chats, and the texts that continue prompts: whole or as streams."""

import functools
import math
import secrets
import time
from collections.abc import Sequence
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
from stageline.serving.prompts import Prompt
from stageline.serving.request_queue import Reservation
from stageline.serving.service import ResponseStream, Service, TokenTexts, copies, good_events
from stageline.serving.settings import TEXT_DEFAULT_TOKENS, sampling_of
from stageline.serving.tool_calls import FoundCall, ToolReader, form_of, guided_form, shown_tools

Choice = dict[str, Any]


async def answer_chat(service: Service, asked: ChatRequest, out: ResponseStream) -> None:
    """Answer a chat, or raise an ApiError."""
    sampling = sampling_of(asked, service.settings, **service.tokens)
    given = asked.model_dump(exclude_none=True)
    tools = shown_tools(given) if asked.tool_choice != "none" else []
    count = asked.n or 1
    with service.queue.place(count, adapter=service.check_model(asked.model)) as place:
        prompt = await service.in_thread(
            service.prompts.of_messages, given["messages"], tools=tools, asked=given
        )
        grammar, is_marked = await service.in_thread(
            form_of,
            asked,
            find_format=lambda: service.prompts.tool_format,
            matchers=service.engine.matchers,
        )
        field = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        sampling = service.fitted(
            prompt,
            _formed(sampling, grammar),
            getattr(asked, field),
            default=service.settings.default_max_tokens,
            field=field,
        )
        names = [tool["function"]["name"] for tool in tools]
        is_single = asked.parallel_tool_calls is False
        is_marked = is_marked or bool(asked.continue_final_message)  # JSON may have begun before
        readers = [
            ToolReader(names, is_single=is_single, is_marked=is_marked) for _ in range(count)
        ]
        chunks = [_ChatChunks(number, one, service.texts) for number, one in enumerate(readers)]
        name = "chat.completion.chunk" if asked.stream else "chat.completion"
        writer = _Writer(asked, name, "chatcmpl", out)
        async for number, event in good_events(place, copies(prompt, sampling, count)):
            if isinstance(event, Finished):
                writer.count(0, event)
            if asked.stream:
                for choice in chunks[number].of(event):
                    await writer.send(choice)
            elif isinstance(event, Finished):
                writer.choices[number] = _choice(number, event, readers[number], service.texts)
        await writer.end()


def _formed(sampling: Sampling, grammar: Grammar | None) -> Sampling:
    if grammar is not None and sampling.min_new_tokens:
        raise bad_request(
            "min_tokens came with a form of the answer, which ends where its form does: leave "
            "one of them out.",
            param="min_tokens",
        )
    return replace(sampling, grammar=grammar)


def _choice(number: int, event: Finished, reader: ToolReader, texts: TokenTexts) -> Choice:
    """Return a whole answer."""
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

    def of(self, event: Any) -> list[Choice]:
        """Return the chunks of an event."""
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
        return [*made, {**self._chunk({}), "finish_reason": _reason(event, self.reader)}]

    def _delta(self, item: str | FoundCall) -> Choice:
        if isinstance(item, str):
            chunk = self._chunk({"content": item})
        else:
            chunk = self._chunk({"tool_calls": [{"index": self.num_calls, **_call(item)}]})
            self.num_calls += 1
        chunk["logprobs"], self.logprobs = _logprobs(self.logprobs, self.texts), []
        return chunk

    def _chunk(self, delta: dict[str, Any]) -> Choice:
        return {"index": self.number, "delta": delta, "logprobs": None, "finish_reason": None}


def _call(call: FoundCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reason(event: Finished, reader: ToolReader) -> str:
    return "tool_calls" if reader.num_calls and event.reason == "stop" else event.reason


def _logprobs(logprobs: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any] | None:
    return {"content": texts.chat(logprobs), "refusal": None} if logprobs else None


@dataclass(frozen=True)
class Echo:
    """The prompt before an answer; `logprobs` in OpenAI's shape, if they were asked for."""

    text: str
    logprobs: dict[str, Any] | None
    num_tokens: int


async def answer_completion(
    service: Service, asked: CompletionRequest, out: ResponseStream
) -> None:
    """Continue one text or several, or raise an ApiError."""
    sampling = sampling_of(asked, service.settings, **service.tokens)
    if asked.max_tokens == 0 and not asked.echo:
        raise bad_request(
            "max_tokens is 0 without echo, so there is nothing to answer: set echo for the prompt "
            "itself, or ask for tokens.",
            param="max_tokens",
        )
    given: list[Any] = [asked.prompt]
    if isinstance(asked.prompt, list) and not isinstance(asked.prompt[0], int):
        given = list(asked.prompt)
    count, has_answers = asked.n or 1, asked.max_tokens != 0
    most = service.settings.max_n
    if len(given) * count > most and len(given) > 1 and count > 1:
        raise bad_request(
            f"{len(given)} prompts with {count} answers each came; at most {most} answers are "
            "given to more than one prompt.",
            param="n",
        )
    is_scored = bool(asked.echo) and asked.logprobs is not None
    num_places = len(given) * (count * has_answers + is_scored)
    with service.queue.place(num_places, adapter=service.check_model(asked.model)) as place:
        maker = service.prompts
        prompts = await service.in_thread(
            lambda: [maker.of_text(p) if isinstance(p, str) else maker.of_ids(p) for p in given]
        )
        grammar = await service.in_thread(guided_form, asked, service.engine.matchers)
        sampling = _formed(sampling, grammar)
        requests: list[Request] = []
        for number, prompt in enumerate(prompts if has_answers else []):
            fitted = service.fitted(
                prompt, sampling, asked.max_tokens, default=TEXT_DEFAULT_TOKENS, field="max_tokens"
            )
            requests += copies(prompt, fitted, count, number=number)
        echoes = await _echoes_of(service, asked, given, prompts, place=place)
        await _write_texts(service, asked, echoes, good_events(place, requests), out)


async def _echoes_of(
    service: Service,
    asked: CompletionRequest,
    given: Sequence[str | list[int]],
    prompts: Sequence[Prompt],
    *,
    place: Reservation,
) -> list[Echo]:
    """Return what comes before the answers to each prompt, scored if that was asked for."""
    ids = [prompt["input_ids"][0].tolist() for prompt in prompts]
    if not asked.echo:
        return [Echo("", None, len(one)) for one in ids]
    longest, most, limit = max(map(len, ids)), service.engine.max_length, service.settings
    if most is not None and longest > most:  # without an answer nobody else looks
        raise bad_request(
            f"The prompt has {longest} tokens; the model has {most} positions. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    if asked.logprobs is not None and longest > limit.max_echo_tokens:
        raise bad_request(
            f"The prompt has {longest} tokens; log-probabilities are given of at most "
            f"{limit.max_echo_tokens}. Shorten the prompt, or leave echo or logprobs out.",
            param="echo",
            code="context_length_exceeded",
        )
    scores: dict[int, Scored] = {}
    if asked.logprobs is not None:
        rows = [number for number, one in enumerate(ids) if len(one) > 1]
        requests = [
            ScoreRequest("score", prompts[number], len(ids[number]) - 1, asked.logprobs)
            for number in rows
        ]
        async for number, event in good_events(place, requests):
            assert isinstance(event, Scored)
            if any(map(math.isnan, event.logprobs)):
                message = "The model gave no numbers for this prompt."
                raise ApiError(500, message, code="engine_error")
            scores[rows[number]] = event
    texts, num_top = service.texts, asked.logprobs

    def made() -> list[Echo]:
        echoes = []
        for number, (prompt, one) in enumerate(zip(given, ids, strict=True)):
            text = (
                prompt
                if isinstance(prompt, str)
                else texts.tokenizer.decode(one, skip_special_tokens=True)
            )
            logprobs = None
            if num_top is not None:
                logprobs = texts.prompt(one, scores.get(number), text=text, num_top=num_top)
            echoes.append(Echo(text, logprobs, len(one)))
        return echoes

    return await service.in_thread(made)


async def _write_texts(
    service: Service,
    asked: CompletionRequest,
    echoes: list[Echo],
    events: Any,
    out: ResponseStream,
) -> None:
    """Write the texts of a request: each prompt that is echoed, then its answer."""
    writer = _Writer(asked, "text_completion", "cmpl", out)
    count, texts = asked.n or 1, service.texts

    def choice(number: int, text: str, logprobs: Any, reason: str | None) -> Choice:
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    offsets = []
    for number in range(len(echoes) * count):
        echo = echoes[number // count]
        writer.prompt_tokens[number // count] = echo.num_tokens
        offsets.append(len(echo.text))
        # where no tokens were asked for, the prompts are all there is
        is_end = asked.max_tokens == 0
        writer.choices[number] = choice(number, echo.text, echo.logprobs, "length")
        if asked.stream and (echo.text or echo.logprobs or is_end):
            reason = "length" if is_end else None
            await writer.send(choice(number, echo.text, echo.logprobs, reason))
    async for number, event in events:
        echo, is_end = echoes[number // count], isinstance(event, Finished)
        found = event.logprobs
        if is_end:
            writer.count(number // count, event)
            # OpenAI lists the token that ended a text, which is not in the text, with the others
            last = () if event.stop_logprob is None else (event.stop_logprob,)
            found = last if asked.stream else (*found, *last)
        logprobs = None
        if asked.logprobs is not None:
            logprobs = texts.plain(found, offset=offsets[number], num_top=asked.logprobs)
        if asked.stream:
            text = "" if is_end else event.text
            offsets[number] += sum(len(texts.text(one.token_id)) for one in found)
            if is_end or text or found:
                reason = event.reason if is_end else None
                await writer.send(choice(number, text, logprobs if found else None, reason))
        elif is_end:
            if echo.logprobs and logprobs:
                before = echo.logprobs.items()
                logprobs = {name: values and values + logprobs[name] for name, values in before}
            writer.choices[number] = choice(number, echo.text + event.text, logprobs, event.reason)
    await writer.end()


class _Writer:
    """Writes an answer: events with one choice each, or all choices in one.

    Attributes:
        choices: of a whole answer, by their numbers.
        prompt_tokens: of each prompt, which counts once, however many answers it gets.
    """

    def __init__(self, asked: SamplingFields, kind: str, prefix: str, out: ResponseStream) -> None:
        self.out = out
        self.is_stream = bool(asked.stream)
        self.has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self.head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": None,
        }
        self.choices: dict[int, Choice] = {}
        self.prompt_tokens: dict[int, int] = {}
        self.completion_tokens = 0

    def count(self, prompt: int, event: Finished) -> None:
        """Note that an answer to a prompt is done."""
        self.prompt_tokens[prompt] = event.prompt_tokens
        self.completion_tokens += event.completion_tokens

    async def send(self, choice: Choice) -> None:
        """Send a choice of a stream."""
        usage = {"usage": None} if self.has_usage else {}
        await self.out.event({**self.head, "choices": [choice], **usage})

    async def end(self) -> None:
        """Send what is left."""
        prompt = sum(self.prompt_tokens.values())
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
        }
        if not self.is_stream:
            choices = [self.choices[number] for number in sorted(self.choices)]
            await self.out.whole({**self.head, "choices": choices, "usage": usage})
            return
        if self.has_usage:
            await self.out.event({**self.head, "choices": [], "usage": usage})
        await self.out.end_stream()


async def answer_tokenize(service: Service, asked: TokenizeRequest, out: ResponseStream) -> None:
    """Tell the tokens of a prompt, or raise an ApiError."""
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


async def answer_detokenize(
    service: Service, asked: DetokenizeRequest, out: ResponseStream
) -> None:
    """Tell the text of tokens, special ones too, or raise an ApiError."""
    largest, num_ids = max(asked.tokens, default=0), service.prompts.num_ids
    if largest >= num_ids:
        raise bad_request(
            f"tokens has the id {largest}; the model has {num_ids} tokens.", param="tokens"
        )
    decode = service.prompts.tokenizer.decode
    await out.whole({"prompt": await service.in_thread(decode, asked.tokens)})
