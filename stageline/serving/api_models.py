"""The JSON of requests, as strict as the document of the API says.

A field that would change an answer and cannot be honoured has to be left out.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

INT64 = 2**63


class Strict(BaseModel):
    """A JSON object whose fields are all known, and of just the types they have."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


def _as_integer(value: Any) -> Any:
    """1.0 is an integer in JSON schema, and in JavaScript."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < INT64
    return int(value) if is_whole else value


_WHOLE = BeforeValidator(_as_integer)


def finite(least: float, most: float) -> Any:
    """Return the limits of a finite number."""
    return Field(ge=least, le=most, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1, le=2**31 - 1), _WHOLE]
Size = Annotated[int, Field(ge=0, le=2**31 - 1), _WHOLE]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Stop | Annotated[list[Stop], Field(max_length=16)] | None
# pydantic writes down the pattern of the keys, and not that there are no others
_MAP = Field(max_length=1024, json_schema_extra={"additionalProperties": False})
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    # noise against listeners on encrypted lines: without effect here
    include_obfuscation: bool | None = None


Choices = Annotated[list[Stop], Field(min_length=1, max_length=1024)]
Pattern = Annotated[str, Field(min_length=1)]


class StructuredOutputs(Strict):
    """The form of an answer as vLLM has it; one of them."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Choices | None = None
    json_object: Literal[True] | None = None


class SamplingFields(Strict):
    """Fields that chat and completions share; those from `top_k` on are this server's own."""

    model: Annotated[str, Field(max_length=500)]
    temperature: Annotated[float, finite(0, 2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, finite(-2, 2)] | None = None
    presence_penalty: Annotated[float, finite(-2, 2)] | None = None
    logit_bias: Annotated[dict[BiasKey, Annotated[float, finite(-100, 100)]], _MAP] | None = None
    seed: Annotated[int, Field(ge=-INT64, le=INT64 - 1), _WHOLE] | None = None
    n: Annotated[int, Field(ge=1, le=128), _WHOLE] | None = None
    stop: Stops = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), _WHOLE] | None = None
    min_p: Annotated[float, finite(0, 1)] | None = None
    repetition_penalty: Annotated[float, finite(0.01, 100)] | None = None
    stop_token_ids: Annotated[list[Size], Field(max_length=16)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Size | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    # they change no answer
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class TextPart(Strict):
    """A stretch of text."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """A picture itself: `data:image/png;base64,...`."""

    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Strict):
    """A picture."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=256)]
Parts = Annotated[list[Part], Field(min_length=1, max_length=256)]


class SystemMessage(Strict):
    """Message of the operator of a chat."""

    role: Literal["system", "developer"]
    content: str | TextParts
    name: Name | None = None


class UserMessage(Strict):
    """Message of a user, with images."""

    role: Literal["user"]
    content: str | Parts
    name: Name | None = None


class NamedFunction(Strict):
    """The function that is to be called."""

    name: Name


class CalledFunction(NamedFunction):
    """A function and its arguments, JSON text of an object."""

    arguments: str


class ToolCall(Strict):
    """A call that an answer held."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: str | TextParts | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    # clients send back what they were given; answers have none of it
    refusal: None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Strict):
    """Result of a tool."""

    role: Literal["tool"]
    content: str | TextParts
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Name | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(NamedFunction):
    """The function of a tool; `strict`: arguments keep to the schema in every call."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class NamedTool(Strict):
    """Choice of the tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class PlainFormat(Strict):
    """The answer is any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchema(Strict):
    """Schema of the JSON; if not strict, keywords that cannot be enforced are ignored."""

    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """The answer is JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]
Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]


class TemplateFields(Strict):
    """Variables of the model's chat template, and where the answer begins."""

    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    chat_template: None = None


class ChatRequest(SamplingFields, TemplateFields):
    """A chat to continue."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), _WHOLE] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    # a predicted answer would only change the time
    prediction: dict[str, Any] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: None = None
    web_search_options: None = None


Ids = Annotated[list[Size], Field(min_length=1, max_length=2**20)]


def _kind_of_prompt(value: Any) -> str:
    """Return the kind of a prompt, so that only the errors of this kind are reported."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    if isinstance(first, str):
        return "texts"
    return "lists of ids" if isinstance(first, list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[str], Field(min_length=1, max_length=64), Tag("texts")]
    | Annotated[list[Ids], Field(min_length=1, max_length=64), Tag("lists of ids")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(SamplingFields):
    """A text to continue."""

    prompt: Prompt
    max_tokens: Size | None = None
    logprobs: Annotated[int, Field(ge=0, le=5), _WHOLE] | None = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class TokenizeRequest(TemplateFields):
    """A text or messages whose tokens are asked for."""

    model: Annotated[str, Field(max_length=500)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """Tokens whose text is asked for."""

    model: Annotated[str, Field(max_length=500)] | None = None
    tokens: Annotated[list[Size], Field(max_length=2**20)]
