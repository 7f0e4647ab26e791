"""What a request says of sampling -> the engine's `Sampling`, within the limits of the server."""

import secrets
from dataclasses import replace

from stageline.inference.decoding.request import Sampling
from stageline.serving.chat_models import ChatRequest
from stageline.serving.completion_models import CompletionRequest
from stageline.serving.errors import bad_request
from stageline.serving.fields import SamplingFields
from stageline.serving.settings import ServerSettings

_SEEDS = 2**63
TEXT_DEFAULT_TOKENS = 16  # as OpenAI's


def base_sampling(request: SamplingFields, settings: ServerSettings, *, num_ids: int) -> Sampling:
    """All but the length and log-probabilities.

    Args:
        num_ids: tokens of the model.

    Raises:
        ApiError: a value is out of the server's limits.
    """
    if (request.n or 1) > settings.max_n:
        raise bad_request(f"n is {request.n}; at most {settings.max_n} is taken.", param="n")
    if request.stream_options is not None and not request.stream:
        raise bad_request(
            "stream_options came without stream; they say how a stream is to be.",
            param="stream_options",
        )
    bias = tuple((int(key), value) for key, value in (request.logit_bias or {}).items())
    too_large = [token_id for token_id, _ in bias if token_id >= num_ids]
    if too_large:
        raise bad_request(
            f"logit_bias has the token id {too_large[0]}; the model has {num_ids} tokens.",
            param="logit_bias",
        )
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    temperature = request.temperature
    return Sampling(
        temperature=settings.default_temperature if temperature is None else temperature,
        top_k=request.top_k or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=bias,
        seed=secrets.randbelow(_SEEDS) if request.seed is None else request.seed % _SEEDS,
        stop=tuple(dict.fromkeys(stop)),
    )


def chat_sampling(request: ChatRequest, settings: ServerSettings, *, num_ids: int) -> Sampling:
    """Of a chat; raises as `base_sampling`. The length is what was asked for, 0: nothing was."""
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request(
            "top_logprobs came without logprobs; set logprobs to true.", param="top_logprobs"
        )
    base = base_sampling(request, settings, num_ids=num_ids)
    return replace(base, logprobs=(request.top_logprobs or 0) if request.logprobs else None)


def text_sampling(
    request: CompletionRequest, settings: ServerSettings, *, num_ids: int
) -> Sampling:
    """Of a text; raises as `base_sampling`."""
    base = base_sampling(request, settings, num_ids=num_ids)
    return replace(base, logprobs=request.logprobs)


def with_length(
    sampling: Sampling,
    asked: int | None,
    *,
    default: int,
    num_prompt_tokens: int,
    max_length: int | None,
    limit: int,
    field: str = "max_tokens",
) -> Sampling:
    """The sampling with as many tokens as were asked for, or the default where the model has room.

    Args:
        asked: None: nothing was.
        max_length: positions of the model.
        limit: longest answer that the server gives.
        field: what the request calls it.

    Raises:
        ApiError: both numbers, where prompt and answer are too long together.
    """
    if asked is not None and asked > limit:
        raise bad_request(f"{field} is {asked}; at most {limit} is taken.", param=field)
    room = None if max_length is None else max_length - num_prompt_tokens
    if room is not None and room < (asked or 1):
        asked_text = f" and {asked} tokens of answer were asked for" if asked else ""
        raise bad_request(
            f"The prompt has {num_prompt_tokens} tokens{asked_text}; the model has {max_length} "
            "positions for both. Shorten the prompt, or ask for less.",
            param="messages" if asked is None else field,
            code="context_length_exceeded",
        )
    length = asked or min(default, limit, room if room is not None else limit)
    return replace(sampling, max_new_tokens=length)
