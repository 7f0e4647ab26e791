"""Pictures of requests: data URLs, their limits, and what is never fetched or opened."""

import base64
import io

import openai
import pytest
from PIL import Image

from prompt_fn import auto, chat
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.served import served
from tests.helpers.tiny_models import tiny_processor


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
    # the image token in a user's text does not become a placeholder
    evil = f"{processor.image_token} here"
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": evil}])
    assert token_id not in engine.asked[-1].prompt["input_ids"]


REFUSED = {
    "file:///etc/passwd": "files are not read",
    "https://example.org/x.png": "fetches none. Send a data URL .* or upload",
    "data:image/png;base64,@@@": "no base64",
    "data:image/png;base64,": "no picture",
    "data:text/html;base64,AAAA": "data:image/png",
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
