"""`/v1/responses`: a chat in the words of OpenAI's newer API. Nothing is kept between requests.

A request becomes a chat that streams, and the chunks of its answer become items. So whatever holds
for chats holds here, and a stream and a whole answer are made in one way.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from stageline.serving.answers import answer_chat
from stageline.serving.api_models import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ChatRequest,
    Function,
    JsonSchema,
    Length,
    Name,
    NamedFunction,
    NumTop,
    PlainFormat,
    SamplingFields,
    Strict,
    Text,
    unsupported,
)
from stageline.serving.errors import ApiError
from stageline.serving.gate import NOT_AS_DOCUMENTED, checked
from stageline.serving.service import Out, Service
from stageline.serving.settings import ServerSettings

_Id = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """A stretch of text."""

    type: Literal["input_text"]
    text: Text


class InputImage(Strict):
    """A picture, as `image_url` of a chat."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: Annotated[None, unsupported("no files are kept; use image_url")] = None


class SaidText(Strict):
    """A stretch of an earlier answer."""

    type: Literal["output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ThoughtText(Strict):
    """A stretch of what was thought before an earlier answer."""

    type: Literal["reasoning_text"]
    text: Text


class Item(Strict):
    """What clients send back of the items that they were given."""

    id: str | None = None
    status: Status | None = None


class SystemItem(Item):
    """What the operator says."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer"]
    content: Text | Annotated[list[InputText], Field(min_length=1, max_length=MAX_PARTS)]


_Part = Annotated[InputText | InputImage, Field(discriminator="type")]


class UserItem(Item):
    """What a person says, with pictures."""

    type: Literal["message"] = "message"
    role: Literal["user"]
    content: Text | Annotated[list[_Part], Field(min_length=1, max_length=MAX_PARTS)]


class AnswerItem(Item):
    """An earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: Text | Annotated[list[SaidText], Field(max_length=MAX_PARTS)]
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Item):
    """A call that an answer held."""

    type: Literal["function_call"]
    call_id: _Id
    name: Name
    arguments: Text


class CallOutputItem(Item):
    """What a function said."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: Text | Annotated[list[InputText], Field(min_length=1, max_length=MAX_PARTS)]


class ReasoningItem(Item):
    """What was thought before an answer; only its plain text can be read."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: Annotated[list[ThoughtText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None


def _kind_of_item(value: Any) -> str:
    """Which kind is meant: a message needs no type."""
    given = value if isinstance(value, dict) else {}
    kind = given.get("type", "message")
    return str(given.get("role") if kind == "message" else kind)


InputItem = Annotated[
    Annotated[SystemItem, Tag("system")]
    | Annotated[SystemItem, Tag("developer")]
    | Annotated[UserItem, Tag("user")]
    | Annotated[AnswerItem, Tag("assistant")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind_of_item,
        custom_error_type="unknown_item",
        custom_error_message="a message (role user, assistant, system or developer), "
        "function_call, function_call_output or reasoning was expected: nothing else is known "
        "here, and nothing that was sent before is kept",
    ),
]


def _a_function(kind: Any) -> Any:
    if kind != "function":
        raise ValueError("this server runs no tools of its own; a function was expected")
    return kind


class FunctionTool(Function):
    """A function that may be called; `strict` null is false, as in chats."""

    type: Annotated[Literal["function"], BeforeValidator(_a_function)]


class FunctionChoice(NamedFunction):
    """Which function is to be called."""

    type: Literal["function"]


class SchemaFormat(JsonSchema):
    """The answer is JSON of a schema."""

    type: Literal["json_schema"]


class TextConfig(Strict):
    """What form the answer has."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[None, unsupported("the model has no such setting")] = None


class Reasoning(Strict):
    """How much the model is to think; what it thinks is told by nothing here."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


_STATELESS = unsupported("nothing is kept between requests: send the whole conversation in input")
_LOGPROBS = "message.output_text.logprobs"
# no thought is encrypted here, but clients that keep conversations themselves ask for it each time
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponsesRequest(SamplingFields):
    """A conversation that is to be gone on with."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: Length | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    top_logprobs: NumTop | None = None
    include: list[Included] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    n: Annotated[None, unsupported("a response has one answer")] = None
    previous_response_id: Annotated[None, _STATELESS] = None
    conversation: Annotated[None, _STATELESS] = None
    prompt: Annotated[None, unsupported("no prompts are kept; use instructions and input")] = None
    context_management: Annotated[None, unsupported("nothing is left out of a prompt")] = None


class ResponseObject(BaseModel):
    """An answer and what it was made with: each field is there, be it null."""

    model_config = ConfigDict(extra="forbid")
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[AnswerItem | CallItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: dict[str, int | dict[str, int]] | None
    user: str | None


async def answer_response(service: Service, asked: ResponsesRequest, out: Out) -> None:
    """Answers a request, or raises an ApiError."""
    assert isinstance(out, ResponseOut)
    out.begin(asked, service.settings)
    try:
        chat = await service.in_thread(chat_of, asked)
        asked.input = ""  # the chat has it, and lets go of it in time
        await answer_chat(service, chat, out)
    except ApiError as error:
        raise _renamed(error) from None


def chat_of(asked: ResponsesRequest) -> ChatRequest:
    """The chat that a request means, or an ApiError."""
    form, choice = asked.text and asked.text.format, asked.tool_choice
    shared = set(SamplingFields.model_fields) - {"n", "stream", "stream_options"}
    has_logprobs = bool(asked.top_logprobs) or _LOGPROBS in (asked.include or [])
    chat = {
        **asked.model_dump(include=shared, by_alias=True),
        "messages": _messages(asked),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": asked.max_output_tokens,
        "logprobs": has_logprobs,
        "top_logprobs": asked.top_logprobs if has_logprobs else None,
        "tools": [_nested(tool) for tool in asked.tools or []],
        "tool_choice": _nested(choice) if isinstance(choice, FunctionChoice) else choice,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "reasoning_effort": asked.reasoning and asked.reasoning.effort,
    }
    if isinstance(form, SchemaFormat):
        schema = form.model_dump(by_alias=True, exclude={"type"})
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None:
        chat["response_format"] = form.model_dump()
    return checked(chat, ChatRequest)


def _nested(function: FunctionTool | FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": function.model_dump(exclude={"type"})}


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """The messages of a chat; what an answer was made of becomes one message again."""
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    thought: str | None = None
    for item in asked.input:
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or []) or None
        elif isinstance(item, CallOutputItem):
            content = _content(item.output)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif isinstance(item, SystemItem | UserItem):
            messages.append({"role": item.role, "content": _content(item.content)})
        else:
            is_more = isinstance(item, CallItem) and thought is None and bool(messages)
            if not (is_more and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "reasoning_content": thought})
                thought = None
            if isinstance(item, CallItem):
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages[-1]["content"] = _content(item.content) or ""
    return messages


def _content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]


_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    ".function.parameters": ".parameters",
}


def _renamed(error: ApiError) -> ApiError:
    """An error of a chat in the words of this API."""
    message, param = error.message, (error.param or "").replace("messages", "input")
    for name, other in _NAMES.items():
        message, param = message.replace(name, other), param.replace(name, other)
    # as a response it kept to the document
    code = "unsupported_parameter" if error.code == NOT_AS_DOCUMENTED else error.code
    return ApiError(error.status, message, param=param or None, code=code, headers=error.headers)


class ResponseOut(Out):
    """Where the chunks of a chat become a response: events of a stream, or one at the end."""

    def begin(self, asked: ResponsesRequest, settings: ServerSettings) -> None:
        """Notes what the response is to."""
        self.is_live = bool(asked.stream)
        self.answer = _Answer(asked, settings)

    async def event(self, body: dict[str, Any]) -> None:
        """Takes a chunk."""
        for event in self.answer.add(body):
            if self.is_live:
                await super().event(event)

    async def end_stream(self) -> None:
        """Ends the response."""
        for event in self.answer.finish():
            if self.is_live:
                await super().event(event)
        await (self.close() if self.is_live else self.whole(self.answer.body))

    async def fail(self, error: ApiError) -> None:
        """Says in a stream that no more comes."""
        for event in self.answer.fail(error):
            await super().event(event)
        await self.close()


class _Answer:
    """A response that grows with the chunks of a chat, and the events of its growth."""

    def __init__(self, asked: ResponsesRequest, settings: ServerSettings) -> None:
        self.body = _body(asked, settings)
        self.output: list[dict[str, Any]] = self.body["output"]
        self.reason = "stop"
        self._num_events = 0
        self._texts: list[str] | None = None  # of the message that is being written

    def add(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a chunk."""
        if not self._num_events:
            self._key = chunk["id"].rpartition("-")[2]
            self.body |= {"id": f"resp_{self._key}", "created_at": chunk["created"]}
            self.body |= {"model": chunk["model"], "status": "in_progress"}
            yield self._event("created", response=self.body)
            yield self._event("in_progress", response=self.body)
        if chunk["usage"]:
            self.body["usage"] = _usage(chunk["usage"])
        for choice in chunk["choices"]:
            delta, logprobs = choice["delta"], choice["logprobs"]
            if delta.get("content") or (logprobs and self._texts is not None):
                yield from self._write(delta.get("content", ""), logprobs)
            for call in delta.get("tool_calls", ()):
                yield from self._call(call)
            self.reason = choice["finish_reason"] or self.reason

    def finish(self) -> Iterator[dict[str, Any]]:
        """The last events; `body` is then whole."""
        if not self.output:
            yield from self._write("", None)
        is_cut = self.reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._end_message(status)
        self.body["status"] = status
        self.body["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        yield self._event(status, response=self.body)

    def fail(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """The last events of what can't be finished."""
        yield from self._end_message("incomplete")
        told = error.body()["error"]
        kinds = {429: "rate_limit_exceeded"}
        code = "server_error" if error.status >= 500 else kinds.get(error.status, "invalid_prompt")
        self.body |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("failed", response=self.body)
        # clients raise what has `error`, and what only says that it failed they may not look at
        flat = {name: told[name] for name in ("code", "message", "param")}
        yield {**self._event("error"), "type": "error", **flat, "error": told}

    def _write(self, text: str, logprobs: Any) -> Iterator[dict[str, Any]]:
        if self._texts is None:
            self._texts = []
            item: dict[str, Any] = {"id": f"msg_{self._key}_{len(self.output)}", "type": "message"}
            item |= {"status": "in_progress", "role": "assistant", "content": []}
            self.output.append(item)
            yield self._of_item("output_item.added", item=item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._of_item("content_part.added", part=part)
            item["content"] = [part]
        self._texts.append(text)
        found = [_logprob(one) for one in logprobs["content"]] if logprobs else []
        self.output[-1]["content"][0]["logprobs"] += found
        yield self._of_item("output_text.delta", delta=text, logprobs=found)

    def _end_message(self, status: str) -> Iterator[dict[str, Any]]:
        if self._texts is None:
            return
        item = self.output[-1]
        part = item["content"][0]
        part["text"], item["status"], self._texts = "".join(self._texts), status, None
        yield self._of_item("output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._of_item("content_part.done", part=part)
        yield self._of_item("output_item.done", item=item)

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end_message("completed")
        item = {"id": f"fc_{call['id']}", "type": "function_call", "status": "completed"}
        item |= {"call_id": call["id"], **call["function"]}
        self.output.append(item)
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._of_item("output_item.added", item=begun)
        yield self._of_item("function_call_arguments.delta", delta=item["arguments"])
        yield self._of_item("function_call_arguments.done", **call["function"])
        yield self._of_item("output_item.done", item=item)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the last item, or of its text."""
        if "item" not in fields:
            fields["item_id"] = self.output[-1]["id"]
        if kind.startswith(("content_part", "output_text")):
            fields["content_index"] = 0
        return self._event(kind, output_index=len(self.output) - 1, **fields)


def _body(asked: ResponsesRequest, settings: ServerSettings) -> dict[str, Any]:
    """A response without what its chunks tell."""
    choice, form = asked.tool_choice or "auto", asked.text and asked.text.format
    temperature = asked.temperature
    return {
        "object": "response",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
        "store": False,
        "temperature": settings.default_temperature if temperature is None else temperature,
        "text": {"format": form.model_dump(by_alias=True) if form else {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in asked.tools or []],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
    }


def _usage(usage: dict[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """With bytes in any case: here they can't be null."""
    told = {**entry, "bytes": entry["bytes"] or list(entry["token"].encode())}
    if "top_logprobs" in entry:
        told["top_logprobs"] = [_logprob(one) for one in entry["top_logprobs"]]
    return told
