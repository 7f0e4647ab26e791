"""Whole runs of train_pp.py and evaluate.py on emulated cards: their numbers, and no race.

scripts/test.sh runs them on two kinds of cards: cuda, and one that torch has no module for.

Ranks are forked, a card each, with gloo for NCCL. This file comes first: torch refuses to fork a
process that has run a backward pass on a card.
"""

import json
import math
import os
import signal

import httpx
import pytest

from stageline.modules import recompute
from tests.helpers.emulated_gpu.native import KIND
from tests.helpers.served_model import NUM_TOKENS, ServedModel, wait_for_url
from tests.helpers.small_run import ForkedRun, Job
from tests.helpers.small_vision_run import VisionJob
from tests.helpers.tiny_datasets import write_lines

pytestmark = pytest.mark.usefixtures("cards")
TWO_STEPS = ("--total-steps", 2, "--save-steps", 0, "--batch-size", 4)
LORA = "--llm-lora-num 1 --lora-rank 4 --frozen-lm-head"
DROPOUT = f"{LORA} --lora-dropout 0.5 --neftune-alpha 5"
STREAMING = "--engine streaming --num-stages 4"
REGISTER = "--pin-model register" if KIND == "cuda" else ""  # it is CUDA's alone
BF16 = "--bf16 --norms-fp32 --upcast-lm-head"
# (options, ranks, cards): the same losses as one stage on the CPU
SAME = {
    "zbv recompute chunk": (
        "--schedule zbv --num-stages 2 --gradient-checkpointing --logits-chunk 5 --save-steps 1 "
        "--eval-samples 4 --timeline-step 1 --num-workers 1",
        1,
        1,
    ),
    "offload operators": (
        "--schedule interleaved_1f1b --num-stages 2 --stages-per-rank 2 --offload-activations "
        "--gradient-checkpointing --checkpoint-mode operators",
        1,
        1,
    ),
    "stages": ("--num-stages 2 --eval-samples 4 --partition measured", 2, 2),
    "shares": ("--num-stages 1 --dp-degree 2 --dp-shard --batch-size 2 --micro-batch-size 1", 2, 2),
    "streaming": (
        f"{STREAMING} --recompute-grain layer --streaming-stages 1 --save-steps 1 "
        "--eval-samples 4 --micro-batch-size 1",
        1,
        4,
    ),
}
# each has the losses of the other: the seeds of dropout hang on no card and no cut
DROPPING = {
    "lora dropout": (f"{DROPOUT} --gradient-checkpointing --schedule zbv --num-stages 2", 1, 1),
    "streaming lora dropout": (f"{STREAMING} {DROPOUT} {REGISTER}", 1, 2),
}
OTHER = {
    "streaming stale": (f"{STREAMING} {BF16} --stale-step", 1, 3),
    "packing": (f"--fp16 --packing --attention eager {LORA} --use-dora --use-rslora", 1, 1),
    "pissa": (f"{BF16} {LORA} --lora-init pissa --new-tokens <a>,<b> --train-new-tokens", 1, 1),
    "dpo": (f"--collate-fn dpo --loss-fn dpo {LORA} --eval-samples 4", 1, 1),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = Job(tmp_path_factory.mktemp("job"), num_layers=4)
    pairs = [
        {"question": f"{i}?", "chosen": "!" * (1 + i % 5), "rejected": "no " * (1 + i % 3)}
        for i in range(30)
    ]
    write_lines(made.folder / "dpo.jsonl", pairs)
    done = made.fork("cpu", *TWO_STEPS, ranks=1)
    assert done.code == 0, done.err
    return made


@pytest.fixture
def seen(cards, tmp_path, monkeypatch):
    """Rank -> what its cards saw, once it has ended."""
    leave = os._exit

    def tell_and_leave(code):
        found = {"races": dict(cards.races), "works": sum(cards.works.values())}
        found["collectives"] = [each.partition(" at ")[0] for each in cards.collectives]
        (tmp_path / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))
        leave(code)

    monkeypatch.setattr(os, "_exit", tell_and_leave)
    monkeypatch.setattr(recompute, "MIN_BYTES", 0)  # these activations are small

    def read():
        return {int(p.stem): json.loads(p.read_text()) for p in sorted(tmp_path.glob("*.json"))}

    return read


def train(job, name, words, *, ranks, cards, num_cards):
    cards.count = num_cards
    rows = job.folder / f"{name}.jsonl"
    options = [*words.split(), *(("--dataset-path", rows) if rows.exists() else ())]
    # long: a machine that runs the whole suite is busy
    done = job.fork(name, *TWO_STEPS, "--device", KIND, *options, ranks=ranks, timeout=200)
    assert done.code == 0, done.out[-2000:] + done.err[-4000:]
    return job.losses(name)


def assert_clean(seen, ranks):
    found = seen()
    assert sorted(found) == list(range(ranks))
    for one in found.values():
        # else one waits in gloo, the other in NCCL; in any order, as saving has a thread
        assert sorted(one["collectives"]) == sorted(found[0]["collectives"])
        assert one["works"] > 100 and not one["races"], "\n".join(one["races"])


def losses_of(job, name, case, cards, seen):
    words, ranks, num_cards = case
    losses = train(
        job, name, f"--num-stages 1 {words}", ranks=ranks, cards=cards, num_cards=num_cards
    )
    assert_clean(seen, ranks)
    return losses


@pytest.mark.parametrize("name", SAME)
def test_a_run_has_the_losses_of_one_stage_on_the_cpu(job, name, cards, seen):
    found = losses_of(job, name, SAME[name], cards, seen)
    assert found == pytest.approx(job.losses("cpu"), rel=1e-5)


def test_dropout_is_the_same_on_one_card_and_streamed_through_two(job, cards, seen):
    found = [losses_of(job, name, case, cards, seen) for name, case in DROPPING.items()]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("name", OTHER)
def test_a_run_keeps_to_its_cards_and_its_order(job, name, cards, seen):
    found = losses_of(job, name, OTHER[name], cards, seen)
    assert len(found) == 2 and all(map(math.isfinite, found.values()))


def test_a_projector_alone_trains_over_two_cards(tmp_path, cards, seen):
    """The last stage trains nothing, and takes part in the norm all the same."""
    job = VisionJob(tmp_path, family="qwen2_5_vl")
    words = "--frozen-vit --frozen-llm --frozen-lm-head --batch-size 4 --micro-batch-size 1"
    losses = train(job, "projector", words, ranks=2, cards=cards, num_cards=2)
    assert len(losses) == 2
    assert_clean(seen, 2)


def test_answers_of_a_device_map_over_two_and_four_cards(job, cards, seen):
    found = []
    for num_cards in (2, 4):
        cards.count = num_cards
        folder = job.folder / f"answers-{num_cards}"
        words = [
            *("evaluate.py", "--engine", "device_map", "--model-path", job.model),
            *("--dataset", "jsonl", "--dataset-path", job.rows, "--dataset.test_size", "1.0"),
            *("--image-token", "none", "--device", KIND, "--max-new-tokens", 6),
            *("--output-dir", folder, "--batch-size", 4, "--limit", 4),
            *"--model generate --metric exact_match --prompt question --prompt-fn fill".split(),
            *("--bootstrap-resamples", 10),
        ]
        done = ForkedRun(list(map(str, words)), ranks=1).wait(200)
        assert done.code == 0, done.out[-2000:] + done.err[-4000:]
        assert_clean(seen, 1)
        lines = (folder / "predictions.jsonl").read_text().splitlines()
        found.append({row["id"]: row["prediction"] for row in map(json.loads, lines)})
    assert len(found[0]) == 4 and found[0] == found[1]


def test_a_server_over_two_cards_answers_as_transformers_does(tmp_path, cards, seen):
    cards.count = 2
    model = ServedModel.save(tmp_path / "served", positions=256)
    words = [
        *("serve.py", "--model-path", model.folder, "--device", KIND, "--port", 0),
        *("--num-stages", 2, "--temperature", 0, "--max-new-tokens", NUM_TOKENS),
        *("--num-groups", 1, "--shutdown-seconds", 20),
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
    assert_clean(seen, 2)
