"""The body of a chat request, as strict as its document says."""

from typing import Annotated, Any, Literal

from pydantic import Field

from stageline.serving.fields import SamplingFields, Strict, integer, unsupported

MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_TOOLS = 128

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
    """What a tool is called with; `strict`: arguments keep to the schema in every call."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """Which function is to be called."""

    name: Name


class NamedTool(Strict):
    """Which tool is to be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Strict):
    """The answer is any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """What the JSON has to be; not strict: but for keywords that can't be kept to."""

    name: Name
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """The answer is JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class ChatRequest(SamplingFields):
    """A chat that is to be gone on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: integer(1, 2**31 - 1) = None
    max_completion_tokens: integer(1, 2**31 - 1) = None
    logprobs: bool | None = None
    top_logprobs: integer(0, 20) = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
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
