"""Requests that must not stop the server: clients that leave, limits, bad bodies, keys, a stop."""

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.requests import Request

from commands.serve import LOCAL_HOSTS
from prompt_fn import auto, chat
from stageline.errors import UserError
from stageline.serving import gate
from stageline.serving.app import bind, make_app, serve_until
from stageline.serving.errors import ApiError
from stageline.serving.settings import ServerSettings
from tests.helpers.chat_templates import format_tokenizer
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.served import served

TOKENIZER = format_tokenizer("qwen")
PATH = "/v1/chat/completions"
LONG = "word " * 500
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900}
JSON = {"Content-Type": "application/json"}


@contextlib.contextmanager
def serving(*, reply="Yes.", seconds=0.002, max_running=2, **settings):
    with (
        FakeEngine(TOKENIZER, reply=reply, seconds=seconds, max_running=max_running) as engine,
        served(engine, render=chat, image_token=auto, **settings) as running,
        httpx.Client(base_url=running.url, timeout=20) as client,
    ):
        yield engine, running, client


def wait_until(is_so, seconds=5.0):
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it did not come so far"
        time.sleep(0.005)


def raw(url: str, head: str, body: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=10)
    connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    return connection


def raw_post(url: str, body: dict) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\nHost: x\nContent-Type: application/json\n"
    return raw(url, f"{head}Content-Length: {len(content)}", content)


def told(response: httpx.Response, status: int) -> dict:
    """Return the error of a response in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_leaves_frees_the_place(is_stream):
    with serving(reply=LONG, max_running=1) as (engine, running, client):
        first = raw_post(running.url, {**BODY, "stream": is_stream})
        wait_until(lambda: engine.stats().running == 1)
        second = raw_post(running.url, {**BODY, "stream": is_stream, "n": 2})
        wait_until(lambda: engine.stats().queued == 2)
        second.close()  # while it waits
        wait_until(lambda: engine.stats().queued == 0)
        assert engine.stats().running == 1
        if is_stream:
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
        first.close()
        wait_until(lambda: running.service.queue.num_places == 0)
        assert len(engine.cancelled) == 3
        engine.reply = lambda _: "Well."
        answer = client.post(PATH, json=BODY).json()
        assert answer["choices"][0]["message"]["content"] == "Well."
        assert 'status="499"' in client.get("/metrics").text


def test_more_than_the_queue_holds_is_refused_and_the_rest_answered():
    with serving(reply="a b c", seconds=0.05, max_queue=3) as (engine, running, client):
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _: client.post(PATH, json=BODY), range(12)))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 0 < len(refused) <= 7
        for answer in refused:
            assert told(answer, 429)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        assert engine.most_at_once == 2 and len(engine.asked) == 12 - len(refused)
        too_many = client.post(PATH, json={**BODY, "n": 6})
        assert "at most 5" in told(too_many, 400)["message"]
        assert running.service.queue.num_places == 0


def test_a_request_ends_when_its_time_is_over():
    with serving(reply=LONG, max_running=1, request_timeout=0.3) as (engine, running, client):
        answer = client.post(PATH, json=BODY)
        assert told(answer, 504)["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"
        streamed = client.post(PATH, json={**BODY, "stream": True})
        assert streamed.status_code == 200
        *_, last, end, _ = streamed.text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert end == "data: [DONE]"
        wait_until(lambda: running.service.queue.num_places == 0)
        assert len(engine.cancelled) == 2


def test_little_is_kept_of_a_body_that_is_too_large(monkeypatch):
    monkeypatch.setattr(gate, "MAX_DRAINED_BYTES", 20)
    read = []

    async def receive():
        """Pieces of four bytes, for ever."""
        read.append(4)
        return {"type": "http.request", "body": b"abcd", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    settings = ServerSettings("tiny", max_body_mib=10 / 2**20)
    with pytest.raises(ApiError) as caught:
        asyncio.run(gate.Gate(None, settings=settings, metrics=None)._read_body(request))
    assert caught.value.status == 413 and sum(read) == 32


def called(arguments):
    """Return a request with a call of the assistant's in its messages."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    asked, said = {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "y"}
    return json.dumps({"model": "tiny", "messages": [asked, said, result]}).encode()


BAD = {
    "deep": b'{"a":' * 100_000,
    "no json": b"{",
    "not UTF-8": b'{"model": "\xff"}',
    "NaN": b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "huge integer": b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"n":%s}'
    % (b"9" * 5000),
    "surrogate": b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    "surrogate in a call": called(r'{"a": "\ud800"}'),
    "true for a number": b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"n":true}',
    "many messages": json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}] * 100_000}
    ).encode(),
}


def test_bad_bodies_are_the_clients_fault():
    with serving() as (_, _running, client):
        for name, content in BAD.items():
            answer = client.post(PATH, content=content, headers=JSON)
            assert answer.status_code == 400, (name, answer.text)
            told(answer, 400)
        form = {"Content-Type": "text/plain"}
        told(client.post(PATH, content=json.dumps(BODY), headers=form), 415)
        told(client.post("/v1/chat", json=BODY), 404)
        assert client.get(PATH).headers["allow"] == "POST"
        told(client.get(PATH), 405)
        told(client.post(PATH, json={**BODY, "model": "other"}), 404)
        assert client.post(PATH, json=BODY).status_code == 200
        called_well = called(r'{"a": "\ud83d\ude00"}')
        assert client.post(PATH, content=called_well, headers=JSON).status_code == 200


def test_a_server_without_a_key_answers_names_of_this_machine_alone():
    with serving(hosts=LOCAL_HOSTS) as (_, running, client):
        port = running.url.rpartition(":")[2]
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:80", "LOCALHOST"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "", "[::1"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 400, host
    # a page elsewhere sends JSON only after the browser asked whether it may
    asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    with serving() as (_, _, client):
        assert client.options(PATH, headers=asks).status_code == 405
        told(
            client.post(PATH, content=json.dumps(BODY), headers={"Content-Type": "text/plain"}), 415
        )


def test_keys_are_asked_of_everything_but_health():
    keys = ("first-key", "second-key")
    with serving(api_keys=keys) as (_, running, client):
        paths = [PATH, "/v1/completions", "/v1/models", "/tokenize", "/detokenize"]
        paths += ["/metrics", "/openapi.json", "/nothing"]
        for path in paths:
            # wrong keys with a right beginning, or a right key with something behind it, too
            near = ("Bearer first-ke", "Bearer first-keY", "Bearer first-key2", "Bearer first-key,")
            for value in (None, "Bearer wrong", "first-key", "Bearer", "Basic first-key", *near):
                headers = {"Authorization": value} if value else {}
                answer = client.request("POST" if value else "GET", path, headers=headers)
                assert told(answer, 401)["code"] == "invalid_api_key"
        assert client.get("/health").status_code == 200
        for key in keys:
            good = {"Authorization": f"Bearer {key}"}
            assert client.post(PATH, json=BODY, headers=good).status_code == 200
        assert PATH in client.get("/openapi.json", headers=good).json()["paths"]
        assert "first-key" not in repr(running.service.settings)


def test_pages_elsewhere_may_ask_only_where_that_was_said():
    origin = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    with serving(api_keys=("k",)) as (_, _running, client):
        answer = client.options(PATH, headers=origin)
        assert "access-control-allow-origin" not in answer.headers
        assert client.get("/docs").status_code == 401
    with serving(api_keys=("k",), cors_origins=("http://page.example",)) as (_, _r, client):
        answer = client.options(PATH, headers=origin)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        refused = client.post(PATH, json=BODY, headers={"Origin": "http://page.example"})
        assert refused.headers["access-control-allow-origin"] == "http://page.example"


def test_health_and_figures():
    with serving() as (engine, running, client):
        assert client.get("/health").json() == {"status": "ok", "running": 0, "queued": 0}
        client.post(PATH, json=BODY)
        client.get("/made/up/by/a/client")
        figures = client.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in figures.splitlines() if line[0] != "#")
        assert lines[f'stageline_requests_total{{route="{PATH}",status="200"}}'] == "1.0"
        assert lines['stageline_requests_total{route="other",status="404"}'] == "1.0"
        assert lines['stageline_answers_total{reason="stop"}'] == "1.0"
        assert lines["stageline_first_token_seconds_count"] == "1.0"
        assert float(lines["stageline_completion_tokens_total"]) > 1
        assert lines["stageline_engine_max_running"] == "2.0"
        engine.is_healthy = False
        assert told(client.get("/health"), 503)["code"] == "unhealthy"
        assert told(client.post(PATH, json=BODY), 503)["code"] == "unhealthy"
        assert client.get("/metrics").status_code == 200


def test_a_stop_lets_answers_finish_and_cancels_what_takes_too_long():
    for reply, shutdown, reason in (("a b c d", 10, "stop"), (LONG * 9, 0.2, None)):
        engine = FakeEngine(TOKENIZER, reply=reply, seconds=0.02, max_running=1)
        asked, lines, answers = threading.Event(), [], []
        with served(engine, render=chat, image_token=auto) as made:
            service = made.service
        thread = threading.Thread(
            target=serve_until,
            args=(service, make_app(service)),
            kwargs={
                "host": "127.0.0.1", "port": 0, "should_stop": asked.is_set,
                "shutdown_seconds": shutdown, "tell": lines.append,
            },
        )  # fmt: skip
        thread.start()
        wait_until(lambda lines=lines: lines)
        url = lines[0].split(" at ")[1].removesuffix("/v1")
        asker = threading.Thread(
            target=lambda url=url, answers=answers: answers.append(
                httpx.post(url + PATH, json=BODY, timeout=20)
            )
        )
        asker.start()
        wait_until(lambda engine=engine: engine.stats().running == 1)
        asked.set()
        wait_until(lambda service=service: service.queue.is_closed)
        with contextlib.suppress(httpx.ConnectError):
            assert told(httpx.post(url + PATH, json=BODY), 503)["code"] == "shutting_down"
        asker.join(20)
        thread.join(20)
        assert not thread.is_alive()
        if reason:
            assert answers[0].json()["choices"][0]["finish_reason"] == reason
        else:
            assert told(answers[0], 503)["code"] == "cancelled"


def test_a_port_that_is_taken_is_told():
    with bind("127.0.0.1", 0) as taken:
        with pytest.raises(UserError, match="can't be listened at"):
            bind("127.0.0.1", taken.getsockname()[1])
