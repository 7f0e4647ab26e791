"""The body of a request to go on with a text, as strict as its document says."""

from typing import Annotated, Any, Literal

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


def _no_echo(value: Any) -> Any:
    if value is True:
        raise ValueError("this server does not support it: answers come without their prompt")
    return value


def _one_try(value: Any) -> Any:
    if isinstance(value, int) and value > 1:
        raise ValueError("this server does not support it: ask for n answers and choose yourself")
    return value


class CompletionRequest(SamplingFields):
    """A text that is to be gone on with."""

    prompt: Prompt
    max_tokens: integer(1, 2**31 - 1) = None
    logprobs: integer(0, 5) = None
    echo: Annotated[Literal[False] | None, BeforeValidator(_no_echo)] = None
    best_of: Annotated[Literal[1] | None, BeforeValidator(_one_try)] = None
    suffix: unsupported("a text is gone on with at its end") = None
