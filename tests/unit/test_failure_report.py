"""Reports of exceptions, and exceptions that are only the echo of another rank's."""

import dataclasses
import errno
import signal

import pytest
import torch.distributed as dist

from register import RegisterError
from stageline.distributed import failure_record, launch, stop
from stageline.distributed import failure_record as record
from stageline.errors import (
    CheckpointError,
    DataError,
    HangError,
    MemoryFull,
    NonFiniteError,
    StorageError,
    UserError,
)


def _raised(error: Exception, *, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (UserError("a"), "usage", 2),
        (RegisterError("a"), "usage", 2),
        (DataError("a"), "data", 3),
        (CheckpointError("a"), "checkpoint", 4),
        (StorageError("a"), "storage", 5),
        (NonFiniteError("a"), "non-finite", 6),
        (MemoryFull("a"), "memory", 7),
        (HangError("a"), "hang", 8),
    ],
)
def test_an_error_of_a_kind_is_one_message_and_its_code(error, kind, code):
    told = record.record_of(_raised(error))
    assert (told.report(), told.code) == (f"error[{kind}]: a\n", code)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/...] Connection closed by peer [127.0.1.1]:35120"),
        RuntimeError("Timed out waiting 600000ms for recv operation to complete"),
        dist.DistBackendError("NCCL error: remote process exited"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ],
)
def test_a_lost_connection_is_an_echo(error):
    assert failure_record.is_lost_connection(_raised(error))
    assert failure_record.is_lost_connection(_raised(RuntimeError("[Stage 0] failed"), cause=error))


@pytest.mark.parametrize(
    "error",
    [ValueError("Connection closed by peer"), RuntimeError("shape mismatch"), KeyError("timeout")],
)
def test_anything_else_is_a_cause(error):
    assert not failure_record.is_lost_connection(_raised(error))


def told_by(folder, monkeypatch, rank, record):
    """Rank leaves an error file and its stage, as below an agent."""
    file = folder / "run" / "attempt_0" / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(failure_record, "stages_here", [])
    failure_record.name_stages([rank])
    if record is not None:
        failure_record.leave_error_file(dataclasses.replace(record, rank=rank))
    return file


CAUSE = record.record_here("crash", 9, "the cause")
ECHO = record.record_here("crash", 9, "lost a neighbour", is_secondary=True)
LATER = dataclasses.replace(CAUSE, message="later", time_ns=CAUSE.time_ns + 1)


@pytest.mark.parametrize(
    ("records", "codes", "words"),
    [
        ([ECHO, CAUSE], {0: 9, 1: 9}, " rank=1 stage=1: the cause"),
        ([LATER, CAUSE], {0: 9, 1: 9}, " rank=1 stage=1: the cause"),
        ([ECHO, None], {1: -9, 0: 9}, " rank=1 stage=1: killed by signal 9 (SIGKILL;"),
        ([None, None], {1: -11, 0: -12}, " rank=1 stage=1: killed by signal 11 (SIGSE"),
        ([ECHO, None], {1: 3, 0: 9}, " rank=1 stage=1: ended with exit status 3 in the"),
        ([ECHO, None], {0: 9}, " rank=1 stage=1: ended with exit status 0 in the middle"),
        # the rank that failed is on another machine
        ([ECHO, ECHO], {0: 9, 1: 9}, ": lost a neighbour"),
    ],
)
def test_the_launcher_tells_who_failed_first(tmp_path, monkeypatch, records, codes, words):
    for rank, told in enumerate(records):
        stages = {"stages": (rank,), "stage": rank, "num_ranks": 2}
        told_by(tmp_path, monkeypatch, rank, told and dataclasses.replace(told, **stages))
    first = launch.first_failure(tmp_path, codes, num_ranks=2)
    assert first.report().startswith(f"error[crash]{words}") and first.code == 9


def test_a_sigterm_behind_the_early_signal_of_slurm_is_the_first_of_its_kind(monkeypatch):
    monkeypatch.setattr(stop, "_stop", stop._Stop(is_read=True))
    monkeypatch.setattr(stop, "MIN_SECONDS_BETWEEN", 0.0)
    left = []
    for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        assert left == []
        stop._heed(signum, lambda *told: left.append(told))
    assert left == [(f"Ended at once by a second SIGTERM{stop._words.at_once}.", 143)]
