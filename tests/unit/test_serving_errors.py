"""Every status the server can give, as the error classes of OpenAI's own client have it."""

import contextlib
import time

import httpx
import openai
import pytest

from prompt_fn import auto, chat
from stageline.errors import MemoryFull, UserError
from tests.helpers.chat_templates import format_tokenizer
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.served import served

KEY = "key-of-the-test"
REPLIES = {
    "break": RuntimeError("at /root/secret"),
    "fill": MemoryFull("cuda"),
    "refuse": UserError("the prompt does not fit"),
    "wait": "a " * 500,
}


def reply(request):
    text = TOKENIZER.decode(request.prompt["input_ids"][0])
    return next((answer for word, answer in REPLIES.items() if word in text), "Yes.")


TOKENIZER = format_tokenizer("qwen")


@pytest.fixture(scope="module")
def server():
    limits = {"max_body_mib": 20_000 / 2**20, "read_timeout": 0.1, "request_timeout": 0.5}
    with (
        FakeEngine(TOKENIZER, reply=reply, seconds=0.005, max_running=1) as engine,
        served(
            engine, render=chat, image_token=auto, api_keys=(KEY,), max_queue=0, **limits
        ) as running,
    ):
        yield running


class SlowBody(httpx.HTTPTransport):
    """Sends a body later than the server waits for it."""

    def handle_request(self, request):
        body = request.read()

        def pieces():
            yield body[:1]
            time.sleep(0.3)
            yield body[1:]

        headers = dict(request.headers)
        slow = httpx.Request(request.method, request.url, headers=headers, content=pieces())
        return super().handle_request(slow)


def ask(client, text="Hello", **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, **options})


@contextlib.contextmanager
def set_to(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


OTHER, SERVER = openai.APIStatusError, openai.InternalServerError
WRONG = "invalid_request_error"
# how to ask -> class, status, type, param, code
CASES = {
    "field": (openai.BadRequestError, 400, WRONG, "temperature", "invalid_request"),
    "value": (openai.BadRequestError, 400, WRONG, "n", "invalid_value"),
    "length": (openai.BadRequestError, 400, WRONG, "max_tokens", "context_length_exceeded"),
    "echo": (openai.BadRequestError, 400, WRONG, "max_tokens", "invalid_value"),
    "refuse": (openai.BadRequestError, 400, WRONG, None, "invalid_value"),
    "key": (openai.AuthenticationError, 401, "authentication_error", None, "invalid_api_key"),
    "model": (openai.NotFoundError, 404, "not_found_error", "model", "model_not_found"),
    "address": (openai.NotFoundError, 404, "not_found_error", None, "unknown_url"),
    "method": (OTHER, 405, WRONG, None, "method_not_allowed"),
    "slow body": (OTHER, 408, WRONG, None, "body_timeout"),
    "large body": (OTHER, 413, WRONG, None, "body_too_large"),
    "kind": (OTHER, 415, WRONG, None, "unsupported_media_type"),
    "queue": (openai.RateLimitError, 429, "rate_limit_error", None, "queue_full"),
    "break": (SERVER, 500, "server_error", None, "engine_error"),
    "fill": (SERVER, 503, "server_error", None, "overloaded"),
    "ill": (SERVER, 503, "server_error", None, "unhealthy"),
    "ending": (SERVER, 503, "server_error", None, "shutting_down"),
    "wait": (SERVER, 504, "server_error", None, "timeout"),
}


def wait_for_the_test_before(queue):
    until = time.monotonic() + 10
    while queue.num_places and time.monotonic() < until:
        time.sleep(0.005)


def provoke(way, client, server):
    queue, engine = server.service.queue, server.service.engine
    wait_for_the_test_before(queue)
    if way in REPLIES:
        return ask(client, way)
    options = {
        "field": {"temperature": 3},
        "value": {"n": 99},
        "length": {"max_tokens": 2047},
        "model": {"model": "other"},
        "large body": {"user": "x" * 30_000},
        "kind": {"extra_headers": {"Content-Type": "text/plain"}},
    }
    if way in options:
        return ask(client, **options[way])
    if way == "echo":
        return client.completions.create(model="tiny", prompt="a", max_tokens=0)
    if way == "key":
        return ask(client.with_options(api_key="another-key"))
    if way == "address":
        return client.post("/nothing", cast_to=object)
    if way == "method":
        return client.get("/chat/completions", cast_to=object)
    if way == "slow body":
        return ask(client.with_options(http_client=httpx.Client(transport=SlowBody())))
    changed = {
        "queue": (queue, "num_places", 99),
        "ill": (engine, "is_healthy", False),
        "ending": (queue, "is_closed", True),
    }
    with set_to(*changed[way]):
        return ask(client)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("way", CASES)
def test_what_the_client_is_told(client, server, way):
    kind, status, *words = CASES[way]
    with pytest.raises(openai.APIStatusError) as caught:
        provoke(way, client, server)
    error = caught.value
    assert type(error) is kind and error.status_code == status, error
    assert [error.type, error.param, error.code] == words
    assert error.body["message"] in error.message and "/root" not in error.message
    assert ("retry-after" in error.response.headers) == (status in (429, 503))


@pytest.mark.parametrize("way", ["wait", "break"])
def test_what_a_stream_ends_with(client, server, way):
    """An error before the first word has a status of its own; later it is an event."""
    wait_for_the_test_before(server.service.queue)
    with pytest.raises(openai.APIError) as caught:
        with ask(client, way, stream=True) as chunks:
            assert next(iter(chunks)).choices and way == "wait"
            list(chunks)
    _, status, *words = CASES[way]
    error = caught.value
    assert [error.type, error.param, error.code] == words
    assert isinstance(error, openai.APIStatusError) == (way == "break")
