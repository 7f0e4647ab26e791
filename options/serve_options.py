"""The options of serve.py: where it listens, who may ask, how much of what."""

from dataclasses import dataclass

from options.decode_options import DecodeOptions
from options.fields import option
from options.http_options import HttpOptions
from options.image_options import ImageOptions
from options.model_options import ModelOptions


@dataclass(kw_only=True)
class ListenOptions:
    """Server"""

    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine")
    port: int = option(8000, "port; 0 takes a free one", at_least=0, at_most=65535)
    served_model_name: str | None = option(
        None, "what clients ask for; default: the name of the model's folder"
    )
    api_key_env: str | None = option(None, "environment variable that holds an API key")
    api_key_file: str | None = option(
        None, "file of API keys, one a line; each of them lets a request in", is_path=True
    )
    cors_origins: list[str] | None = option(
        None, "pages elsewhere that may ask, https://page.example; default: none"
    )
    shutdown_seconds: float = option(
        30.0, "after a signal, what is under way may take so long to finish", at_least=0
    )


@dataclass(kw_only=True)
class RequestOptions:
    """Limits and defaults of requests"""

    max_queue: int = option(256, "answers that may wait; more are refused (429)", at_least=0)
    max_body_mib: float = option(
        20.0, "largest body of a request, pictures included", at_least=0.001, at_most=4096
    )
    max_tokens_limit: int = option(8192, "longest answer that may be asked for", at_least=1)
    max_n: int = option(8, "most answers of one request", at_least=1, at_most=128)
    max_echo_tokens: int = option(
        8192, "longest prompt whose log-probabilities may be asked for", at_least=1
    )
    max_images: int = option(8, "most pictures of one request; 0: none", at_least=0)
    fetch_images: bool = option(
        False, "get pictures from http(s) addresses of the public internet that requests name"
    )
    request_timeout: float = option(
        600.0, "seconds from a request to the end of its answer", at_least=0.1
    )
    read_timeout: float = option(60.0, "seconds for a body to arrive", at_least=0.1)
    max_new_tokens: int = option(
        512, "longest answer of a chat that names no length, in tokens", at_least=1
    )
    temperature: float = option(
        1.0, "of a request that names none; 0 takes the likeliest token", at_least=0, at_most=2
    )


@dataclass(kw_only=True)
class ServeConfig(
    ListenOptions, HttpOptions, RequestOptions, ImageOptions, DecodeOptions, ModelOptions
):
    """Every option of serve.py."""
