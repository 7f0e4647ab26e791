"""What the server is told when it starts: names, limits and defaults. Plain values."""

from dataclasses import dataclass, field

MIB = 2**20


@dataclass(frozen=True)
class HttpSettings:
    """Connections to a server.

    Attributes:
        certfile, keyfile: for https; the key may be in the certificate's file.
        max_connections: open at a time.
        header_seconds: for the head of a request to arrive.
        keep_alive_seconds: between two requests of a connection.
    """

    certfile: str | None = None
    keyfile: str | None = None
    max_connections: int = 512
    header_seconds: float = 10.0
    keep_alive_seconds: float = 5.0


@dataclass(frozen=True)
class ServerSettings:
    """Names, limits and defaults of a server.

    Attributes:
        model_name: what clients ask for, and what answers bear.
        api_keys: any one of them lets a request in; none: every request.
        max_queue: answers that may wait besides those that the engine works on.
        max_body_bytes: of one request; eight times as much of all that are read at one time.
        max_tokens_limit: longest answer that may be asked for.
        max_n: answers of one request.
        max_echo_tokens: longest prompt whose log-probabilities may be asked for: its logits take
            tokens times vocabulary at once.
        max_images: of one request; 0: none.
        request_seconds: from the first byte to the last one of the answer.
        read_seconds: for the body to arrive.
        default_max_tokens: of a chat that says nothing; it ends where the model does.
        default_temperature: of a request that says nothing.
        fetches_images: get pictures from http(s) addresses.
        cors_origins: of pages elsewhere that may ask; none by default.
    """

    model_name: str
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
    fetches_images: bool = False
    cors_origins: tuple[str, ...] = ()
