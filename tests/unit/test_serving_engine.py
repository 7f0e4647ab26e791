"""The server in front of the true engine: pictures as in the library, places that come free."""

import base64
import concurrent.futures
import contextlib
import io

import httpx
import pytest
import torch
from PIL import Image

from commands import serve
from commands.decode_run import open_decoding
from parse_args import parse_serve_args
from register import import_shelf
from stageline.data.text.processor import save_processor
from stageline.serving.app import http_server, make_app
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_processor

import_shelf(*serve.SHELF)
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "tiny"
    processor = tiny_processor("internvl")
    sizes = {"vocab_size": len(processor.tokenizer), "max_position_embeddings": 1024}
    whole = tiny_whole("internvl", folder, noise=0.2, **sizes)
    save_processor(processor, folder)
    return folder, whole, processor


@contextlib.contextmanager
def talking(folder, *options, client):
    """Runs the engine in this thread and a client in another; gives what the client returns."""
    words = ["--model-path", str(folder), "--device", "cpu", "--num-stages", "1"]
    words += ["--temperature", "0", "--served-model-name", "tiny", *options]
    arguments = parse_serve_args(words)
    with (
        open_decoding(arguments.run) as decoding,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        settings = serve.make_settings(arguments.run, (), name="tiny")
        service = serve.make_service(arguments, decoding, settings)
        with http_server(make_app(service), "127.0.0.1", 0) as url:
            told = pool.submit(client, url, service)
            told.add_done_callback(lambda _: decoding.engine.stop())
            decoding.engine.run()
            yield told.result(30)


def picture(number: int) -> Image.Image:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 255, (20 + number, 30, 3), generator=generator)
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def part_of(image: Image.Image) -> dict:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def by_the_library(whole, processor, content, images):
    parts = [{"type": "image"} if part["type"] == "image_url" else part for part in content]
    text = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True
    )
    batch = processor(text=[text], images=images or None, return_tensors="pt")
    made = whole.generate(**batch, max_new_tokens=8, do_sample=False)
    length = batch["input_ids"].shape[1]
    return processor.tokenizer.decode(made[0, length:], skip_special_tokens=True), length


def test_pictures_are_answered_as_by_the_library(model):
    folder, whole, processor = model
    text = {"type": "text", "text": "Which digit is this?"}
    first, second = picture(1), picture(2)
    chats = [
        ([text, part_of(first)], [first]),
        ([part_of(second), text, part_of(first)], [second, first]),
        ([text], []),
    ]

    def client(url, _):
        def ask(chat):
            messages = [{"role": "user", "content": chat[0]}]
            body = {"model": "tiny", "messages": messages, "max_tokens": 8}
            return httpx.post(url + PATH, json=body, timeout=60).json()

        with concurrent.futures.ThreadPoolExecutor(3) as pool:  # at the same time
            return list(pool.map(ask, chats))

    with talking(folder, client=client) as answers:
        for (content, images), answer in zip(chats, answers, strict=True):
            wanted, length = by_the_library(whole, processor, content, images)
            assert answer["choices"][0]["message"]["content"] == wanted
            assert answer["usage"]["prompt_tokens"] == length
