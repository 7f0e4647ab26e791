"""Runs by epochs, and runs that are made longer: bit-identical to those that had this length."""

import pytest
import yaml

from tests.helpers import small_run
from tests.helpers.small_run import Job, assert_same_tensors

RESUME = ("--resume", "auto")
PLAIN = ("--lr-scheduler", "constant")
CONSTANT = (*PLAIN, "--warmup-steps", 3)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """36 rows and 4 held out, in batches of 8: an epoch is 4 steps."""
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(autouse=True)
def no_steps(monkeypatch):
    """The small run without its own --total-steps."""
    words = small_run.OPTIONS
    at = words.index("--total-steps")
    monkeypatch.setattr(small_run, "OPTIONS", words[:at] + words[at + 2 :])


def assert_same_run(job, one, other, step):
    assert job.losses(one) == job.losses(other)
    made = (job.folder / name / "checkpoints" / f"step-{step:08}" for name in (one, other))
    assert_same_tensors(*made)


def test_a_constant_rate_goes_on_as_if_it_had_been_longer(job):
    """Lengthen a run of an epoch by steps, then by epochs again."""
    job.train("whole", *CONSTANT, "--total-steps", 8, ranks=1)
    done = job.train("short", *CONSTANT, "--num-train-epochs", 1, ranks=1)
    assert "an epoch is 4 steps, 1 epoch = 4 steps" in done.out
    done = job.train("short", *CONSTANT, "--total-steps", 6, *RESUME, ranks=1)
    assert "4 of 6 steps are done" in done.out
    done = job.train("short", *CONSTANT, "--num-train-epochs", 2, *RESUME, ranks=1)
    assert "6 of 8 steps are done" in done.out
    assert_same_run(job, "short", "whole", 8)


def test_a_decay_may_be_put_off_before_it_begins(job):
    wsd = ("--lr-scheduler", "wsd", "--lr-scheduler.decay", 2)
    job.train("late", *wsd, "--total-steps", 6, ranks=1)
    job.train("early", *wsd, "--total-steps", 4, ranks=1)
    done = job.fork("early", *wsd, "--total-steps", 6, *RESUME, ranks=1)
    assert done.code == 4 and "The finished step 4 " in done.err, done.err
    before = job.folder / "early" / "checkpoints" / "step-00000002"
    job.train("early", *wsd, "--total-steps", 6, "--resume", before, ranks=1)
    assert_same_run(job, "early", "late", 6)


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (("--total-steps", 2), ("--total-steps", 6), ["finished step 2 ", "then, 6 now"]),
        ((*PLAIN, "--total-steps", 2), (*PLAIN, "--total-steps", 1), ["2 are done"]),
        (
            ("--total-steps", 2, "--lr-scheduler", "constant", "--warmup-ratio", 0.5),
            ("--total-steps", 6, "--lr-scheduler", "constant", "--warmup-ratio", 0.5),
            ["finished step 2 would have had", "warmup-steps: 1 then, 3 now"],
        ),
    ],
)
def test_what_would_have_been_another_course_is_refused(job, tmp_path, first, then, words):
    name = f"refused-{tmp_path.name}"
    job.train(name, *first, ranks=1)
    done = job.fork(name, *then, *RESUME, ranks=1)
    assert done.code == 4 and [word for word in words if word not in done.err] == [], done.err
    assert "--allow-changes" in done.err and "Traceback" not in done.err


def test_saving_and_evaluating_once_an_epoch_and_what_the_folder_says(job):
    rows = ("--num-train-epochs", 1.4, "--warmup-ratio", 0.25, "--dataset.test_size", 8)
    every = ("--save-steps", "epoch", "--eval-steps", "epoch", "--eval-samples", "all")
    done = job.train("every", *rows, *every, ranks=1)
    assert "an epoch is 4 steps, 1.4 epochs = 6 steps, warm-up is 2 of 6 steps" in done.out
    assert job.checkpoints("every") == ["step-00000004", "step-00000006"]
    assert [record["step"] for record in job.records("every", "eval")] == [0, 4, 6]
    folder = job.folder / "every"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    asked = {"num-train-epochs": 1.4, "warmup-ratio": 0.25, "save-steps": "epoch"}
    assert config | asked | {"total-steps": 6, "warmup-steps": 2} == config
    again = ("--config", folder / "config.yaml", "--eval-samples", 0)
    # the file says both numbers; what is typed takes the place of either
    for more, steps in (((), 6), (("--total-steps", 2), 2), (("--num-train-epochs", 0.7), 3)):
        job.train(f"again-{steps}", *again, *more, ranks=1)
        assert job.checkpoints(f"again-{steps}")[-1] == f"step-{steps:08}"
    done = job.fork("other", *again, "--batch-size", 4, "--check-only", ranks=1)
    assert "1.4 epochs = 12 steps" in done.out and "in place of --total-steps 6" in done.out


def test_both_typed_are_refused(job):
    done = job.fork("both", "--num-train-epochs", 3, "--total-steps", 100, ranks=1)
    assert done.code == 2 and "were both given" in done.err
    done = job.fork("both", "--warmup-ratio", 0.1, "--warmup-steps", 0, ranks=1)
    assert done.code == 2 and "--warmup-steps 0 were both given" in done.err


def test_replicas_and_accumulation_share_an_epoch(job):
    more = ("--num-train-epochs", 3, "--accumulate-steps", 2, "--batch-size", 4, "--check-only")
    done = job.fork("check", *more, "--num-stages", 1, "--dp-degree", 2, ranks=2)
    assert done.code == 0 and "an epoch is 2 steps, 3 epochs = 6 steps" in done.out, done.err
    assert not (job.folder / "check").exists()


def test_epochs_of_answers_that_some_steps_share_end_with_whole_ones(job):
    grpo = "--collate-fn grpo --loss-fn grpo --reward length --rollouts.group_size 4"
    more = "--rollouts.max_completion_length 8 --rollouts.inner_steps 3 --save-steps 3 "
    more += "--num-train-epochs 0.12"
    done = job.fork("grpo", *grpo.split(), *more.split(), "--check-only", ranks=1)
    assert "an epoch is 54 steps, 0.12 epochs = 9 steps" in done.out, done.err
