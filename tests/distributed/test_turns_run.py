"""Runs with an environment: the same turns and weights in every split, and after a kill."""

import json

import pytest

from tests.helpers.grpo_runs import PARTS, ZBV, assert_same_bytes, run, samples, trained
from tests.helpers.small_run import Job

ENVIRONMENT = """
from register import environment_register


@environment_register("echo")
class Echo:
    def reset(self, sample):
        self.turns = 0
        return []

    def step(self, completion):
        self.turns += 1
        is_done = self.turns > sum(map(ord, completion)) % 3
        return [{"role": "tool", "content": f"={len(completion)}?"}], 0.25, is_done
"""
TURNS = (
    "--environment echo --reward letters,length,environment --rollouts.reward_weights 1,0.1,1 "
    "--rollouts.max_completion_length 24 --max-token-num 96"
).split()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    (folder / "parts.py").write_text(PARTS + ENVIRONMENT)
    made = Job(folder, num_layers=4)
    trained(made, "one", *TURNS, ranks=1)
    return made


def test_turns_and_rewards_are_told(job):
    answers = [
        one for line in samples(job, "one").splitlines() for one in json.loads(line)["answers"]
    ]
    assert len({len(one["turns"]) for one in answers}) > 1
    for one in answers:
        assert one["rewards"]["environment"] == (len(one["turns"]) + 1) // 2 / 4


def test_a_killed_run_of_another_split_takes_the_same_turns(job):
    """Kill it on zbv; the rest runs on two stages of 1f1b."""
    split, ranks = ZBV
    fault = "at=decoding,rank=0,step=2,do=sigkill"
    killed = run(job, "killed", *TURNS, *split, ranks=ranks, chaos=fault, waits=True)
    assert killed.code != 0 and job.checkpoints("killed") == ["step-00000002"]
    trained(job, "killed", *TURNS, "--resume", "auto")
    assert_same_bytes(job, "killed", "one")
