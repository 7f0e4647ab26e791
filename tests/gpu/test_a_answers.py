"""Answers on emulated cards: evaluate.py by both engines, the server, and reports of their ranks.

Ranks are forked, a card each, with gloo for NCCL.
"""

import os
import signal

import httpx
import pytest
import torch.distributed as dist

from tests.helpers.emulated_gpu.cards import Cards
from tests.helpers.emulated_gpu.native import KIND
from tests.helpers.ranks import run_ranks
from tests.helpers.served_model import NUM_TOKENS, ServedModel, wait_for_url
from tests.helpers.small_run import GENERATE, ForkedRun, Job, evaluated

pytestmark = pytest.mark.usefixtures("cards")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"), num_layers=4)


# options of an engine, ranks, cards
ENGINES = {
    "device map of four": ("--engine device_map", 1, 4),
    "replicas of stages": ("--engine pipeline --num-stages 2 --num-replicas 2", 4, 4),
}


def answers(job, name, engine, *, ranks, device=KIND):
    """Row -> answer of evaluate.py."""
    words = (*GENERATE, *engine.split(), "--device", device, "--limit", 4)
    found = evaluated(job, job.folder / name, *words, ranks=ranks)
    return {key: record["prediction"] for key, record in found.items()}


@pytest.fixture(scope="module")
def expected(job):
    return answers(job, "cpu", "--engine device_map", ranks=1, device="cpu")


@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_those_of_a_cpu(job, name, expected, cards, seen):
    engine, ranks, cards.count = ENGINES[name]
    found = answers(job, name, engine, ranks=ranks)
    assert len(found) == 4 and found == expected
    seen.assert_clean(ranks)


def make_group_of_gloo_alone(rank):
    Cards.entered.is_bound = True
    dist.new_group([0, 1], backend="gloo")  # a group of all ranks leaves no rank outside
    with pytest.raises(RuntimeError, match=r"test_a_answers.py:\d+: where a device is bound"):
        dist.new_group([0], backend="gloo")
    return Cards.entered.groups


def test_a_group_that_some_ranks_would_split_and_others_not(cards):
    ours, theirs = run_ranks(make_group_of_gloo_alone, 2)
    assert ours == theirs and [told.partition(" at ")[0] for told in ours] == [
        "[0, 1] by gloo",
        "[0] by gloo",
    ]


def test_a_server_over_two_cards_answers_as_transformers_does(tmp_path, cards, seen):
    cards.count = 2
    model = ServedModel.save(tmp_path / "served", positions=256)
    words = [
        *("serve.py", "--model-path", model.folder, "--device", KIND, "--port", 0),
        *("--num-stages", 2, "--temperature", 0, "--max-new-tokens", NUM_TOKENS),
        *("--num-groups", 1, "--http.shutdown_seconds", 20),
    ]
    run = ForkedRun(list(map(str, words)), ranks=2)
    url = f"{wait_for_url(run)}/v1/chat/completions"
    for question in ("Which digit is this?", "true or false"):
        body = {"model": "tiny", "messages": [{"role": "user", "content": question}]}
        answer = httpx.post(url, json=body, timeout=200).json()
        assert answer["choices"][0]["message"]["content"] == model.answer(question)
    for pid in run.pids.values():
        os.kill(pid, signal.SIGTERM)
    done = run.wait(200)
    assert done.code == 143 and "Traceback" not in done.err, done.err
    seen.assert_clean(2)
