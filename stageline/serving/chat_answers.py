"""The answers to a chat, whole or as a stream of chunks."""

from dataclasses import replace
from typing import Any

from stageline.inference.decoding.request import Finished, Piece, TokenLogprob
from stageline.serving.answer_forms import AnswerForm, form_of, shown_tools
from stageline.serving.chat_models import ChatRequest
from stageline.serving.live import Out
from stageline.serving.sampling import chat_sampling
from stageline.serving.service import Service, UsageCount, copies, forget_large, good_events
from stageline.serving.token_texts import TokenTexts
from stageline.serving.tool_reading import FoundCall, PlainReader, ToolReader

Reader = ToolReader | PlainReader


async def answer_chat(service: Service, asked: ChatRequest, out: Out) -> None:
    """Answers a chat.

    Raises:
        ApiError: it can't be answered.
    """
    sampling = chat_sampling(asked, service.settings, num_ids=service.prompts.num_ids)
    given = asked.model_dump(exclude_none=True)
    tools = shown_tools(given) if asked.tool_choice != "none" else []
    with service.desk.place(asked.n or 1) as place:
        prompt = await service.in_thread(
            service.prompts.of_messages, given["messages"], tools=tools
        )
        form = await service.in_thread(
            form_of, asked, prompts=service.prompts, matchers=service.engine.matchers
        )
        sampling = replace(sampling, grammar=form.grammar)
        has_new_name = asked.max_completion_tokens is not None
        sampling = service.fitted(
            prompt,
            sampling,
            asked.max_completion_tokens if has_new_name else asked.max_tokens,
            default=service.settings.default_max_tokens,
            field="max_completion_tokens" if has_new_name else "max_tokens",
        )
        requests = copies(prompt, sampling, asked.n or 1)
        readers = [_reader(asked, tools, form) for _ in requests]
        del given, tools, prompt
        forget_large(asked, out)
        events = good_events(place, requests)
        if asked.stream:
            await _stream(service, asked, events, readers, out)
        else:
            await _whole(service, events, readers, out)


def _reader(asked: ChatRequest, tools: list[dict[str, Any]], form: AnswerForm) -> Reader:
    if not tools:
        return PlainReader()
    names = [tool["function"]["name"] for tool in tools]
    is_single = asked.parallel_tool_calls is False
    return ToolReader(names, is_single=is_single, is_marked=form.is_marked)


async def _whole(service: Service, events: Any, readers: list[Reader], out: Out) -> None:
    usage = UsageCount()
    choices: dict[int, dict[str, Any]] = {}
    async for number, event in events:
        if isinstance(event, Finished):
            usage.add(0, event)
            choices[number] = _choice(number, event, readers[number], service.texts)
    await out.whole(
        {
            **service.head("chat.completion", "chatcmpl"),
            "choices": [choices[number] for number in sorted(choices)],
            "usage": usage.as_object(),
        }
    )


def _choice(number: int, event: Finished, reader: Reader, texts: TokenTexts) -> dict[str, Any]:
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


async def _stream(
    service: Service, asked: ChatRequest, events: Any, readers: list[Reader], out: Out
) -> None:
    has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    head = service.head("chat.completion.chunk", "chatcmpl")
    if has_usage:
        head["usage"] = None
    streams = [_Choice(number, reader, service.texts) for number, reader in enumerate(readers)]
    usage = UsageCount()
    async for number, event in events:
        for choice in streams[number].chunks(event):
            await out.event({**head, "choices": [choice]})
        if isinstance(event, Finished):
            usage.add(0, event)
    if has_usage:
        await out.event({**head, "choices": [], "usage": usage.as_object()})
    await out.end_stream()


class _Choice:
    """The chunks of one answer."""

    def __init__(self, number: int, reader: Reader, texts: TokenTexts) -> None:
        self.number = number
        self.reader = reader
        self.texts = texts
        self.num_calls = 0
        self.is_begun = False
        self.logprobs: list[TokenLogprob] = []  # of tokens whose text is not told yet

    def chunks(self, event: Piece | Finished) -> list[dict[str, Any]]:
        """What an event makes."""
        made = []
        if not self.is_begun:
            self.is_begun = True
            made.append(self._chunk({"role": "assistant", "content": "", "refusal": None}))
        if isinstance(event, Piece):
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


def _reason(event: Finished, reader: Reader) -> str:
    return "tool_calls" if reader.num_calls and event.reason == "stop" else event.reason


def _logprobs(logprobs: Any, texts: TokenTexts) -> dict[str, Any] | None:
    return {"content": texts.chat(logprobs), "refusal": None} if logprobs else None
