"""Pictures of requests: data URLs, their limits, and what is never fetched or opened."""

import base64
import contextlib
import http.server
import io
import socket
import threading
import time

import openai
import pytest
from PIL import Image

from prompt_fn import auto, chat
from stageline.serving import prompts
from stageline.serving.errors import ApiError
from stageline.serving.prompts import FetchError, fetch, is_public, read_pictures
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.served import served
from tests.helpers.tiny_models import tiny_processor

LIMITS = {"max_images": 2, "max_pixels": 1000, "max_bytes": 10_000, "may_fetch": False}


def data_url(size=(20, 30), kind="PNG", colour="red") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture(scope="module")
def server():
    processor = tiny_processor("internvl")
    with (
        FakeEngine(processor) as engine,
        served(engine, render=chat, image_token=auto, max_images=2) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield engine, client


def ask(client, *urls):
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    content = [{"type": "text", "text": "Compare"}, *parts]
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}]
    )


def test_pictures_reach_the_engine(server):
    engine, client = server
    assert ask(client, data_url(), data_url(kind="JPEG", colour="blue")).choices
    prompt = engine.asked[-1].prompt
    red, blue = prompt["pixel_values"].chunk(2)  # some tiles each
    assert red[:, 0].min() > 0.9 > 0 > blue[:, 0].max()
    processor = engine.processor
    token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    assert (prompt["input_ids"] == token_id).sum() > 2
    # what a user writes is no place for a picture
    evil = f"{processor.image_token} here"
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": evil}])
    assert token_id not in engine.asked[-1].prompt["input_ids"]


def test_langchain_sends_pictures(server):
    langchain = pytest.importorskip("langchain_openai")
    engine, client = server
    model = langchain.ChatOpenAI(model="tiny", base_url=str(client.base_url), api_key="none")
    content = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": data_url()}},
    ]
    assert model.invoke([{"role": "user", "content": content}]).content == "Yes, it is."
    assert engine.asked[-1].prompt["pixel_values"][:, 0].min() > 0.9


SECRET = "/etc/passwd"
REFUSED = {
    "file:///etc/passwd": "files are not read",
    SECRET: "files are not read",
    "../../x.png": "files are not read",
    "http://127.0.0.1:1/x.png": "fetches none",
    "https://example.org/x.png": "fetches none",
    "data:image/png;base64,@@@": "no base64",
    "data:image/png;base64,": "no picture",
    "data:text/html;base64,AAAA": "data:image/png",
    "data:image/png,AAAA": "data:image/png",
    "data:image/svg+xml;base64,PHN2Zy8+": "no picture",
    data_url((2000, 2000)): "4000000 pixels; at most 1000000",
    data_url((9000, 1)): "200 to 1",
    data_url()[:-40]: "does not decode",
}


@pytest.mark.parametrize("url", REFUSED, ids=lambda url: url[:30])
def test_bad_pictures_are_refused(server, url):
    engine, client = server
    before = len(engine.asked)
    with pytest.raises(openai.BadRequestError, match=REFUSED[url]) as caught:
        ask(client, url)
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_image")
    assert len(engine.asked) == before


def test_too_many_pictures_and_pictures_of_others_are_refused(server):
    _, client = server
    with pytest.raises(openai.BadRequestError, match="at most 2"):
        ask(client, *[data_url()] * 3)
    message = {"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[message])


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0",
        "100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1",
        "::127.0.0.1", "nonsense",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


def test_addresses_that_are_public():
    assert all(map(is_public, ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"]))


class Canary:
    """A web server on this machine that notes who asks."""

    def __init__(self):
        self.paths = []
        canary = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                canary.paths.append(self.path)
                status, headers, body = canary.answers.get(self.path, (404, {}, b""))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.answers = {}
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def canary():
    made = Canary()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0177.0.0.1", "0x7f.1", "[::ffff:127.0.0.1]"]
)
def test_this_machine_is_never_asked(canary, host, monkeypatch):
    monkeypatch.setattr(prompts, "_PORTS", {"http": canary.port, "https": 443})
    with pytest.raises(ApiError, match="not a public one|not known"):
        read_pictures([f"http://{host}/x.png"], **{**LIMITS, "may_fetch": True})
    assert canary.paths == []


@pytest.mark.parametrize(
    "url",
    ["http://user@example.org/", "http://example.org:22/", "http:///x", "http://a b/", "http://[/"],
)
def test_odd_addresses_are_refused(url):
    with pytest.raises(FetchError):
        fetch(url, max_bytes=10)


@pytest.fixture
def open_canary(canary, monkeypatch):
    """One that may be asked, under a name of its own; others are judged as ever."""
    judged = prompts._judged_address
    monkeypatch.setattr(prompts, "_PORTS", {"http": canary.port, "https": 443})
    monkeypatch.setattr(
        prompts,
        "_judged_address",
        lambda host, port: "127.0.0.1" if host == "pictures.test" else judged(host, port),
    )
    canary.paths.clear()
    return canary


def test_what_is_fetched_has_limits(open_canary):
    picture = base64.b64decode(data_url().partition(",")[2])
    kind = {"Content-Type": "image/png"}
    open_canary.answers = {
        "/good": (200, kind, picture),
        "/moved": (302, {"Location": "/good"}, b""),
        "/large": (200, kind, b"x" * 20_000),
        "/page": (200, {"Content-Type": "text/html"}, b"<p>"),
        "/home": (302, {"Location": f"http://127.0.0.1:{open_canary.port}/secret"}, b""),
        "/file": (302, {"Location": "file:///etc/passwd"}, b""),
        "/loop": (302, {"Location": "/loop"}, b""),
    }
    url = "http://pictures.test"
    for path in ("/good", "/moved"):
        [found] = read_pictures([url + path], **{**LIMITS, "may_fetch": True})
        assert found.size == (20, 30)
    for path, why in {
        "/large": "more than 10000 bytes",
        "/page": "no image",
        "/none": "answered 404",
        "/home": "not a public one",
        "/file": "http",
        "/loop": "more than 3 times",
    }.items():
        with pytest.raises(ApiError, match=why):
            read_pictures([url + path], **{**LIMITS, "may_fetch": True})
    assert "/secret" not in open_canary.paths


@pytest.mark.parametrize("head", ["", "X: ", "\r\n"], ids=["status", "header", "body"])
def test_a_server_that_drips_is_left_when_the_time_is_over(head, monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(prompts, "_PORTS", {"http": listener.getsockname()[1], "https": 443})
    monkeypatch.setattr(prompts, "_judged_address", lambda _host, _port: "127.0.0.1")

    def drip():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            if head:
                connection.sendall(f"HTTP/1.1 200 OK\r\n{head}".encode())
            until = time.monotonic() + 10
            while time.monotonic() < until:
                connection.sendall(b"x")
                time.sleep(0.02)

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    began = time.monotonic()
    with listener, pytest.raises(FetchError, match="too long"):
        fetch("http://pictures.test/x.png", max_bytes=10_000, seconds=0.3)
    assert time.monotonic() - began < 5
    thread.join(15)
    assert not thread.is_alive()
