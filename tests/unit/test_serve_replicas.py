"""serve.py with two replicas of a tiny model: answers of one, work for both, one end for all."""

import concurrent.futures
import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from register import import_shelf
from stageline.testing.small_run import ForkedRun
from stageline.testing.tiny_checkpoints import tiny_whole
from stageline.testing.tiny_tokenizers import tiny_tokenizer

import_shelf("prompt_fn")
ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ("Which digit is this?", "true or false", "The cat is left of the dog. yes?", "2 + 2")
NEVER_ENDS = {"2": -100, "4": -100}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = tiny_tokenizer(eos_token="<|im_end|>")
    config = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    whole = tiny_whole("llama", folder, noise=0.2, **config)
    tokenizer.save_pretrained(folder)
    return folder, whole, tokenizer


def by_the_library(whole, tokenizer, question):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    made = whole.generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=[2, 4]
    )
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def start(folder) -> tuple[ForkedRun, str]:
    words = [
        ROOT / "serve.py", "--model-path", folder, "--device", "cpu", "--port", 0,
        "--num-stages", 1, "--num-replicas", 2, "--temperature", 0, "--max-new-tokens", 12,
        "--shutdown-seconds", 20, "--max-tokens-limit", 4000,
    ]  # fmt: skip
    run = ForkedRun([str(word) for word in words], ranks=2)
    until = time.monotonic() + 100
    while run.is_running() and time.monotonic() < until:
        if found := re.search(r"serving \S+ at (\S+)/v1", run._text("out")):
            return run, found[1]
        time.sleep(0.05)
    raise AssertionError(run.wait(1).err)


def chat(question, **more):
    return {"model": "tiny", "messages": [{"role": "user", "content": question}], **more}


def figure(client, name, replica):
    [found] = re.findall(
        rf'^{name}{{replica="{replica}"}} (\S+)', client.get("/metrics").text, re.M
    )
    return float(found)


def test_two_replicas_answer_as_the_library_and_end_in_order(model):
    folder, whole, tokenizer = model
    run, url = start(folder)
    pids = list(run.pids.values())
    wanted = [by_the_library(whole, tokenizer, question) for question in QUESTIONS]
    with httpx.Client(base_url=url, timeout=60) as client:

        def answer(question):
            body = chat(question, logprobs=True, top_logprobs=2)
            [choice] = client.post("/v1/chat/completions", json=body).json()["choices"]
            return choice["message"]["content"], choice["logprobs"]["content"]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(answer, QUESTIONS * 4))
        assert [text for text, _ in found] == wanted * 4
        assert all(len(logprobs[0]["top_logprobs"]) == 2 for _, logprobs in found)
        given = [figure(client, "stageline_replica_requests_total", i) for i in range(2)]
        assert sum(given) == 16 and min(given) >= 4
        assert min(figure(client, "stageline_replica_healthy", i) for i in range(2)) == 1
        until = time.monotonic() + 20  # figures are those of a moment ago
        while not all(
            figure(client, "stageline_replica_completion_tokens_total", i) > 12 for i in range(2)
        ):
            assert time.monotonic() < until
        assert client.post("/v1/chat/completions", json=chat("x " * 5000)).status_code == 400
        long = chat("go on", max_tokens=150, logit_bias=NEVER_ENDS, stream=True)
        with (
            client.stream("POST", "/v1/chat/completions", json=long) as one,
            client.stream("POST", "/v1/chat/completions", json=long) as other,
        ):
            lines = [one.iter_lines(), other.iter_lines()]
            assert all(next(of_one).startswith("data: ") for of_one in lines)
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            for of_one in lines:
                *_, last = (line for line in of_one if line)
                assert last == "data: [DONE]", "what is under way finishes"
    done = run.wait(60)
    assert done.code == 143 and run.codes == [143, 143], done.err
    assert "Traceback" not in done.err and "error" not in done.err


def test_without_one_replica_all_end_and_the_report_names_it(model):
    """No launcher is there, which would name a killed rank itself."""
    run, url = start(model[0])
    endless = chat("go on", max_tokens=3900, logit_bias=NEVER_ENDS, stream=True)
    with (
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=endless) as one,
        client.stream("POST", "/v1/chat/completions", json=endless) as other,
    ):
        lines = [one.iter_lines(), other.iter_lines()]
        assert all(next(of_one).startswith("data: ") for of_one in lines)
        os.kill(run.pids[1], signal.SIGKILL)
        for of_one in lines:
            assert '"error"' in "".join(of_one), "requests in flight are told"
    done = run.wait(60)
    assert sorted(run.codes) == [-9, 9]
    assert "connection closed by replica 1 (rank 1)" in done.err.splitlines()[-1], done.err
