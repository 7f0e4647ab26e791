"""What a rank says about an exception, and which exceptions are only the echo of another."""

import dataclasses
import errno
import os

import pytest
import torch
import torch.distributed as dist

from register import RegisterError
from stageline.distributed import board as board_module
from stageline.distributed import failure, failure_record
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


@pytest.fixture
def _rank_2_of_4(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(record, "stages_here", [1])


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


def test_an_error_raised_from_itself_has_an_end():
    error = ValueError("this")
    found = list(record.chain(_raised(error, cause=error)))
    assert found == [error]


def test_it_is_found_below_what_the_schedule_wrapped():
    wrapped = _raised(RuntimeError("[Stage 1] failed to run forward"), cause=DataError("row 17"))
    told = record.record_of(wrapped)
    assert (told.report(), told.code) == ("error[data]: row 17\n", 3)


@pytest.mark.usefixtures("_rank_2_of_4")
def test_any_other_error_names_rank_and_stage_before_its_traceback():
    told = record.record_of(_raised(TypeError("boom")))
    lines = told.report().splitlines()
    assert lines[0].startswith(
        "error[crash] rank=2 stage=1: TypeError: boom at test_failure_report"
    )
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2] == "TypeError: boom"
    assert lines[-1] == lines[0]
    assert told.code == 9


def test_the_line_is_that_of_the_caller_of_a_library():
    with pytest.raises(ValueError) as caught:
        torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.zeros(1, dtype=torch.long))
    assert " at test_failure_report.py:" in record.record_of(caught.value).message


@pytest.mark.usefixtures("_rank_2_of_4")
def test_an_error_with_a_code_that_is_no_number_is_any_other_error():
    error = TypeError("boom")
    error.exit_code = "two"
    assert record.record_of(_raised(error)).code == 9


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/...] Connection closed by peer [127.0.1.1]:35120"),
        RuntimeError("Connection reset by peer"),
        RuntimeError("Timed out waiting 600000ms for recv operation to complete"),
        dist.DistBackendError("NCCL error: remote process exited"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)),
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


def test_the_file_that_stands_in_for_a_lost_store_has_one_winner(tmp_path, monkeypatch):
    monkeypatch.setattr(board_module.tempfile, "gettempdir", lambda: str(tmp_path))
    boards = [board_module.Board.on_file() for _ in range(3)]
    claims = [
        board.claim({"rank": rank, "code": rank + 5}, patience=0.0)
        for rank, board in enumerate(boards)
    ]
    assert claims == [None, {"rank": 0, "code": 5}, {"rank": 0, "code": 5}]
    boards[0].mark_reported()
    boards[1].wait_reported(60.0)  # returns at once


def test_the_store_has_one_winner(monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    boards = [board_module.Board.on_store() for _ in range(2)]
    claims = [
        board.claim({"rank": rank, "code": rank + 5}, patience=0.0)
        for rank, board in enumerate(boards)
    ]
    assert claims == [None, {"rank": 0, "code": 5}]
    boards[0].mark_reported()
    boards[1].wait_reported(60.0)


@pytest.mark.parametrize("is_echo", [False, True])
def test_the_earliest_cause_is_told_whoever_claims_first(is_echo, monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("WORLD_SIZE", "2")

    def claim(rank, time_ns, *, is_secondary=False):
        monkeypatch.setenv("RANK", str(rank))
        told = record.record_here("crash", 9, f"of rank {rank}", is_secondary=is_secondary)
        told = dataclasses.replace(told, time_ns=time_ns)
        board = board_module.Board.on_store()
        return board, told, board.claim(dataclasses.asdict(told), patience=0.0)

    first_board, later, held = claim(0, 5 if is_echo else 20, is_secondary=is_echo)
    assert held is None
    board, earlier, held = claim(1, 10)
    assert held["rank"] == 0
    assert failure._earliest(first_board, later) == earlier
    assert record.read_record(board.settled(60.0)) == earlier


def test_of_each_other_machine_one_rank_repeats_the_first_line(monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")

    def board_on(machine):
        monkeypatch.setenv("GROUP_RANK", str(machine))
        return board_module.Board.on_store()

    claimant, *others = [board_on(machine) for machine in (0, 1, 1, 2)]
    assert [board.is_first_to_hear() for board in others[:2]] == [True, False]
    claimant.wait_heard(60.0, but=2)  # returns at once: machine 2 is the one that was lost
    assert others[2].is_first_to_hear()
    claimant.wait_heard(60.0, but=None)
