"""The best checkpoint: its evaluation, and that a kill at any moment leaves a whole one."""

import json
import math
import os
import sys

import pytest

from stageline.checkpoint.layout import draft_name, publish, verify
from stageline.errors import UserError
from stageline.training.evaluation import BestCheckpoint, EvalResult


def result(loss, accuracy=0.5, num_targets=10):
    return EvalResult(loss=loss, token_accuracy=accuracy, num_targets=num_targets)


def save(target, *, step, facts):
    """Publishes as the real one does; the content tells the step."""
    draft = target.parent / draft_name(target)
    draft.mkdir(parents=True)
    for name in ("a.safetensors", "b.safetensors"):
        (draft / name).write_text(f"weights of step {step}")
    publish(draft, target, facts={"step": step, **facts}, known={})


def make(folder, *, metric="loss", **options):
    return BestCheckpoint(folder, metric=metric, save=save, **options)


def run(best, results):
    """Steps that were kept."""
    kept = []
    for step, one in enumerate(results):
        if best.improves(one):
            best.keep(step, one)
            kept.append(step)
    return kept


def checkpoints(folder):
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


def kept_step(folder):
    """Return the step of the checkpoint that the link leads to, checked in full."""
    manifest = verify(folder / "best")
    for name in ("a.safetensors", "b.safetensors"):
        assert (folder / "best" / name).read_text() == f"weights of step {manifest['step']}"
    return manifest["step"]


def test_the_lowest_loss_is_kept_and_only_that(tmp_path):
    best = make(tmp_path)
    losses = [3.0, 2.0, 2.5, 2.0, 1.0, 4.0]
    assert run(best, [result(loss) for loss in losses]) == [0, 1, 4]
    assert (best.value, best.step) == (1.0, 4)
    assert kept_step(tmp_path) == 4
    assert checkpoints(tmp_path) == ["best-step-00000004"]
    assert os.readlink(tmp_path / "best") == "best-step-00000004", "the folder may be moved"


def test_what_is_no_figure_is_not_the_best(tmp_path):
    best = make(tmp_path)
    none = [result(math.nan), result(math.inf), result(-math.inf), result(0.0, num_targets=0)]
    assert run(best, none) == []
    assert run(best, [result(5.0), result(math.nan)]) == [0]
    assert kept_step(tmp_path) == 0


# -- several runs in one folder ----------------------------------------------------------


def test_a_continued_run_goes_on_from_its_best(tmp_path):
    run(make(tmp_path), [result(3.0), result(2.0, 0.9)])
    continued = make(tmp_path, start_step=2)
    assert (continued.value, continued.step) == (2.0, 1)
    assert not continued.improves(result(2.5)) and continued.improves(result(1.5))
    continued.keep(1, result(1.5))  # the same step again, after a start from an older checkpoint
    assert kept_step(tmp_path) == 1 and len(checkpoints(tmp_path)) == 1


def test_a_continued_run_may_look_at_another_figure(tmp_path):
    run(make(tmp_path), [result(3.0, 0.1), result(2.0, 0.9)])
    continued = make(tmp_path, metric="token_accuracy", start_step=2)
    assert continued.value == 0.9


def test_a_new_run_leaves_the_best_of_an_earlier_one(tmp_path):
    run(make(tmp_path), [result(3.0), result(1.0)])
    assert run(make(tmp_path), [result(5.0), result(4.0)]) == [0, 1]
    assert checkpoints(tmp_path) == ["best-step-00000001", "best-step-00000001-2"]
    assert os.readlink(tmp_path / "best") == "best-step-00000001-2"
    assert kept_step(tmp_path) == 1


def test_a_folder_of_the_links_name_is_refused_at_the_start(tmp_path):
    (tmp_path / "best").mkdir()
    with pytest.raises(UserError, match="is not a link.*--save-best.*Rename"):
        make(tmp_path)
    make(tmp_path, metric="none")


# -- a kill ------------------------------------------------------------------------------


def keep_and_die(folder, number):
    """In a process that ends before its `number`-th change of a file; whether it finished."""
    pid = os.fork()
    if pid == 0:
        best = make(folder, start_step=1)
        left = [number]
        changes = {"os.rename", "os.symlink", "os.mkdir", "os.remove", "os.rmdir"}

        def hook(event, arguments):
            is_change = event in changes or (event == "open" and arguments[1] not in (None, "r"))
            if is_change and left[0] == 0:
                os._exit(9)
            left[0] -= is_change

        sys.addaudithook(hook)
        try:
            best.keep(2, result(1.0))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_kill_before_any_change_of_a_file_leaves_the_old_or_the_new(tmp_path):
    steps, finished, number = [], False, 0
    while not finished:
        folder = tmp_path / str(number)
        make(folder).keep(1, result(2.0))
        finished = keep_and_die(folder, number)
        steps.append(kept_step(folder))
        for name in checkpoints(folder):
            if ".tmp-" not in name:
                verify(folder / name)
        after = make(folder, start_step=2)  # a continued run is not disturbed by what was left
        assert after.value == {1: 2.0, 2: 1.0}[steps[-1]]
        after.keep(2, result(0.5))
        assert json.loads((folder / "best" / "manifest.json").read_text())["best"]["step"] == 2
        number += 1
    assert steps == sorted(steps) and set(steps) == {1, 2}
    assert steps.count(1) > 5 and steps.count(2) > 2, "kills before and after the exchange"
