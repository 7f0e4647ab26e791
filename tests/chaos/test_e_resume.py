"""Resuming is exact: the same losses, weights, optimizer state and samples as without a stop."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stageline.checkpoint.optimizer_state import SavedState
from tests.helpers.small_run import Job, assert_same_tensors, saved_tensors

STEPS = 6  # epochs end at 4 and 8
SHORT = ("--total-steps", STEPS)
KILL = "at=step,step={},do=sigkill"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"), num_layers=4)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a job of half the size for runs of at most two stages."""
    return Job(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def straight(job):
    """Return a run without a stop, on one stage, with a checkpoint after each step."""
    job.train("straight", *SHORT, "--save-steps", 1, ranks=1)
    return job.folder / "straight" / "checkpoints"


def last(job, name, step=STEPS):
    return job.folder / name / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize("step", [3, 4, 5])
def test_e01_e03_resumed_at_a_step(step, job, straight):
    """Resume in an epoch, at its end and after it (E3), with other intervals (E8)."""
    name = f"from-{step}"
    intervals = ("--eval-samples", 4, "--eval-steps", 3, "--save-steps", 6)
    job.train(name, *SHORT, *intervals, "--resume", straight / f"step-{step:08d}", ranks=1)
    expected = job.losses("straight")
    assert job.losses(name) == {k: v for k, v in expected.items() if k > step}
    assert_same_tensors(last(job, name), last(job, "straight"))


OPTIONS = {
    "e04_data_workers_e13_bf16_masters": ("--num-workers", 2, "--packing", "--bf16"),
    "e05_e06_accumulation_warm_up_decay_and_muon": (
        *("--accumulate-steps", 2, "--batch-size", 4, "--optimizer", "muon", "--sync-save"),
        *("--warmup-steps", 3, "--weight-decay", 0.3, "--max-grad-norm", 0.5),
        "--parts.lm_head.frozen",
    ),
    "e07_dropout_and_adafactor": (
        *("--llm-lora-num", 1, "--lora.dropout", 0.3, "--gradient-checkpointing"),
        *("--optimizer", "adafactor"),
    ),
    "e13_fp16_scale_and_adamw_8bit": ("--fp16", "--optimizer", "adamw_8bit"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_resumed_with_options(case, small):
    """Resume from step 2, to the same state as without a stop."""
    options = (*SHORT, *OPTIONS[case])
    small.train(case, *options, ranks=1)
    rest = small.resume(case, *options, step=2, ranks=1)
    assert small.losses(rest).items() <= small.losses(case).items()
    assert_same_tensors(last(small, rest), last(small, case))
    numbers = [SavedState(last(small, name)).facts["numbers"] for name in (rest, case)]
    assert numbers[0] == numbers[1]


STATE_OF_A_MODULE = """super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(()))"""


@pytest.mark.parametrize(("keeps", "ranks"), [("number", (2, 1)), ("tensor", (1, 2))])
def test_a_loss_with_a_state_goes_on_on_other_stages(small, keeps, ranks):
    """Run the loss of the guide, and one that keeps a tensor; without the state losses differ."""
    guide = (Path(__file__).parents[2] / "docs" / "add_a_part.md").read_text(encoding="utf-8")
    [code] = [
        one for one in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "HardTok" in one
    ]
    code = "import torch\nfrom register import loss_fn_register\n\n" + code
    if keeps == "tensor":
        code = code.replace("class HardTokens", "class HardTokens(torch.nn.Module)")
        code = code.replace("self.momentum, self.mean = momentum, 0.0", STATE_OF_A_MODULE)
        code = code.replace("def __call__", "def forward").partition("    def state_dict")[0]
    part = small.folder / f"state_{keeps}.py"
    part.write_text(code)
    options = ("--import", part, "--loss-fn", "hard_tokens", "--total-steps", 4)
    small.train(keeps, *options, ranks=ranks[0])
    rest = small.resume(keeps, *options, step=2, ranks=ranks[1])
    assert small.losses(rest).items() <= small.losses(keeps).items()
    states = [SavedState(last(small, name, 4)).facts["loss"] for name in (rest, keeps)]
    assert states[0] == states[1] and states[0]["mean"] > 0.1


RECORDING = """
import json, os
from register import dataset_register

class Recorded:
    def __init__(self, path, split):
        with open(path) as file:
            self.rows = [json.loads(line) for line in file]
        self.path = path
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        with open(os.environ["RECORD"], "a") as file:
            file.write(self.rows[index]["id"] + "\\n")
        return [], self.rows[index]

@dataset_register("recorded")
def recorded(dataset_path, split):
    return Recorded(dataset_path, split)
"""


def test_e09_each_sample_once_in_the_same_order(small, monkeypatch):
    """The rows that were read, step by step, over a kill and a resume."""
    part = small.folder / "recorded_part.py"
    part.write_text(RECORDING)
    options = (*SHORT, "--import", part, "--dataset", "recorded", "--max-token-num", 256)
    record = small.folder / "record.txt"
    monkeypatch.setenv("RECORD", str(record))

    def rows(name, *more, chaos=""):
        record.unlink(missing_ok=True)
        small.fork(name, *options, *more, ranks=1, chaos=chaos, waits=True)
        return record.read_text().split()

    whole = rows("rows-whole")[-8 * STEPS :]
    assert len(whole) == 8 * STEPS
    first = rows("rows-parts", chaos=KILL.format(3))
    assert first[-8 * 4 : -8 * 2] == whole[: 8 * 2]
    assert rows("rows-parts", "--resume", "auto")[-8 * (STEPS - 2) :] == whole[8 * 2 :]
    for epoch in (whole[:40], whole[40:]):
        assert len(set(epoch)) == len(epoch), "a row came twice in an epoch"


def test_e11_three_stages_change_nothing(job, straight):
    """The same run with 3 stages: equal to the bit; D12 begins with two."""
    job.train("three", *SHORT, ranks=3)
    assert job.losses("three") == job.losses("straight")
    assert_same_tensors(last(job, "three"), last(job, "straight"))


def test_e02_d12_killed_and_resumed_on_other_stages_each_time(job, straight):
    """Two stages, four of another schedule, then one: resumed from the newest each time."""
    zbv = ("--num-stages", 4, "--schedule", "zbv", "--stages-per-rank", 2)
    for step, options in ((3, ()), (5, ("--resume", "auto", *zbv))):
        done = job.fork("moves", *SHORT, *options, chaos=KILL.format(step), waits=True)
        assert done.code != 0
    done = job.train("moves", *SHORT, "--resume", "auto", ranks=1)
    assert "step-00000004: 4 of 6 steps are done" in done.out
    assert job.losses("moves") == job.losses("straight")
    assert_same_tensors(last(job, "moves"), last(job, "straight"))


def test_d12_replicas_come_and_go(small):
    """One process, then two replicas with shards, then one: equal but for rounding."""
    order = (*SHORT, "--rows.order", "given")
    two = ("--num-stages", 1, "--dp-degree", 2, "--batch-size", 4, "--dp-shard")
    small.train("alone", *order, ranks=1)
    start = last(small, "alone", 2)
    again = small.fork(
        "replicas", *order, *two, "--resume", start, chaos=KILL.format(5), waits=True
    )
    assert "2 of 6 steps are done" in again.out, again.err
    done = small.train("replicas", *order, "--resume", "auto", ranks=1)
    assert "4 of 6" in done.out
    losses, expected = small.losses("replicas"), small.losses("alone")
    assert losses == pytest.approx({k: v for k, v in expected.items() if k > 2}, rel=1e-5)
    ours, theirs = (saved_tensors(last(small, name)) for name in ("replicas", "alone"))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-6, msg=name)


def test_d12_sharded_masters(small):
    """Float32 masters of a half-precision run, from shares to whole ones and on."""
    precision = ("--bf16", "--save-steps", 1)
    two = ("--num-stages", 1, "--dp-degree", 2, "--batch-size", 4, "--dp-shard")
    small.train("masters", *precision, *two, "--total-steps", 2)
    masters = {
        k: v for k, v in tensors_joined(last(small, "masters", 2)).items() if k[:7] == "weight/"
    }
    assert masters and all(v.dtype == torch.float32 for v in masters.values())
    assert any(not torch.equal(v, v.bfloat16().float()) for v in masters.values())
    more = (*precision, "--resume", "auto", "--allow-changes")
    done = small.train("masters", *more, "--total-steps", 2, ranks=1)
    assert "2 of 2 steps are done" in done.out
    done = small.train("masters", *more, "--total-steps", 3, ranks=2)
    assert "2 of 3" in done.out


def tensors_joined(folder: Path) -> dict[str, torch.Tensor]:
    """Read the training state by hand, and join the rows of several ranks."""
    index = json.loads((folder / "training_state" / "state.json").read_text())["parameters"]
    found = {}
    for name, entry in index.items():
        for key, pieces in entry["values"].items():
            parts = [
                load_file(folder / "training_state" / piece["file"])[f"{key}/{name}"]
                for piece in sorted(pieces, key=lambda piece: piece.get("start", 0))
            ]
            found[f"{key}/{name}"] = torch.cat(parts) if "start" in pieces[0] else parts[0]
    return found


def test_lora_on_lora(small):
    """A second adapter on a first one, resumed on another number of stages."""
    small.train("first", "--total-steps", 1, "--llm-lora-num", 1, ranks=1)
    options = (
        *("--total-steps", 3, "--llm-lora-num", 2, "--model-path", last(small, "first", 1)),
        *("--processor-path", small.model, "--config-path", small.model),
    )
    small.train("second", *options, ranks=2)
    rest = small.resume("second", *options, step=2, ranks=1)
    assert small.losses(rest).items() <= small.losses("second").items()
    assert_same_tensors(last(small, rest, 3), last(small, "second", 3))
