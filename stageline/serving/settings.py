"""The names, limits and defaults of a server, and who may ask it. Plain values."""

import ipaddress
import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from stageline.errors import UserError

_KEY = re.compile("[!-~]{8,}")

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
        max_tokens: longest answer that may be asked for.
        request_timeout: seconds from the first byte to the last one of the answer.
        read_timeout: seconds for the body to arrive.
        default_max_tokens: of a chat that says nothing; it ends where the model does.
        cors_origins: of pages elsewhere that may ask.
        hosts: names by which requests may ask, as their Host header says; a page elsewhere can lead
            a name of its own to 127.0.0.1 (DNS rebinding).
    """

    model_name: str
    adapters: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = 256
    max_body_mib: float = 20.0
    max_tokens: int = 8192
    max_n: int = 8
    max_echo_tokens: int = 8192
    max_images: int = 8
    request_timeout: float = 600.0
    read_timeout: float = 60.0
    default_max_tokens: int = 512
    default_temperature: float = 1.0
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("*",)


def is_local(host: str) -> bool:
    """Return whether a name or an address means this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_api_keys(variable: str | None, file: str | None) -> tuple[str, ...]:
    """Return the accepted API keys of an environment variable and a file; none: no key is required.

    Raises:
        UserError: there is no key, or one that a header cannot carry.
    """
    texts = {}
    if variable is not None:
        texts[f"`api_key_env` {variable}"] = os.environ.get(variable, "")
    if file is not None:
        texts[f"`http.api_key_file` {file}"] = Path(file).read_text(encoding="utf-8")
    found: dict[str, None] = {}
    for source, text in texts.items():
        keys = [line.strip() for line in text.splitlines() if line.strip()]
        if not keys:
            raise UserError(f"{source} holds no key. Set it or drop the option.")
        if wrong := [number for number, key in enumerate(keys, 1) if not _KEY.fullmatch(key)]:
            raise UserError(
                f"{source}: key {wrong[0]} is not 8 or more ASCII letters without spaces. Make one "
                "with `openssl rand -hex 24`."
            )
        found |= dict.fromkeys(keys)
    return tuple(found)


def check_certificate(cert: str | None, key: str | None) -> None:
    """Refuse a certificate that no server could show, before a model is loaded."""
    if cert is None:
        return
    try:  # with no password, which OpenSSL would ask for at the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise UserError(
            f"`http.ssl_certfile` {' and '.join(filter(None, (cert, key)))} can't be used: "
            f"{error}. Give a certificate and its key in PEM form, the key without a password."
        ) from error
