"""Workers of the loader: started once, a step ahead, and their errors come out as they went in."""

import gc
import multiprocessing
import os
import time

import pytest
import torch

from stageline.data.batches.loader import MicroBatchLoader

SECONDS = 20  # before a test gives up


class OddError(Exception):
    """Cannot be made again from its message, which is what unpickling does."""

    def __init__(self, row, why):
        super().__init__(f"row {row}: {why}")


class LocalError(Exception):
    """Its class cannot be found by another process."""


class Rows:
    """Row i is i; says who read it, in files of a folder."""

    def __init__(self, count, folder=None, error=None):
        self.count, self.folder, self.error = count, folder, error

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        if self.folder is not None:
            (self.folder / f"{row:03}-{os.getpid()}").touch()
        if row == 5 and self.error is not None:
            raise self.error
        return None, {"id": row}


def collate(items):
    ids = torch.tensor([[sample["id"], os.getpid()] for _, sample in items])
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def make_loader(rows, **options):
    return MicroBatchLoader(
        rows, collate=collate, batch_size=2, micro_batch_size=2, shuffle=False, **options
    )


def pids(steps):
    return {int(batch["input_ids"][0, 1]) for step in steps for batch in step}


def until(holds):
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_a_worker_makes_the_next_step_while_nobody_asks(tmp_path):
    steps = iter(make_loader(Rows(8, tmp_path), num_workers=1))
    next(steps)
    until(lambda: list(tmp_path.glob("003-*")))
    assert not list(tmp_path.glob("004-*")), "one step ahead is in memory, not two"
    next(steps)
    until(lambda: list(tmp_path.glob("005-*")))
    assert {path.name.split("-")[1] for path in tmp_path.iterdir()} != {str(os.getpid())}


def test_workers_of_an_evaluation_serve_the_next(num_workers=2):
    loader = make_loader(Rows(8), num_workers=num_workers, eval=True)
    first, second = (list(loader) for _ in range(2))
    assert pids(first) == pids(second) and os.getpid() not in pids(first)
    assert len(pids(first)) == num_workers
    for step, other in zip(first, second, strict=True):
        assert torch.equal(step[0]["input_ids"][:, 0], other[0]["input_ids"][:, 0])
    broken = iter(loader)
    next(broken)  # an evaluation that was left early
    assert [batch["input_ids"][:, 0].tolist() for step in loader for batch in step] == [
        [0, 1], [2, 3], [4, 5], [6, 7],
    ]  # fmt: skip


def test_training_goes_through_epochs_with_the_same_workers():
    steps = iter(make_loader(Rows(4), num_workers=1))
    assert len(pids([next(steps) for _ in range(7)])) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_that_cannot_be_pickled_keeps_its_words(num_workers):
    class Hidden(LocalError):
        pass

    for error in (OddError(5, "is bad"), Hidden("row 5: is bad"), KeyError("row 5: is bad")):
        steps = iter(make_loader(Rows(8, error=error), num_workers=num_workers))
        kind, text = error_of(steps)
        assert "row 5: is bad" in text and type(error).__name__ in f"{kind} {text}"
        assert text.count("\n") == 0, "a traceback would bury it"


def error_of(steps):
    """Kind and words of the error; not itself, which would hold frames and so the workers."""
    try:
        for _ in range(4):
            next(steps)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_workers_end_with_the_loader_and_need_no_collection():
    """In a cycle their queues would be finalised first, and torch would wait 5 s for each."""
    gc.disable()
    try:
        for eval, error in ((True, None), (False, None), (True, KeyError("no"))):
            loader = make_loader(Rows(8, error=error), num_workers=2, eval=eval)
            steps = iter(loader)
            workers = multiprocessing.active_children() if next(steps) else []
            if error is not None:
                assert error_of(steps) == ("KeyError", "'no'")
            del steps, loader
            assert len(workers) == 2 and [worker.exitcode for worker in workers] == [0, 0]
    finally:
        gc.enable()
