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
from stageline.testing.served_model import NUM_TOKENS, ServedModel, wait_for_url
from stageline.testing.small_run import ForkedRun

import_shelf("prompt_fn")
ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ("Which digit is this?", "true or false", "The cat is left of the dog. yes?", "2 + 2")
NEVER_ENDS = {"2": -100, "4": -100}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ServedModel.save(tmp_path_factory.mktemp("model"), positions=4096)


def start(folder) -> tuple[ForkedRun, str]:
    words = [
        ROOT / "serve.py", "--model-path", folder, "--device", "cpu", "--port", 0,
        "--num-stages", 1, "--num-replicas", 2, "--temperature", 0, "--max-new-tokens", NUM_TOKENS,
        "--shutdown-seconds", 20, "--max-tokens-limit", 4000,
    ]  # fmt: skip
    run = ForkedRun([str(word) for word in words], ranks=2)
    return run, wait_for_url(run)


def chat(question, **more):
    return {"model": "tiny", "messages": [{"role": "user", "content": question}], **more}


def figure(client, name, replica):
    [found] = re.findall(
        rf'^{name}{{replica="{replica}"}} (\S+)', client.get("/metrics").text, re.M
    )
    return float(found)


def test_two_replicas_answer_as_the_library_and_end_in_order(model):
    run, url = start(model.folder)
    pids = list(run.pids.values())
    wanted = [model.answer(question) for question in QUESTIONS]
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
        name = "stageline_replica_completion_tokens_total"
        while min(figure(client, name, i) for i in range(2)) <= NUM_TOKENS:
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
    run, url = start(model.folder)
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
