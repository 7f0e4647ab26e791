"""The names, limits and defaults of a server. Plain values."""

from dataclasses import dataclass, field

MIB = 2**20


@dataclass(frozen=True)
class ServerSettings:
    """Names, limits and defaults of a server.

    Attributes:
        adapters: names of further models, which are the base with an adapter, by its number.
        api_keys: any one of them lets a request in; none: every request.
        max_queue: answers that may wait besides those that the engine works on.
        max_n, max_images: of one request.
        max_echo_tokens: longest prompt whose log-probabilities may be asked for: its logits take
            tokens times vocabulary at once.
        request_seconds: from the first byte to the last one of the answer.
        read_seconds: for the body to arrive.
        default_max_tokens: of a chat that says nothing; it ends where the model does.
        cors_origins: of pages elsewhere that may ask.
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
