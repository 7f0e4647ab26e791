"""Small runs whose model answers before each step, and comparisons of two of them."""

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.small_run import saved_tensors

PARTS = '''
"""A reward with a spread over answers of a random model, and a loss that looks at its ratios."""
import os
import time
import torch
from register import loss_fn_register, reward_register
from stageline.modules.policy_loss import (
    IS_COUNTED,
    OLD,
    PolicyOptions,
    learnt_tokens,
    policy_loss,
    token_log_probs,
)
from stageline.progress import place


@reward_register("letters")
def letters(prompts, completions, samples):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


began = []


@reward_register("patient")
def patient(prompts, completions, samples):
    """Judges the second step's answers when the first step is done."""
    began.append(place().step)
    deadline = time.monotonic() + 30
    assert set(began) == {0}, "the second step's are judged before the first one trains"
    while len(began) == 2 and place().step < 1:
        assert time.monotonic() < deadline, "the run waits"
        time.sleep(0.001)
    return letters(prompts, completions, samples)


@reward_register("broken")
def broken(prompts, completions, samples, *, on_rank: int = 0):
    if os.environ["RANK"] == str(on_rank):
        raise KeyError("depth")
    return [0.0] * len(completions)


@loss_fn_register(
    "watched",
    counts={
        "num_tokens": lambda batch: int(learnt_tokens(batch).sum()),
        "num_answers": lambda batch: int(batch[IS_COUNTED].sum()),
    },
    samples_answers=True,
    reads_by_token=True,
)
def watched(
    logits, batch, *, num_targets, num_tokens, num_answers, kl_beta, sampling_temperature
):
    """GRPO, and how far the ratios are from 1."""
    options = PolicyOptions(
        loss_type="gspo", kl_beta=kl_beta, temperature=sampling_temperature, epsilon=0.001
    )
    loss, figures = policy_loss(
        logits, batch, num_tokens=num_tokens, num_answers=num_answers, options=options
    )
    if OLD in batch:
        now = token_log_probs(logits, batch, temperature=sampling_temperature)
        figures["ratio_gap"] = (now - batch[OLD]).abs().max()
    return loss, figures
'''
GRPO = (
    "--collate-fn grpo --reward letters,length --reward.length.longest 8 --reward.length.margin 6 "
    "--rollouts.reward_weights 1,0.1 --rollouts.group_size 4 --batch-size 16 "
    "--rollouts.prompts_together 2 --micro-batch-size 4 "
    "--rollouts.max_completion_length 8 --total-steps 4 --save-steps 2 --learning-rate 3e-3"
).split()
TWICE = "--rollouts.inner_steps 2 --rollouts.sampling_temperature 0.7 --loss-fn watched".split()
LORA = ("--llm-lora-num", 1, "--parts.lm_head.frozen", "--rollouts.kl_beta", 0.1)
# options, ranks
ZBV = (("--schedule", "zbv", "--num-stages", 4), 2)
REPLICAS = ("--dp-degree", 2, "--num-stages", 1, "--batch-size", 8)
AHEAD = ("--rollouts.ahead", 1, *TWICE[2:], *LORA)


def run(job, name, *options, **more):
    words = ("--import", job.folder / "parts.py", *GRPO, *options)
    return job.fork(name, *words, **more)


def trained(job, name, *options, **more):
    """Call `run`; it must not fail."""
    return job.train(name, "--import", job.folder / "parts.py", *GRPO, *options, **more)


def records(job, name, kind="train"):
    return {record["step"]: record for record in job.records(name, kind)}


def samples(job, name):
    return (job.folder / name / "samples.jsonl").read_bytes()


def last_tensors(job, name):
    return saved_tensors(job.folder / name / "checkpoints" / "step-00000004")


def weights(job, name):
    """Without the state of the optimizer, which replicas with shares save in pieces."""
    last = job.folder / name / "checkpoints" / job.checkpoints(name)[-1]
    paths = [path for path in last.rglob("*.safetensors") if path.parent.name != "training_state"]
    return {key: value for path in paths for key, value in load_file(path).items()}


def assert_same_figures(job, name, figures, **within):
    """Check that the figures are those of the run on one rank, step by step."""
    ours = records(job, name)
    for step, record in records(job, "one").items():
        for figure in figures:
            assert ours[step][figure] == pytest.approx(record[figure], **within), figure


def assert_same_bytes(job, name, wanted):
    """Check for the same answers and weights, to the bit."""
    assert samples(job, name) == samples(job, wanted)
    tensors, theirs = last_tensors(job, name), last_tensors(job, wanted)
    assert tensors.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(tensors[key], value), key


def assert_same_but_for_sums(job, name, wanted):
    """Check for the same answers, and for weights within the rounding of another order of sums."""
    assert samples(job, name) == samples(job, wanted)
    ours, theirs = (weights(job, one) for one in (name, wanted))
    assert ours.keys() == theirs.keys() and ours
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-5, msg=key)
