"""Resuming is exact: the same losses, weights, optimizer state and samples as without a stop."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stageline.checkpoint.optimizer_state import SavedState
from tests.helpers.small_run import Job, assert_same_tensors, saved_tensors

STEPS = 12
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
    done = job.fork("straight", "--save-steps", 1, ranks=1)
    assert done.code == 0, done.err
    return job.folder / "straight" / "checkpoints"


def last(job, name):
    return job.folder / name / "checkpoints" / f"step-{STEPS:08d}"


@pytest.mark.parametrize("step", [1, 3, 4, 5, 8, 11])
def test_e01_e03_resumed_at_a_step(step, job, straight):
    """Resumed in an epoch, at its end and behind it; epochs end at 4 and 8 (E3)."""
    name = f"from-{step}"
    done = job.fork(name, "--resume", straight / f"step-{step:08d}", "--save-steps", 6, ranks=1)
    assert done.code == 0, done.err
    expected = job.losses("straight")
    assert job.losses(name) == {k: v for k, v in expected.items() if k > step}
    assert_same_tensors(last(job, name), last(job, "straight"))


def test_e02_three_resumes_in_a_chain(job, straight):
    """Killed three times, each time resumed from the newest checkpoint."""
    for number, step in enumerate((3, 7, 9)):
        options = ("--resume", "auto") if number else ()
        assert job.fork("chain", *options, ranks=1, chaos=KILL.format(step), waits=True).code != 0
    done = job.fork("chain", "--resume", "auto", ranks=1)
    assert done.code == 0 and "step-00000008: 8 of 12 steps are done" in done.out
    assert job.losses("chain") == job.losses("straight")
    assert_same_tensors(last(job, "chain"), last(job, "straight"))


OPTIONS = {
    "e04_data_workers": ("--num-workers", 2, "--packing"),
    "e05_e06_accumulation_warm_up_and_decay": (
        *("--accumulate-steps", 2, "--batch-size", 4, "--sync-save"),
        *("--warmup-steps", 5, "--weight-decay", 0.3, "--max-grad-norm", 0.5),
    ),
    "e07_dropout": ("--llm-lora-num", 1, "--lora.dropout", 0.3, "--gradient-checkpointing"),
    "e13_bf16_masters": ("--bf16",),
    "e13_fp16_scale": ("--fp16",),
    "muon": ("--optimizer", "muon", "--parts.lm_head.frozen"),
    "adafactor": ("--optimizer", "adafactor"),
    "adamw_8bit": ("--optimizer", "adamw_8bit"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_resumed_with_options(case, small):
    """Resume from step 6, to the same state as without a stop."""
    options = OPTIONS[case]
    small.train(case, *options, ranks=1)
    rest = small.resume(case, *options, ranks=1)
    assert small.losses(rest).items() <= small.losses(case).items()
    assert_same_tensors(last(small, rest), last(small, case))
    numbers = [SavedState(last(small, name)).facts["numbers"] for name in (rest, case)]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("keeps", ["number", "tensor"])
def test_a_loss_with_a_state_goes_on_on_other_stages(job, keeps):
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
    part = job.folder / f"state_{keeps}.py"
    part.write_text(code)
    options = ("--import", part, "--loss-fn", "hard_tokens")
    job.train(keeps, *options, ranks=2)
    rest = job.resume(keeps, *options, ranks=4 if keeps == "number" else 1)
    assert job.losses(rest).items() <= job.losses(keeps).items()
    state = SavedState(last(job, rest)).facts["loss"]
    assert state == SavedState(last(job, keeps)).facts["loss"] and state["mean"] > 0.1


STATE_OF_A_MODULE = """super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(()))"""


def test_e08_other_intervals_change_nothing(job, straight):
    """Allow other intervals of evaluation, log and checkpoints: they do not change the training."""
    done = job.fork(
        "intervals",
        *("--eval-samples", 4, "--eval-steps", 3, "--save-steps", 5, "--log-steps", 2),
        ranks=1,
    )
    assert done.code == 0, done.err
    expected = job.losses("straight")
    assert job.losses("intervals").items() <= expected.items()
    assert_same_tensors(last(job, "intervals"), last(job, "straight"))


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
    options = ("--import", part, "--dataset", "recorded", "--max-token-num", 256)

    def rows(name, *more, chaos=""):
        record = small.folder / f"{name}.txt"
        record.unlink(missing_ok=True)
        monkeypatch.setenv("RECORD", str(record))
        run = name.partition("+")[0]
        small.fork(run, *options, *more, ranks=1, chaos=chaos)
        return record.read_text().split()[-8 * STEPS :]

    whole = rows("rows-whole")
    first = rows("rows-parts", chaos=KILL.format(7))
    rest = rows("rows-parts+", "--resume", "auto")[-8 * (STEPS - 6) :]
    assert len(whole) == 8 * STEPS
    assert rest == whole[8 * 6 :] and whole[: 8 * 6] == first[-8 * 8 : -8 * 2]
    for epoch in range(2):
        seen = whole[40 * epoch : 40 * (epoch + 1)]
        assert len(set(seen)) == len(seen), "a row came twice in an epoch"


def test_e10_and_e11_stages_change_nothing(job, straight):
    """The same run again and with 3 stages: equal to the bit; D12 begins with two."""
    for name, ranks in (("again", 1), ("three", 3)):
        done = job.fork(name, ranks=ranks)
        assert done.code == 0, done.err
        assert job.losses(name) == job.losses("straight")
        assert_same_tensors(last(job, name), last(job, "straight"))


def test_d12_two_stages_then_four_then_one_and_back(job, straight):
    """Resumed on another number of stages and another schedule each time; moments by name."""
    for ranks, step, options in (
        (2, 3, ()),
        (4, 5, ("--schedule", "gpipe")),
        (1, 7, ()),
        (2, 9, ("--num-stages", 4, "--stages-per-rank", 2, "--schedule", "interleaved_1f1b")),
    ):
        resume = ("--resume", "auto") if step > 3 else ()
        done = job.fork(
            "moves", *resume, *options, ranks=ranks, chaos=KILL.format(step), waits=True
        )
        assert done.code != 0
    done = job.fork(
        "moves",
        "--resume",
        "auto",
        "--num-stages",
        4,
        "--schedule",
        "zbv",
        "--stages-per-rank",
        2,
        ranks=2,
    )
    assert done.code == 0, done.err
    assert job.losses("moves") == job.losses("straight")
    assert_same_tensors(last(job, "moves"), last(job, "straight"))


def assert_close(ours: Path, theirs: Path, rtol: float) -> None:
    mine, expected = saved_tensors(ours), saved_tensors(theirs)
    assert mine.keys() == expected.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], expected[name], rtol=rtol, atol=1e-6, msg=name)


ORDER = ("--rows.order", "given")


@pytest.fixture(scope="module")
def alone(small):
    small.train("alone", *ORDER, ranks=1)
    return "alone"


@pytest.mark.parametrize("shards", [False, True], ids=["replicated", "sharded"])
def test_d12_replicas_come_and_go(shards, small, alone):
    """One process, then two replicas, then one: the same samples, losses equal but for rounding."""
    name = f"replicas-{shards}"
    two = ("--num-stages", 1, "--dp-degree", 2, "--batch-size", 4, *["--dp-shard"][: int(shards)])
    start = last(small, alone).with_name("step-00000002")
    again = small.fork(name, *ORDER, *two, "--resume", start, chaos=KILL.format(7), waits=True)
    assert "2 of 12 steps are done" in again.out, again.err
    done = small.fork(name, *ORDER, "--resume", "auto", ranks=1)
    assert done.code == 0 and "6 of 12" in done.out, done.err
    losses, expected = small.losses(name), small.losses(alone)
    assert losses == pytest.approx({k: v for k, v in expected.items() if k > 2}, rel=1e-5)
    assert_close(last(small, name), last(small, alone), rtol=1e-3)


def test_d12_sharded_masters(small):
    """Float32 masters of a half-precision run, from shares to whole ones and on."""
    name, precision = "masters", "--bf16"
    two = ("--num-stages", 1, "--dp-degree", 2, "--batch-size", 4, "--dp-shard")
    assert small.fork(name, precision, *two, chaos=KILL.format(5), waits=True).code != 0
    folder = small.folder / name / "checkpoints" / "step-00000004"
    masters = {k: v for k, v in tensors_joined(folder).items() if k.startswith("weight/")}
    assert masters and all(v.dtype == torch.float32 for v in masters.values())
    assert any(not torch.equal(v, v.bfloat16().float()) for v in masters.values())
    done = small.fork(
        name, precision, "--resume", "auto", "--total-steps", 4, "--allow-changes", ranks=1
    )
    assert done.code == 0 and "4 of 4 steps are done" in done.out, done.err
    done = small.fork(name, precision, "--resume", "auto", ranks=2)
    assert done.code == 0 and "4 of 12" in done.out, done.err


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
    small.train("first", "--llm-lora-num", 1, ranks=1)
    options = (
        "--model-path",
        last(small, "first"),
        "--llm-lora-num",
        2,
        "--processor-path",
        small.model,
        "--config-path",
        small.model,
    )
    small.train("second", *options, ranks=2)
    rest = small.resume("second", *options, ranks=1)
    assert small.losses(rest).items() <= small.losses("second").items()
    assert_same_tensors(last(small, rest), last(small, "second"))
