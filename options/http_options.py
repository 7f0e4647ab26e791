"""The options of connections to a server: encryption, how many, how slow they may be."""

import ssl
from dataclasses import dataclass

from options.fields import OptionError, option


@dataclass(kw_only=True)
class HttpOptions:
    """Connections"""

    ssl_certfile: str | None = option(
        None, "certificate with its chain (PEM); the server then speaks https", is_path=True
    )
    ssl_keyfile: str | None = option(
        None, "private key (PEM), where the certificate's file does not hold it", is_path=True
    )
    max_connections: int = option(
        512, "open connections; beyond it idle ones are closed, or new ones refused", at_least=1
    )
    header_timeout: float = option(
        10.0, "seconds for the head of a request to arrive", at_least=0.01
    )
    keep_alive_timeout: float = option(
        5.0, "seconds that a connection is kept for the next request", at_least=0.01
    )


def check_certificate(run: HttpOptions) -> None:
    """Refuses a certificate that no server could show, before a model is loaded.

    Raises:
        OptionError: names the files and what is wrong.
    """
    if run.ssl_certfile is None:
        if run.ssl_keyfile is not None:
            raise OptionError(
                f"--ssl-keyfile {run.ssl_keyfile} came without --ssl-certfile. A certificate was "
                "expected, because clients trust that and not the key: give both."
            )
        return
    files = f"--ssl-certfile {run.ssl_certfile}"
    if run.ssl_keyfile is not None:
        files += f" --ssl-keyfile {run.ssl_keyfile}"
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(run.ssl_certfile, run.ssl_keyfile, password=_refuse_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise OptionError(
            f"{files} can't be used ({error}). A certificate and its private key in PEM form were "
            "expected, the key without a password, because the server shows the one and proves it "
            "with the other: look whether they belong together, and which file holds which."
        ) from error


def _refuse_password() -> str:
    """Else OpenSSL would ask at the terminal, each process."""
    raise ValueError("the key is encrypted")
