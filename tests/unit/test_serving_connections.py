"""Connections to the server: idle ones, too many, encrypted ones. Real sockets on this machine."""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
from urllib.parse import urlsplit

import httpx
import pytest

from commands.serve import SHELF, listening_options
from parse_args import parse_serve_args
from prompt_fn import auto, chat
from register import import_shelf
from stageline.errors import RemoteError
from stageline.inference.dialogue import Dialogue
from stageline.inference.remote import Endpoint
from stageline.serving.client import Server, server_url
from stageline.serving.settings import check_certificate
from tests.helpers.chat_templates import format_tokenizer
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.served import served

import_shelf(*SHELF)
TOKENIZER = format_tokenizer("qwen")
PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900}
HALF = b"GET /health HTTP/1.1\r\nHost: x\r\nX-More: "
PATIENCE = 30.0  # only for tests that fail


@contextlib.contextmanager
def serving(*, reply="Yes.", seconds=0.0, max_running=4, **listening):
    with (
        FakeEngine(TOKENIZER, reply=reply, seconds=seconds, max_running=max_running) as engine,
        served(engine, render=chat, image_token=auto, listening=listening) as running,
        contextlib.ExitStack() as stack,
    ):
        parts = urlsplit(running.url)

        def connect(data=b""):
            made = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE)
            made.sendall(data)
            return stack.enter_context(made)

        yield engine, running.url, connect


def test_half_open_connections_below_the_limit_stop_nobody():
    with serving(limit_concurrency=302) as (_, url, connect):
        for data in (b"", HALF):
            for _ in range(150):
                connect(data)
        answer = httpx.post(url + PATH, json=BODY, timeout=PATIENCE)
        assert answer.json()["choices"][0]["message"]["content"] == "Yes."


def test_connections_beyond_the_limit_are_refused():
    with serving(reply="a " * 2000, seconds=0.01, limit_concurrency=4) as (engine, url, connect):
        content = json.dumps({**BODY, "stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        asked = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        busy = [connect(asked) for _ in range(3)]
        for one in busy:
            assert one.recv(10) == b"HTTP/1.1 2"
        refused = httpx.get(f"{url}/health", timeout=PATIENCE)
        assert refused.status_code == 503 and refused.headers["connection"] == "close"
        for one in busy:
            one.close()
        until = time.monotonic() + PATIENCE
        while engine.stats().running and time.monotonic() < until:
            time.sleep(0.01)
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200


# -- encrypted ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a certificate that is its own authority, its key, and another key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("cert", "other"):
        command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 \
            -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -nodes \
            -keyout {name}.key -out {name}.pem"
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    command = "openssl ec -in cert.key -aes128 -passout pass:secret -out locked.key"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def test_an_encrypted_server_is_asked_with_a_private_authority(files, monkeypatch):
    made = {"ssl_certfile": str(files / "cert.pem"), "ssl_keyfile": str(files / "cert.key")}
    with serving(**made) as (_, url, _connect):
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=files / "cert.pem")
        answer = httpx.post(url + PATH, json=BODY, verify=context)
        assert answer.json()["choices"][0]["message"]["content"] == "Yes."
        endpoint = Endpoint(name="tiny", base_url=server_url(url), max_retries=0)
        answering = {"max_new_tokens": 5, "temperature": 0.0, "top_p": 1.0, "top_k": 0}
        answering |= {"repetition_penalty": 1.0, "seed": 0, "change": dict, "write": str}
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(RemoteError, match="CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE"):
            Dialogue(Server(endpoint), **answering).answer("Hello")
        monkeypatch.setenv("SSL_CERT_FILE", str(files / "cert.pem"))
        text, _ = Dialogue(Server(endpoint), **answering).answer("Hello")
        assert text == "Yes."


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keyfile": "cert.key"}, "requires --http.ssl_certfile"),
        ({"certfile": "cert.pem", "keyfile": "other.key"}, "KEY_VALUES_MISMATCH"),
        ({"certfile": "cert.pem", "keyfile": "locked.key"}, "locked.key can't be used"),
    ],
)
def test_a_wrong_certificate_is_told_before_anything_is_loaded(files, options, told):
    words = ["--model-path", str(files)]
    for name, file in options.items():
        words += [f"--http.ssl_{name}", str(files / file)]
    with pytest.raises(ValueError, match=told):
        http = parse_serve_args(words).run.http
        check_certificate(http.ssl_certfile, http.ssl_keyfile)


def test_options_reach_the_server(files):
    words = ["--model-path", str(files), "--http.ssl_certfile", str(files / "cert.pem")]
    words += ["--http.ssl_keyfile", str(files / "cert.key"), "--http.max_connections", "7"]
    words += ["--http.keep_alive_timeout", "3"]
    assert listening_options(parse_serve_args(words).run) == {
        "ssl_certfile": str(files / "cert.pem"),
        "ssl_keyfile": str(files / "cert.key"),
        "limit_concurrency": 8,
        "timeout_keep_alive": 3,
    }
