"""The body of a chat request, as strict as its document says."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from stageline.serving.fields import OnlyFalse, SamplingFields, Strict, integer, unsupported

MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_TOOLS = 128
_NO_FORCING = "nothing forces the model to call a tool or to keep to a schema; use auto or none"
_TEXT_ONLY = (
    "response_format can be text alone, as nothing forces the model to write JSON; ask for JSON "
    "in the messages"
)

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
Text = str


class TextPart(Strict):
    """A stretch of text."""

    type: Literal["text"]
    text: Text


class ImageUrl(Strict):
    """Where a picture is: `data:image/png;base64,...`, or an address if the server fetches."""

    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Strict):
    """A picture."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]
Parts = Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)]


class SystemMessage(Strict):
    """What the operator of a chat says."""

    role: Literal["system", "developer"]
    content: Text | TextParts
    name: Name | None = None


class UserMessage(Strict):
    """What a person says, with pictures."""

    role: Literal["user"]
    content: Text | Parts
    name: Name | None = None


class CalledFunction(Strict):
    """A function and its arguments, JSON text of an object."""

    name: Name
    arguments: Text


class ToolCall(Strict):
    """A call that an answer held."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Text | TextParts | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    # clients send back what they were given
    refusal: unsupported("answers here have none") = None
    audio: unsupported("answers here are text") = None
    function_call: unsupported("use tool_calls") = None


class ToolMessage(Strict):
    """What a tool said."""

    role: Literal["tool"]
    content: Text | TextParts
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Name | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Strict):
    """What a tool is called with."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: OnlyFalse = None  # nothing forces arguments to keep to a schema


class Tool(Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


def _is_soft(value: Any) -> Any:
    if isinstance(value, dict) or value in ("required",):
        raise ValueError(f"this server does not support it: {_NO_FORCING}")
    return value


def _is_text(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") in ("json_object", "json_schema"):
        raise ValueError(_TEXT_ONLY)
    return value


class ResponseFormat(Strict):
    """The form of the answer."""

    type: Literal["text"]


class ChatRequest(SamplingFields):
    """A chat that is to be gone on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: integer(1, 2**31 - 1) = None
    max_completion_tokens: integer(1, 2**31 - 1) = None
    logprobs: bool | None = None
    top_logprobs: integer(0, 20) = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Literal["none", "auto"] | None, BeforeValidator(_is_soft)] = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[ResponseFormat | None, BeforeValidator(_is_text)] = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    # what is known of the answer before: it would change the time alone
    prediction: dict[str, Any] | None = None
    functions: unsupported("use tools") = None
    function_call: unsupported("use tool_choice") = None
    audio: unsupported("answers are text") = None
    reasoning_effort: unsupported("the model has no such setting") = None
    verbosity: unsupported("the model has no such setting") = None
    web_search_options: unsupported("there is no search") = None
    chat_template: unsupported("the template is the model's") = None
    chat_template_kwargs: unsupported("the template is the model's") = None
