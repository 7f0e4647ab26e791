"""What the server answers, for its document: each field is there, be it null."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorObject(_Exact):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Exact):
    """Any answer that is no success."""

    error: ErrorObject


class Usage(_Exact):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(_Exact):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Exact):
    """Of the whole answer."""

    content: list[ChatLogprob]
    refusal: None


class AnsweredFunction(_Exact):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class AnsweredCall(_Exact):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(_Exact):
    """An answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(_Exact):
    """One of the answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Exact):
    """The answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(_Exact):
    """Of a text, token by token; nothing comes before the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(_Exact):
    """One of the texts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(_Exact):
    """The texts that prompts were gone on with."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: Usage


class Abilities(_Exact):
    """What the chat page has to know of a model."""

    takes_images: bool
    max_length: int | None


class ModelCard(_Exact):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    stageline: Abilities


class ModelList(_Exact):
    """The models that can be asked."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(_Exact):
    """The engine works."""

    status: Literal["ok"]
    running: int
    queued: int
