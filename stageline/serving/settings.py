"""What the server is told when it starts: names, limits and defaults. Plain values."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from stageline.inference.decoding.request import Sampling
from stageline.serving.api_models import ChatRequest, CompletionRequest
from stageline.serving.errors import bad_request

MIB = 2**20


@dataclass(frozen=True)
class ServerSettings:
    """Names, limits and defaults of a server.

    Attributes:
        model_name: what clients ask for, and what answers bear.
        adapters: names of further models, which are the base with an adapter, by its number.
        api_keys: any one of them lets a request in; none: every request.
        max_queue: answers that may wait besides those that the engine works on.
        max_body_bytes: of one request.
        max_tokens_limit: longest answer that may be asked for.
        max_n: answers of one request.
        max_echo_tokens: longest prompt whose log-probabilities may be asked for: its logits take
            tokens times vocabulary at once.
        max_images: of one request; 0: none.
        request_seconds: from the first byte to the last one of the answer.
        read_seconds: for the body to arrive.
        default_max_tokens: of a chat that says nothing; it ends where the model does.
        default_temperature: of a request that says nothing.
        cors_origins: of pages elsewhere that may ask; none by default.
        hosts: names by which requests may ask, as their Host header says; a page elsewhere can lead
            a name of its own to 127.0.0.1 (DNS rebinding).
    """

    model_name: str
    adapters: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = 256
    max_body_bytes: int = 20 * MIB
    max_tokens_limit: int = 8192
    max_n: int = 8
    max_echo_tokens: int = 8192
    max_images: int = 8
    request_seconds: float = 600.0
    read_seconds: float = 60.0
    default_max_tokens: int = 512
    default_temperature: float = 1.0
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("*",)


_SEEDS = 2**63
TEXT_DEFAULT_TOKENS = 16  # as OpenAI's


def sampling_of(
    request: ChatRequest | CompletionRequest,
    settings: ServerSettings,
    *,
    num_ids: int,
    stop_ids: Sequence[int],
) -> Sampling:
    """Return how the answers of a request are sampled, all but their length.

    Args:
        num_ids: tokens of the model.
        stop_ids: those that end its answers.

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
    logprobs = request.logprobs if isinstance(request, CompletionRequest) else None
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request(
                "top_logprobs came without logprobs; set logprobs to true.", param="top_logprobs"
            )
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    bias = tuple((int(key), value) for key, value in (request.logit_bias or {}).items())
    asked = request.stop_token_ids or []
    for name, ids in (("logit_bias", [one for one, _ in bias]), ("stop_token_ids", asked)):
        if too_large := [token_id for token_id in ids if token_id >= num_ids]:
            raise bad_request(
                f"{name} has the token id {too_large[0]}; the model has {num_ids} tokens.",
                param=name,
            )
    own = () if request.ignore_eos else stop_ids
    ends = tuple(dict.fromkeys([*own, *asked])) if request.ignore_eos or asked else None
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    temperature = request.temperature
    return Sampling(
        temperature=settings.default_temperature if temperature is None else temperature,
        top_k=max(request.top_k or 0, 0),  # -1, as vLLM has it: all
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=bias,
        seed=secrets.randbelow(_SEEDS) if request.seed is None else request.seed % _SEEDS,
        stop=tuple(dict.fromkeys(stop)),
        stop_token_ids=ends,
        min_new_tokens=request.min_tokens or 0,
        logprobs=logprobs,
    )
