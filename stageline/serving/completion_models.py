"""The body of a request to go on with a text, as strict as its document says."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from stageline.serving.fields import SamplingFields, TokenId, integer, unsupported

MAX_PROMPTS = 64
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=2**20)]
Prompt = (
    str
    | Ids
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def _one_try(value: Any) -> Any:
    if isinstance(value, int) and value > 1:
        raise ValueError("this server does not support it: ask for n answers and choose yourself")
    return value


class CompletionRequest(SamplingFields):
    """A text that is to be gone on with."""

    prompt: Prompt
    max_tokens: integer(0, 2**31 - 1) = None
    logprobs: integer(0, 5) = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1), BeforeValidator(_one_try)] | None = None
    suffix: unsupported("a text is gone on with at its end") = None
