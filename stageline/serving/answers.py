"""The answers to chats, and the texts that continue prompts: whole or as streams."""

import functools
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
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
from stageline.serving import api_models as api
from stageline.serving.errors import ApiError, bad_request
from stageline.serving.service import ResponseStream, Service, TokenTexts, copies
from stageline.serving.tool_calls import FoundCall, ToolReader, form_of, guided_form, shown_tools

Choice = dict[str, Any]
TEXT_DEFAULT_TOKENS = 16  # OpenAI has the same default


async def answer_chat(service: Service, asked: api.ChatRequest, out: ResponseStream) -> None:
    """Answer a chat, or raise an ApiError."""
    sampling = service.sampling(asked)
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
        async for number, event in place.events(copies(prompt, sampling, count)):
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
        message = "min_tokens came with a form of the answer. Leave one of them out."
        raise bad_request(message, "min_tokens")
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
        self.logprobs: list[
            TokenLogprob
        ] = []  # log-probabilities of tokens whose text is not sent yet

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


async def answer_completion(
    service: Service, asked: api.CompletionRequest, out: ResponseStream
) -> None:
    """Continue one text or several, or raise an ApiError."""
    sampling, texts, settings = service.sampling(asked), service.texts, service.settings
    if asked.max_tokens == 0 and not asked.echo:
        raise bad_request("max_tokens 0 requires echo. Set it, or ask for tokens.", "max_tokens")
    given: list[Any] = [asked.prompt]
    if isinstance(asked.prompt, list) and not isinstance(asked.prompt[0], int):
        given = list(asked.prompt)
    count, has_answers, num_top = asked.n or 1, asked.max_tokens != 0, asked.logprobs
    if len(given) * count > settings.max_n and len(given) > 1 and count > 1:
        message = f"{len(given)} x {count} answers; at most {settings.max_n} to several prompts."
        raise bad_request(message, "n")
    is_scored = bool(asked.echo) and num_top is not None
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

        # prompts as texts, and their log-probabilities, are sent before the answers
        ids = [prompt["input_ids"][0].tolist() for prompt in prompts]
        echoes: list[tuple[str, Any]] = [("", None)] * len(ids)
        if asked.echo:
            longest, most = max(map(len, ids)), service.engine.max_length
            # without an answer the engine does not check this
            if most is not None and longest > most:
                message = f"The prompt has {longest} tokens; the model has {most} positions."
                raise bad_request(message, "prompt", "context_length_exceeded")
            if is_scored and longest > settings.max_echo_tokens:
                most = settings.max_echo_tokens
                message = f"The prompt has {longest} tokens; at most {most} are scored."
                raise bad_request(message, "echo", "context_length_exceeded")
            scores: dict[int, Scored] = {}
            rows = [number for number, one in enumerate(ids) if is_scored and len(one) > 1]
            async for number, event in place.events(
                [ScoreRequest("score", prompts[n], len(ids[n]) - 1, num_top or 0) for n in rows]
            ):
                assert isinstance(event, Scored)
                if any(map(math.isnan, event.logprobs)):
                    message = "The model gave no numbers for this prompt."
                    raise ApiError(500, message, code="engine_error")
                scores[rows[number]] = event

            def echo(number: int) -> tuple[str, Any]:
                text, one = given[number], ids[number]
                if not isinstance(text, str):
                    text = texts.tokenizer.decode(one, skip_special_tokens=True)
                if num_top is None:
                    return text, None
                return text, texts.prompt(
                    one,
                    scores.get(number),
                    text=text,
                    num_top=num_top,
                    as_ids=asked.return_tokens_as_token_ids,
                )

            echoes = await service.in_thread(lambda: [echo(number) for number in range(len(ids))])

        writer = _Writer(asked, "text_completion", "cmpl", out)
        writer.prompt_tokens = {number: len(one) for number, one in enumerate(ids)}

        def choice(number: int, text: str, logprobs: Any, reason: str | None) -> Choice:
            return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

        offsets = []
        for number in range(len(ids) * count):
            text, logprobs = echoes[number // count]
            offsets.append(len(text))
            # where no tokens were asked for, the prompts are all there is
            writer.choices[number] = choice(number, text, logprobs, "length")
            if asked.stream and (text or logprobs or not has_answers):
                reason = None if has_answers else "length"
                await writer.send(choice(number, text, logprobs, reason))
        async for number, event in place.events(requests):
            assert not isinstance(event, Scored)
            found, logprobs = event.logprobs, None
            if isinstance(event, Finished):
                writer.count(number // count, event)
                # OpenAI lists the token that ended a text, which is not in the text, with the rest
                last = () if event.stop_logprob is None else (event.stop_logprob,)
                found = last if asked.stream else (*found, *last)
            if num_top is not None:
                as_ids = asked.return_tokens_as_token_ids
                logprobs = texts.plain(
                    found, offset=offsets[number], num_top=num_top, as_ids=as_ids
                )
            if asked.stream:
                is_end = isinstance(event, Finished)
                text = "" if is_end else event.text
                reason = event.reason if isinstance(event, Finished) else None
                offsets[number] += sum(len(texts.text(one.token_id)) for one in found)
                if is_end or text or found:
                    await writer.send(choice(number, text, logprobs if found else None, reason))
            elif isinstance(event, Finished):
                text, before = echoes[number // count]
                if before and logprobs:
                    logprobs = {key: one and one + logprobs[key] for key, one in before.items()}
                writer.choices[number] = choice(number, text + event.text, logprobs, event.reason)
        await writer.end()


class _Writer:
    """Writes an answer: events with one choice each, or all choices in one.

    Attributes:
        choices: of a whole answer, by their numbers.
        prompt_tokens: of each prompt, which counts once, however many answers it gets.
    """

    def __init__(
        self, asked: api.SamplingFields, kind: str, prefix: str, out: ResponseStream
    ) -> None:
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


async def answer_tokenize(
    service: Service, asked: api.TokenizeRequest, out: ResponseStream
) -> None:
    """Tell the tokens of a prompt, or raise an ApiError."""
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    prompts, given = service.prompts, asked.model_dump(exclude_none=True)
    if asked.prompt is not None:
        is_whole = asked.add_special_tokens is False
        making = functools.partial(prompts.of_text, asked.prompt, is_whole=is_whole)
    else:
        if asked.add_special_tokens:
            message = "add_special_tokens requires prompt; templates write their first tokens."
            raise bad_request(message, "add_special_tokens")
        messages, tools = given["messages"], shown_tools(given)
        making = functools.partial(prompts.of_messages, messages, tools=tools, asked=given)
    ids = (await service.in_thread(making))["input_ids"][0].tolist()
    told = {"count": len(ids), "max_model_len": service.engine.max_length, "tokens": ids}
    texts = prompts.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
    await out.whole({**told, "token_strs": texts})


async def answer_detokenize(
    service: Service, asked: api.DetokenizeRequest, out: ResponseStream
) -> None:
    """Tell the text of tokens, special ones too, or raise an ApiError."""
    largest, num_ids = max(asked.tokens, default=0), service.prompts.num_ids
    if largest >= num_ids:
        raise bad_request(f"tokens has the id {largest}; the model has {num_ids}.", "tokens")
    decode = service.prompts.tokenizer.decode
    await out.whole({"prompt": await service.in_thread(decode, asked.tokens)})
