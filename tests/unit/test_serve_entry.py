"""serve.py from its options: two stages answer as plain transformers does, and stop cleanly."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from commands import serve
from parse_args import parse_serve_args
from register import import_shelf
from stageline.serving.settings import ServerSettings, is_local, read_api_keys
from tests.helpers.served_model import NUM_TOKENS, ServedModel, wait_for_url
from tests.helpers.small_run import ForkedRun

import_shelf("prompt_fn")
ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-of-this-test"
QUESTIONS = ("Which digit is this?", "true or false", "The cat is left of the dog. yes?")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ServedModel.save(tmp_path_factory.mktemp("model"), positions=256)


def test_a_server_answers_and_ends_in_order(model, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text(f"\n{KEY}\n")
    words = [
        ROOT / "serve.py", "--model-path", model.folder, "--device", "cpu", "--port", 0,
        "--num-stages", 2, "--temperature", 0, "--max-new-tokens", NUM_TOKENS,
        "--num-groups", 1, "--http.api_key_file", keys, "--http.shutdown_seconds", 20,
    ]  # fmt: skip
    run = ForkedRun([str(word) for word in words], ranks=2)
    url = f"{wait_for_url(run)}/v1"
    bodies = [
        {"model": "tiny", "messages": [{"role": "user", "content": text}]} for text in QUESTIONS
    ]
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        for question, body in zip(QUESTIONS, bodies, strict=True):
            wanted = model.answer(question)
            answer = client.post(f"{url}/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == wanted != ""
            streamed = client.post(f"{url}/chat/completions", json={**body, "stream": True})
            events = [json.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
            parts = [event["choices"][0]["delta"].get("content", "") for event in events]
            assert "".join(parts) == wanted
        assert httpx.post(f"{url}/chat/completions", json=body).status_code == 401
        long = {**body, "max_tokens": 150, "logit_bias": {"2": -100, "4": -100}}
        with client.stream("POST", f"{url}/chat/completions", json={**long, "stream": True}) as one:
            lines = one.iter_lines()
            assert next(lines).startswith("data: ")
            for pid in run.pids.values():
                os.kill(pid, signal.SIGTERM)
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]", "what is under way finishes"
    done = run.wait(60)
    assert done.code == 143, done.err
    assert "Traceback" not in done.err
    assert "answers under way may finish" in done.err and "step" not in done.err


def test_a_killed_stage_ends_what_is_under_way_with_an_error(model):
    words = [
        ROOT / "serve.py", "--model-path", model.folder, "--device", "cpu", "--port", 0,
        "--num-stages", 2, "--num-groups", 1,
    ]  # fmt: skip
    run = ForkedRun([str(word) for word in words], ranks=2)
    url = f"{wait_for_url(run)}/v1/chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    body |= {"max_tokens": 200, "logit_bias": {"2": -100, "4": -100}}
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert "error" not in next(lines)
        os.kill(run.pids[1], signal.SIGKILL)
        *_, error, last = lines
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_error"
    assert last == "data: [DONE]"
    assert run.wait(60).code != 0


def test_options_reach_the_server(tmp_path):
    words = (
        "--limits.max_queue 3 --limits.max_body_mib 0.5 --limits.max_tokens 99 --limits.max_n 2 "
        "--limits.max_images 1 "
        "--limits.request_timeout 7 --http.read_timeout 5 --max-new-tokens 11 --temperature 0.5 "
        "--http.cors_origins [https://a.example]"
    ).split()
    run = parse_serve_args(["--model-path", str(tmp_path), *words]).run
    settings = serve.make_settings(run, (KEY,), name="folder")
    assert settings == ServerSettings(
        model_name="folder",
        api_keys=(KEY,),
        max_queue=3,
        max_body_mib=0.5,
        max_tokens=99,
        max_n=2,
        max_images=1,
        request_timeout=7,
        read_timeout=5,
        default_max_tokens=11,
        default_temperature=0.5,
        cors_origins=("https://a.example",),
    )
    assert serve.make_settings(run, (), name="folder").hosts[:2] == ("localhost", "127.0.0.1")
    anyone = dataclasses.replace(run, host="0.0.0.0")
    assert serve.make_settings(anyone, (), name="folder").hosts == ("*",)
    assert all(map(is_local, ("127.0.0.1", "localhost", "::1")))
    assert not any(map(is_local, ("0.0.0.0", "::", "example.org")))
    named = parse_serve_args(["--model-path", str(tmp_path), "--served-model-name", "a/b"]).run
    assert serve.make_settings(named, (), name="folder").model_name == "a/b"


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("first-long-key\n\nsecond-long-key\n")
    words = [
        "--model-path",
        str(tmp_path),
        "--http.api_key_file",
        str(file),
        "--api-key-env",
        "MY_KEY",
    ]
    run = parse_serve_args(words).run
    given = run.api_key_env, run.http.api_key_file
    with pytest.raises(ValueError, match="--api-key-env MY_KEY holds no key"):
        read_api_keys(*given)
    monkeypatch.setenv("MY_KEY", "third-long-key")
    assert read_api_keys(*given) == (
        "third-long-key",
        "first-long-key",
        "second-long-key",
    )
    for bad in ("short", "with a space in it", "münchen-münchen"):
        monkeypatch.setenv("MY_KEY", bad)
        with pytest.raises(ValueError, match="without spaces") as caught:
            read_api_keys(*given)
        assert bad not in str(caught.value)
