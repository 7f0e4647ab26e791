"""What a rank says about an exception, and which exceptions are only the echo of another."""

import errno
import os

import pytest
import torch.distributed as dist

from register import RegisterError
from stageline.distributed import board as board_module
from stageline.distributed import failure
from stageline.errors import DataError, UserError


def _raised(error: Exception, *, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.fixture
def _rank_2_of_4(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(failure, "_stages", [1])


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("a"), 2), (DataError("a"), 3), (RegisterError("a"), 2)]
)
def test_an_error_of_the_user_is_one_message_and_its_code(error, code):
    assert failure.describe_failure(_raised(error)) == ("error: a\n", code)


def test_it_is_found_below_what_the_schedule_wrapped():
    wrapped = _raised(RuntimeError("[Stage 1] failed to run forward"), cause=DataError("row 17"))
    assert failure.describe_failure(wrapped) == ("error: row 17\n", 3)


@pytest.mark.usefixtures("_rank_2_of_4")
def test_any_other_error_names_rank_and_stage_before_its_traceback():
    report, code = failure.describe_failure(_raised(TypeError("boom")))
    lines = report.splitlines()
    assert lines[0] == "rank 2 (stage 1) failed first: TypeError: boom"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "TypeError: boom"
    assert code == 1


@pytest.mark.usefixtures("_rank_2_of_4")
def test_an_error_with_a_code_that_is_no_number_is_any_other_error():
    error = TypeError("boom")
    error.exit_code = "two"
    assert failure.describe_failure(_raised(error))[1] == 1


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
    assert failure.is_lost_connection(_raised(error))
    assert failure.is_lost_connection(_raised(RuntimeError("[Stage 0] failed"), cause=error))


@pytest.mark.parametrize(
    "error",
    [ValueError("Connection closed by peer"), RuntimeError("shape mismatch"), KeyError("timeout")],
)
def test_anything_else_is_a_cause(error):
    assert not failure.is_lost_connection(_raised(error))


def test_the_file_that_stands_in_for_a_lost_store_has_one_winner(tmp_path, monkeypatch):
    monkeypatch.setattr(board_module.tempfile, "gettempdir", lambda: str(tmp_path))
    boards = [board_module.FileBoard() for _ in range(3)]
    claims = [
        board.claim({"rank": str(rank), "code": rank + 5}, patience=0.0)
        for rank, board in enumerate(boards)
    ]
    assert claims == [None, {"rank": "0", "code": 5}, {"rank": "0", "code": 5}]
    boards[0].mark_reported()
    boards[1].wait_reported(60.0)  # returns at once


def test_the_store_has_one_winner(monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    boards = [board_module.StoreBoard() for _ in range(2)]
    claims = [
        board.claim({"rank": str(rank), "code": rank + 5}, patience=0.0)
        for rank, board in enumerate(boards)
    ]
    assert claims == [None, {"rank": "0", "code": 5}]
    boards[0].mark_reported()
    boards[1].wait_reported(60.0)


def test_of_each_other_machine_one_rank_repeats_the_first_line(monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")

    def board_on(machine):
        monkeypatch.setenv("GROUP_RANK", str(machine))
        return board_module.StoreBoard()

    claimant, *others = [board_on(machine) for machine in (0, 1, 1, 2)]
    assert [board.is_first_to_hear() for board in others[:2]] == [True, False]
    claimant.wait_heard(60.0, but=2)  # returns at once: machine 2 is the one that was lost
    assert others[2].is_first_to_hear()
    claimant.wait_heard(60.0, but=None)
