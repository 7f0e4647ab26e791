"""Early stopping: patience, direction, improvement, and resuming from a log."""

import json
import math

import pytest

from stageline.errors import UserError
from stageline.training.evaluation import EarlyStop, EvalResult, figure_of, is_better
from tests.helpers.small_run import Job


def fed(values, **options):
    stop = EarlyStop(**options)
    ends = []
    for step, value in enumerate(values):
        stop.see(step, value)
        ends.append(stop.is_over)
    return ends


@pytest.mark.parametrize(
    ("values", "options", "first_end"),
    [
        ([3, 2, 2, 2, 1], {"patience": 2}, 3),  # an equal value does not improve
        ([3, 2, 2.5, 1, 2, 2], {"patience": 2}, 5),
        ([3, 2, 1.95, 1.92], {"patience": 2, "delta": 0.1}, 3),
        ([0.1, 0.2, 0.2, 0.1], {"patience": 2, "metric": "token_accuracy"}, 3),
        ([0.1, 0.2, 0.3], {"patience": 1, "metric": "reward_margin"}, None),
        ([1, math.nan, math.inf], {"patience": 2}, 2),
        ([math.nan, 5, 4], {"patience": 2}, None),
        ([1, 2, 3, 4], {"patience": 0}, None),
    ],
)
def test_it_ends_after_so_many_without_a_better_one(values, options, first_end):
    ends = fed(values, **options)
    assert (ends.index(True) if True in ends else None) == first_end


def test_the_log_of_a_run_that_goes_on_counts():
    records = [
        {"kind": "eval", "step": 0, "loss": 3.0},
        {"kind": "train", "step": 1, "loss": 0.1},
        {"kind": "eval", "step": 2, "loss": 2.0},
        {"kind": "eval", "step": 4, "loss": None},
        {"kind": "eval", "step": 6, "loss": 1.0},
    ]
    stop = EarlyStop(2)
    stop.see_log(records, until=4)
    assert (stop.best, stop.best_step, stop.count) == (2.0, 2, 1)


def test_figures_by_their_name():
    result = EvalResult(1.0, 0.5, 10, figures={"reward_margin": 2.0}, perplexity=math.e)
    assert figure_of(result, "reward_margin") == 2.0 and figure_of(result, "perplexity") == math.e
    with pytest.raises(UserError, match="loss, perplexity, token_accuracy, reward_margin"):
        figure_of(result, "bleu")
    assert is_better(1, 2, metric="perplexity") and is_better(2, 1, metric="reward_accuracy")


def test_a_run_ends_early_with_a_checkpoint_and_does_not_go_on(tmp_path):
    """With a rate of zero nothing improves: it ends at the second evaluation after the first."""
    job = Job(tmp_path)
    options = "--learning-rate 0 --eval-samples 4 --eval-steps 3 --early-stop.patience 2".split()
    done = job.fork("run", *options, "--save-steps", 0, ranks=1)
    assert done.code == 0 and "2 evaluations without a better loss" in done.out, done.err
    assert sorted(job.losses("run")) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [
        "step-00000006"
    ]
    again = job.fork("run", *options, "--save-steps", 0, "--resume", "auto", ranks=1)
    assert again.code == 0 and "the run ends here" in again.out
    assert sorted(job.losses("run")) == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_killed_in_an_evaluation_makes_it_when_it_goes_on(tmp_path):
    """Else it would end later, by one evaluation."""
    job = Job(tmp_path)
    options = "--learning-rate 0 --eval-samples 4 --eval-steps 2 --early-stop.patience 2".split()
    fault = "at=evaluation,step=2,do=sigkill"
    assert job.fork("run", *options, ranks=1, chaos=fault, waits=True).code != 0
    done = job.fork("run", *options, "--resume", "auto", "--save-best", "loss", ranks=1)
    assert done.code == 0 and "2 evaluations without a better loss" in done.out, done.err
    assert max(job.losses("run")) == 4
    assert "best loss so far" in done.out and "at step 2" in done.out


def test_figures_of_other_held_out_rows_are_not_compared(tmp_path):
    """With a rate of zero each set of rows has one loss, which is the best at its first time."""
    job = Job(tmp_path)
    options = "--learning-rate 0 --eval-steps 2 --early-stop.patience 9 --save-best loss".split()
    assert job.fork("run", *options, "--eval-samples", 1, "--total-steps", 4, ranks=1).code == 0
    again = ("--eval-samples", 4, "--total-steps", 6, "--lr-scheduler", "constant")
    done = job.fork("run", *options, *again, "--resume", "auto", "--allow-changes", ranks=1)
    assert done.code == 0 and "other held-out rows than before" in done.out, done.err
    lines = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    best = [(line["step"], line.get("is_best")) for line in lines if line["kind"] == "eval"]
    assert best == [(0, True), (2, None), (4, None), (4, True), (6, None)]
