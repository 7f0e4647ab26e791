"""Connections to the server: slow ones, too many, encrypted ones. Real sockets on this machine."""

import asyncio
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
import uvicorn
from uvicorn.server import ServerState

from options.fields import OptionError
from options.serve_args import parse_serve_args
from prompt_fn import auto, chat
from register import import_shelf
from serve import SHELF, make_http_settings
from stageline.errors import RemoteError
from stageline.inference.remote import Endpoint
from stageline.inference.remote_chat import RemoteChat, server_url
from stageline.serving import run
from stageline.serving.connections import Connection, Connections
from stageline.serving.settings import HttpSettings
from stageline.testing.chat_templates import format_tokenizer
from stageline.testing.fake_engine import FakeEngine
from stageline.testing.served import served

import_shelf(*SHELF)
TOKENIZER = format_tokenizer("qwen")
PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900}
HALF = b"GET /health HTTP/1.1\r\nHost: x\r\nX-More: "
PATIENCE = 30.0  # only for tests that fail


@contextlib.contextmanager
def serving(*, reply="Yes.", seconds=0.0, max_running=4, **http):
    with (
        FakeEngine(TOKENIZER, reply=reply, seconds=seconds, max_running=max_running) as engine,
        served(engine, render=chat, image_token=auto, http=HttpSettings(**http)) as running,
        contextlib.ExitStack() as stack,
    ):
        parts = urlsplit(running.url)

        def connect(data=b""):
            made = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE)
            made.sendall(data)
            return stack.enter_context(made)

        yield engine, running.url, connect


def rest_of(connection) -> bytes:
    """All that comes until the server hangs up."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            found += piece
    return found


def error_of(answer: bytes, status: int) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    return json.loads(body)["error"]


def test_half_open_connections_are_closed_and_others_answered():
    with serving(header_seconds=2.0, max_connections=1000) as (_, url, connect):
        silent = [connect() for _ in range(150)]
        begun = [connect(HALF) for _ in range(150)]
        answer = httpx.post(url + PATH, json=BODY, timeout=PATIENCE)
        assert answer.json()["choices"][0]["message"]["content"] == "Yes."
        with contextlib.suppress(ConnectionError):
            begun[0].sendall(b"x")  # more of it buys no time
        rest_of(begun[0])
        for one in begun[1:]:
            assert error_of(rest_of(one), 408)["code"] == "header_timeout"
        assert {rest_of(one) for one in silent} == {b""}
        assert httpx.get(f"{url}/health").status_code == 200


def test_who_waits_longest_without_a_request_goes_first():
    limits = {"header_seconds": PATIENCE, "keep_alive_seconds": PATIENCE, "max_connections": 20}
    with serving(**limits) as (_, url, connect):
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            assert client.get("/health").status_code == 200
            slow = [connect(HALF) for _ in range(60)]
            for _ in range(3):  # on new connections
                assert httpx.post(url + PATH, json=BODY, timeout=PATIENCE).status_code == 200
            assert {rest_of(one) for one in slow[:40]} == {b""}
            slow[-1].sendall(b"x\r\nConnection: close\r\n\r\n")
            assert rest_of(slow[-1]).startswith(b"HTTP/1.1 200")
            assert client.get("/health").status_code == 200, "the client tries again by itself"


def test_where_all_have_requests_under_way_new_ones_are_refused():
    limits = {"max_connections": 3, "header_seconds": PATIENCE}
    with serving(reply="a " * 2000, seconds=0.01, **limits) as (engine, url, connect):
        content = json.dumps({**BODY, "stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        asked = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        busy = [connect(asked) for _ in range(3)]
        for one in busy:
            assert one.recv(10) == b"HTTP/1.1 2"
        refused = httpx.get(f"{url}/health", timeout=PATIENCE)
        assert refused.status_code == 503 and refused.headers["connection"] == "close"
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert int(refused.headers["retry-after"]) >= 1
        for one in busy:
            one.close()
        until = time.monotonic() + PATIENCE
        while engine.stats().running and time.monotonic() < until:
            time.sleep(0.01)
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200


def test_connections_between_two_requests_end():
    limits = {"header_seconds": 0.2, "keep_alive_seconds": 0.2}
    with serving(reply="a " * 30, seconds=0.02, **limits) as (_, _url, connect):
        whole = b"GET /health HTTP/1.1\r\nHost: x\r\n"
        idle, begun = (connect(whole + b"\r\n") for _ in range(2))
        assert begun.recv(65536).startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionError):
            begun.sendall(HALF)
        assert rest_of(idle).startswith(b"HTTP/1.1 200")
        rest_of(begun)
        # a body that nobody reads keeps no connection open
        dripping = connect(whole + b"Content-Length: 1000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                dripping.sendall(b"x")
                time.sleep(0.01)
            pytest.fail("the connection is open still")
        # an answer takes longer than all of these
        content = json.dumps(BODY).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        slow = connect(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert rest_of(slow).startswith(b"HTTP/1.1 200")


def test_who_reads_nothing_loses_the_connection(monkeypatch):
    made = []

    def connections(settings):
        made.append(Connections(settings))
        return made[0]

    monkeypatch.setattr(run, "Connections", connections)
    prompts = [[9] * 1500] * 40
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 5}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    asked = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    limits = {"header_seconds": 0.2, "keep_alive_seconds": 0.2}
    with serving(max_running=40, **limits) as (_, _url, connect):
        silent = connect(asked)
        assert silent.recv(12) == b"HTTP/1.1 200"
        until = time.monotonic() + PATIENCE
        while made[0]._open and time.monotonic() < until:
            time.sleep(0.05)
        assert not made[0]._open and not made[0].idle
        assert len(rest_of(silent)) < 40 * 1500 * 100, "most of it was not sent"


class Buffer:
    """A transport of which so much is not sent yet, from one look to the next."""

    def __init__(self, *sizes):
        self.sizes, self.ends = list(sizes), []

    def get_write_buffer_size(self):
        return self.sizes.pop(0)

    def is_closing(self):
        return False

    def abort(self):
        self.ends.append("abort")

    def close(self):
        self.ends.append("close")

    def get_extra_info(self, _name):
        return None


def test_who_reads_slowly_gets_the_whole_answer():
    async def app(_scope, _receive, _send):
        raise AssertionError("nobody asks")

    async def looks(*sizes):
        config = uvicorn.Config(app, log_config=None)
        everybody = Connections(HttpSettings(header_seconds=PATIENCE))
        one = Connection(config, ServerState(), {}, connections=everybody)
        one.connection_made(transport := Buffer(*sizes))
        for _ in sizes:
            assert not transport.ends and one in everybody.idle
            one._time_is_over(PATIENCE)
        found = list(transport.ends)
        one.connection_lost(None)
        assert not everybody.idle
        return found

    assert asyncio.run(looks(9, 8, 7, 0)) == ["close"]
    assert asyncio.run(looks(9, 8, 8)) == ["abort"]


def test_what_is_no_http_is_told_in_the_shape_of_all_errors():
    with serving() as (_, _url, connect):
        assert error_of(rest_of(connect(b"\x16\x03\x01 hello\r\n\r\n")), 400) == {
            "message": "Invalid HTTP request received.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_http",
        }


# -- encrypted ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A certificate that is its own authority, its key, and another key."""
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
    made = {"certfile": str(files / "cert.pem"), "keyfile": str(files / "cert.key")}
    with serving(**made, header_seconds=0.5) as (_, url, connect):
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=files / "cert.pem")
        answer = httpx.post(url + PATH, json=BODY, verify=context)
        assert answer.json()["choices"][0]["message"]["content"] == "Yes."
        assert rest_of(connect(b"\x16\x03\x01")) == b"", "half a handshake ends, too"
        endpoint = Endpoint(name="tiny", base_url=server_url(url), max_retries=0)
        answering = {"max_new_tokens": 5, "temperature": 0.0, "top_p": 1.0, "top_k": 0}
        answering |= {"repetition_penalty": 1.0, "seed": 0, "system": None}
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(RemoteError, match="CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE"):
            RemoteChat(endpoint, **answering).answer("Hello", write=lambda _: None)
        monkeypatch.setenv("SSL_CERT_FILE", str(files / "cert.pem"))
        text, _ = RemoteChat(endpoint, **answering).answer("Hello", write=lambda _: None)
        assert text == "Yes."


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keyfile": "cert.key"}, "without --ssl-certfile"),
        ({"certfile": "cert.pem"}, "can't be used"),
        ({"certfile": "cert.pem", "keyfile": "other.key"}, "KEY_VALUES_MISMATCH"),
        ({"certfile": "cert.key", "keyfile": "cert.key"}, "can't be used"),
        ({"certfile": "cert.pem", "keyfile": "locked.key"}, "the key is encrypted"),
        ({"certfile": "none.pem", "keyfile": "cert.key"}, "there is no such file"),
    ],
)
def test_a_wrong_certificate_is_told_before_anything_is_loaded(files, options, told):
    words = ["--model-path", str(files)]
    for name, file in options.items():
        words += [f"--ssl-{name}", str(files / file)]
    with pytest.raises(OptionError, match=told):
        parse_serve_args(words)


def test_options_reach_the_server(files):
    words = ["--model-path", str(files), "--ssl-certfile", str(files / "cert.pem")]
    words += ["--ssl-keyfile", str(files / "cert.key"), "--max-connections", "7"]
    words += ["--header-timeout", "2", "--keep-alive-timeout", "3"]
    assert make_http_settings(parse_serve_args(words).run) == HttpSettings(
        certfile=str(files / "cert.pem"),
        keyfile=str(files / "cert.key"),
        max_connections=7,
        header_seconds=2,
        keep_alive_seconds=3,
    )
