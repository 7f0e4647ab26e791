"""What the request models are made of: strict types, and fields that have to be left out."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

INT64 = 2**63
MAX_CHOICES = 128
MAX_STOPS = 16


class Strict(BaseModel):
    """A JSON object whose fields are all known, and of just the types they have."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


def _as_integer(value: Any) -> Any:
    """1.0 is an integer in JSON schema, and in JavaScript."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < INT64
    return int(value) if is_whole else value


def refusing(why: str) -> Callable[[Any], Any]:
    """A check that takes null alone.

    Args:
        why: what the message says.
    """

    def refuse(value: Any) -> Any:
        if value is not None:
            raise ValueError(f"this server does not support it: {why}. Leave it out")
        return value

    return refuse


def unsupported(why: str) -> Any:
    """The type of a field that would change the answer, and cannot be honoured."""
    return Annotated[None, BeforeValidator(refusing(why))]


def _not_true(value: Any) -> Any:
    if value is True:
        raise ValueError("this server does not support it; leave it out")
    return value


# a literal would take 0 as well
OnlyFalse = (
    Annotated[
        bool,
        BeforeValidator(_not_true),
        WithJsonSchema({"type": "boolean", "const": False}),
    ]
    | None
)


def integer(least: int, most: int) -> Any:
    """The type of a whole number of this range, or null."""
    whole = Annotated[int, Field(ge=least, le=most), BeforeValidator(_as_integer)]
    return whole | None


def number(least: float, most: float) -> Any:
    """The type of a finite number of this range, or null."""
    return Annotated[float, Field(ge=least, le=most, allow_inf_nan=False)] | None


Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1), BeforeValidator(_as_integer)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
# pydantic writes down the pattern of the keys, and not that there are no others
_MAP = Field(max_length=1024, json_schema_extra={"additionalProperties": False})
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]


class StreamOptions(Strict):
    """How a stream is to be."""

    include_usage: bool | None = None
    # noise against listeners on encrypted lines: without effect here
    include_obfuscation: bool | None = None


class SamplingFields(Strict):
    """What chat and completions have in common; the last three are this server's own."""

    model: Annotated[str, Field(max_length=500)]
    temperature: number(0, 2) = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    frequency_penalty: number(-2, 2) = None
    presence_penalty: number(-2, 2) = None
    logit_bias: Annotated[dict[BiasKey, Bias], _MAP] | None = None
    seed: integer(-INT64, INT64 - 1) = None
    n: integer(1, MAX_CHOICES) = None
    stop: Stops = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: integer(0, 2**31 - 1) = None
    min_p: number(0, 1) = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    # they change no answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
