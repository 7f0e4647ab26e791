"""Options of serve.py: address, access and limits."""

from options.answer import DecodeOptions, ModelOptions
from options.data import ImageOptions
from options.fields import (
    OptionError,
    Options,
    mapping,
    model_option,
    option,
    option_fields,
    split_name,
)


class HttpSettings(Options):
    """Server: connections"""

    ssl_certfile: str | None = option(None, "certificate chain (PEM), for https", is_path=True)
    ssl_keyfile: str | None = option(
        None,
        "private key (PEM); default: in the certificate file",
        is_path=True,
        needs=("--http.ssl_certfile FILE",),
    )
    max_connections: int = option(512, "most open connections; more get status 503", ge=1)
    keep_alive_timeout: float = option(5.0, "timeout of an idle connection, in seconds", ge=0.01)
    read_timeout: float = option(60.0, "timeout of a request body, in seconds", ge=0.1)
    shutdown_seconds: float = option(30.0, "timeout of requests after a signal, in seconds", ge=0)
    cors_origins: list[str] | None = option(None, "allowed CORS origins, such as https://a.example")
    api_key_file: str | None = option(None, "file of API keys, one per line", is_path=True)


class RequestLimits(Options):
    """Server: limits of requests"""

    max_queue: int = option(256, "most waiting answers; more get status 429", ge=0)
    max_body_mib: float = option(20.0, "largest request with pictures, in MiB", ge=0.001, le=4096)
    max_tokens: int = option(8192, "max length of an answer, in tokens", ge=1)
    max_n: int = option(8, "most answers per request", ge=1, le=128)
    max_echo_tokens: int = option(8192, "longest prompt with log-probabilities, in tokens", ge=1)
    max_images: int = option(8, "most pictures per request", ge=0)
    request_timeout: float = option(600.0, "timeout of a request, in seconds", ge=0.1)


class ServeConfig(ImageOptions, DecodeOptions, ModelOptions):
    """Server"""

    host: str = option("127.0.0.1", "address to listen on (0.0.0.0 = all interfaces)")
    port: int = option(8000, "port to listen on (0 = a free one)", ge=0, le=65535)
    served_model_name: str | None = option(None, "model name in the API; default: the folder's")
    api_key_env: str | None = option(None, "environment variable with an API key")
    http: HttpSettings = mapping(HttpSettings)
    limits: RequestLimits = mapping(RequestLimits)
    max_new_tokens: int = option(512, "default max length of a chat answer, in tokens", ge=1)
    temperature: float = option(1.0, "default sampling temperature (0 = greedy)", ge=0, le=2)
    adapter_path: list[str] | None = model_option(
        None,
        "LoRA adapters (peft), merged in order; NAME=FOLDER for each = models next to the base",
        is_named=True,
    )


def named_adapters(run: ServeConfig) -> dict[str, str]:
    """Return name -> folder of the adapters that are models of their own."""
    item = option_fields(run)["adapter_path"]
    pairs = [split_name(item, value) for value in run.adapter_path or ()]
    named = {name: path for name, path in pairs if name}
    if named and (len(named) < len(pairs) or run.merge_adapters):
        raise OptionError(
            f"--adapter-path {','.join(run.adapter_path or ())} has adapters that are merged and "
            "others that are not. Name each of them, NAME=FOLDER,NAME=FOLDER, without "
            "--merge-adapters, or none."
        )
    return named
