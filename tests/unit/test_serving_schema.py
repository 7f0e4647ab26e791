"""The server against its own OpenAPI document: what that allows is answered, the rest refused."""

import pytest

schemathesis = pytest.importorskip("schemathesis")

import hypothesis  # noqa: E402
from schemathesis.config import SchemathesisConfig  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402

from prompt_fn import auto, chat  # noqa: E402
from tests.helpers.chat_templates import format_tokenizer  # noqa: E402
from tests.helpers.fake_engine import FakeEngine  # noqa: E402
from tests.helpers.served import served  # noqa: E402

KEY = "key-of-the-test"
# values that a schema can't tell: a picture that is none, a prompt that is too long ...
EXPECTED = {"checks": {"positive_data_acceptance": {"expected-statuses": [200, 400, 404, 429]}}}


@pytest.fixture(scope="module")
def document():
    tokenizer = format_tokenizer("qwen")
    with (
        FakeEngine(tokenizer) as engine,
        served(engine, render=chat, image_token=auto, api_keys=(KEY,)) as server,
    ):
        yield schemathesis.openapi.from_url(
            f"{server.url}/openapi.json",
            headers={"Authorization": f"Bearer {KEY}"},
            config=SchemathesisConfig.from_dict(EXPECTED),
        )


@schemathesis.check
def refused_for_a_reason(ctx, response, case):
    """What the document allows is not refused as if it did not."""
    if case.meta is not None and case.meta.generation.mode.is_positive:
        if response.status_code == 400:
            code = response.json()["error"]["code"]
            assert code not in ("invalid_request", "invalid_json"), response.text


QUICK = hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]


def test_these_are_all_routes(document):
    found = [operation.ok() for operation in document.get_all_operations()]
    assert {(one.method.upper(), one.path) for one in found} == set(ROUTES)


CASES = [
    *(("positive", *route) for route in ROUTES),
    # of the other routes nothing can be wrong
    *(("negative", *route) for route in ROUTES[:4] + ROUTES[5:6]),
]


@pytest.mark.parametrize(("mode", "method", "path"), CASES, ids=lambda word: word)
def test_the_server_keeps_to_its_document(document, mode, method, path):
    strategy = document[path][method].as_strategy(generation_mode=GenerationMode(mode))

    @QUICK
    @hypothesis.given(case=strategy)
    def check(case):
        case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"})

    check()
