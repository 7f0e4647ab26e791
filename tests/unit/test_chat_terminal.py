"""The terminal chat: over HTTP, with pictures, its commands and its longer messages."""

import functools
import json
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from options.fields import OptionError
from parse_args import parse_chat_args
from prompt_fn import auto, chat
from register import import_shelf
from stageline.data.rows.converters import make_converter
from stageline.errors import RemoteError, UserError
from stageline.inference.dialogue import Dialogue, LocalModel, read_message
from stageline.inference.remote import Endpoint
from stageline.serving.client import Server, server_url
from tests.helpers.chat_server import ChatServer, images_of, question_of
from tests.helpers.small_run import ForkedRun
from tests.helpers.tiny_models import tiny_config, tiny_processor

pytest.importorskip("openai")
import_shelf("models", "prompt_fn")
ROOT = Path(__file__).resolve().parents[2]
MODELS = [
    {"id": "reader", "object": "model", "created": 0, "owned_by": "us",
     "stageline": {"takes_images": False, "max_length": 99}},
    {"id": "looker", "object": "model", "created": 0, "owned_by": "us"},
]  # fmt: skip
SETTINGS = {
    "max_new_tokens": 9,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "seed": 4,
}


def reply(body, seen):
    question = question_of(body)
    if question == "refuse":
        error = {"message": "the prompt is 900 tokens long", "type": "invalid_request_error"}
        return 400, {"error": error}
    if question == "break":
        return 200, b'data: {"error": {"message": "out of memory"}}\n\n'
    return f"{len(body['messages'])}  words, and  {question[::-1]} "


@pytest.fixture(scope="module")
def server():
    with ChatServer(reply, models=MODELS) as running:
        yield running


def talk(url, name="", write=str, change=dict, **settings):
    endpoint = Endpoint(name=name, base_url=url, api_key_env="NO_SUCH_KEY", max_retries=0)
    return Dialogue(Server(endpoint), write=write, change=change, **{**SETTINGS, **settings})


@pytest.fixture
def remote(server):
    server.bodies.clear()
    return talk(server.url)


@pytest.fixture
def picture(tmp_path):
    Image.new("RGB", (20, 16), "red").save(tmp_path / "my cat.png")
    return tmp_path / "my cat.png"


def test_a_remote_conversation_grows_with_what_was_said(remote, server):
    pieces: list[str] = []
    assert remote.engine.endpoint.name == "reader", "the first that the server names"
    remote.system("Be brief.")
    remote.write = pieces.append
    answer, _ = remote.answer("hello")
    assert answer == "".join(pieces) == "2  words, and  olleh " and len(pieces) > 3
    remote.answer("again")
    assert server.bodies[1] == {
        "model": "reader",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "again"},
        ],
        "max_tokens": 9,
        "temperature": 0.0,
        "stream": True,
    }


def test_sampling_is_sent_where_it_has_an_effect(server, monkeypatch):
    monkeypatch.setenv("NO_SUCH_KEY", "secret")
    remote = talk(server.url, temperature=0.5, top_p=0.9, repetition_penalty=1.1)
    server.bodies.clear()
    remote.answer("hello")
    remote.retry()
    first, second = server.bodies
    assert (first["top_p"], first["top_k"], first["repetition_penalty"]) == (0.9, 50, 1.1)
    assert first.pop("seed") != second.pop("seed") and first == second
    assert server.keys[-1] == "Bearer secret"
    assert len(remote.messages) == 2


@pytest.mark.parametrize(("text", "reason"), [("refuse", "900 tokens"), ("break", "out of mem")])
def test_a_refusal_leaves_the_conversation_as_it_was(remote, text, reason):
    remote.answer("hello")
    kept = list(remote.messages)
    with pytest.raises(RemoteError, match=reason):
        remote.answer(text)
    assert remote.messages == kept
    remote.messages[-2] = {"role": "user", "content": text}
    kept = list(remote.messages)
    with pytest.raises(RemoteError, match=reason):
        remote.retry()
    assert remote.messages == kept, "also when asked again"


def test_ctrl_c_ends_the_work_of_the_server():
    pytest.importorskip("fastapi")
    from tests.helpers.fake_engine import FakeEngine
    from tests.helpers.served import served

    def write(text):
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    written: list[str] = []
    processor = tiny_processor("internvl")
    with (
        FakeEngine(processor, reply="word " * 90, seconds=0.01) as engine,
        served(engine, render=chat, image_token=auto) as running,
    ):
        remote = talk(server_url(running.url), write=write, max_new_tokens=500)
        assert remote.engine.takes_images and remote.engine.endpoint.name == "tiny"
        answer, _ = remote.answer("hello")
        assert answer == "".join(written) and remote.messages[-1]["content"] == answer
        for _ in range(500):
            if engine.cancelled:
                break
            time.sleep(0.01)
        assert len(engine.cancelled) == 1 and engine.stats().running == 0


def test_a_picture_goes_along(server, picture):
    remote = talk(server.url, "looker")
    remote.image(str(picture))
    remote.answer("What is it?")
    sent = images_of(server.bodies[-1])
    assert [image.getpixel((3, 3)) for image in sent] == [(255, 0, 0)]
    remote.answer("And now?")
    assert images_of({"messages": server.bodies[-1]["messages"][:1]}), "it stays in the history"
    assert isinstance(server.bodies[-1]["messages"][-1]["content"], str)
    with pytest.raises(UserError, match="can't be read as a picture"):
        remote.image(str(ROOT / "README.md"))
    with pytest.raises(UserError, match="takes only text"):
        talk(server.url).image(str(picture))


def test_an_answer_about_a_picture_is_the_librarys(picture):
    dtype = torch.bfloat16
    processor = tiny_processor("internvl")
    config = tiny_config(
        "internvl", vocab_size=len(processor.tokenizer), max_position_embeddings=1024
    )
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    engine = LocalModel(model, processor, render=chat, image_token=auto)
    session = Dialogue(engine, write=str, change=dict, **SETTINGS)
    content = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[Image.open(picture)], return_tensors="pt").to(dtype)
    made = model.generate(**inputs, max_new_tokens=9, do_sample=False, pad_token_id=0)
    expected = processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    session.image(str(picture))
    answer, _ = session.answer("Which?")
    assert answer == expected != ""
    assert session.retry() == (answer, 0), "with the picture again"
    session.new()
    assert session.answer("Which?")[0] != answer


def test_commands(remote, server, tmp_path, picture, capsys):
    def change(settings, name, text):
        if name not in settings:
            raise ValueError(f"no setting {name}")
        return {**settings, name: type(settings[name])(text)}

    remote.change, remote.write = change, functools.partial(print, end="")
    file = tmp_path / "talks.jsonl"
    lines = ["/undo", "/retry", "one", "two", "/undo", "three", "/retry", f"/save {file}"]
    for line in [*lines, "/settings max_new_tokens 5", "/settings no 5", "/settings top_p x"]:
        assert remote.respond(line)
    told = capsys.readouterr()
    assert told.err.count("nothing was asked yet") == 2 and "forgot: two" in told.err
    assert "no setting no" in told.err and "max_new_tokens 5" in told.err
    answers = ["1  words, and  eno ", "3  words, and  owt ", "3  words, and  eerht "]
    assert told.out.split("\n")[:-1] == [answers[0], answers[1], answers[2], answers[2]]
    (row,) = map(json.loads, file.read_text().splitlines())
    assert [message["content"] for message in row["messages"]] == [
        *("one", answers[0]),
        *("three", answers[2]),
    ]
    assert make_converter("openai")(row, "row 1")["messages"][-1]["content"] == answers[2]
    assert remote.answering["max_new_tokens"] == 5
    for line in ["/what", "/image x.png", "refuse", "/system Be a cat.", "/help", "four"]:
        assert remote.respond(line)
    told = capsys.readouterr()
    assert "no command /what" in told.err and "takes only text" in told.err
    assert "error[remote]" in told.err and "/save FILE" in told.err
    assert server.bodies[-1]["messages"][0]["content"] == "Be a cat." and told.out.count("\n") == 1
    remote.engine.card = None
    remote.respond(f"/image '{picture}'")
    assert remote.pictures == [str(picture)]
    assert remote.respond("/exit") is False


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("a\nb", ["a", "b"]),
        ("a\\\nb\\\nc\nd", ["a\nb\nc", "d"]),
        ("```py\nx = 1 \\\n\ny\n```\nnext", ["```py\nx = 1 \\\n\ny\n```", "next"]),
        ("```\nopen", ["```\nopen"]),
    ],
)
def test_long_messages(typed, messages):
    lines = iter(typed.split("\n"))

    def read(prompt):
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    found = []
    with pytest.raises(EOFError):
        while True:
            found.append(read_message(read))
    assert found == messages


def test_addresses_and_options(monkeypatch):
    assert server_url("http://a:8000/") == server_url("http://a:8000") == "http://a:8000/v1"
    assert server_url("https://a/api/v3") == "https://a/api/v3"
    with pytest.raises(UserError, match="is not an address"):
        server_url("a:8000")
    with pytest.raises(OptionError, match="exclude each other"):
        parse_chat_args(["--server", "http://a", "--model-path", str(ROOT)])
    with pytest.raises(OptionError, match="requires --server"):
        parse_chat_args(["--server-model", "m"])


def test_through_the_entry_file(server, tmp_path, monkeypatch):
    lines = "one\\\ntwo\n/settings temperature 3\n/settings temperature -1\nthree\nrefuse\n/exit\n"
    words = ["-m", "stageline", "chat", "--server", server.url, "--server-model", "looker"]
    (tmp_path / "lines.txt").write_text(lines)
    with (tmp_path / "lines.txt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        done = ForkedRun(words, ranks=1).wait(100)
    assert done.code == 0, done.err
    assert done.out == "1  words, and  owt\neno \n3  words, and  eerht \n"
    assert f"(looker at {server.url})" in done.err and "out of range" in done.err
    assert server.bodies[-1]["temperature"] == 3 and "900 tokens" in done.err
