"""The folder of a run belongs to one run at a time: a lock, held as long as the process lives."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from stageline.checkpoint.retention import sweep
from stageline.errors import UserError

LOCK_FILE = "run.lock"
_held: list[IO[str]] = []  # until the process ends: the kernel lets go of them, whatever happens


def claim_run_folder(folder: Path, *, say: Callable[[str], None]) -> None:
    """Makes the folder, locks it, and removes what a killed run left half-written.

    Raises:
        UserError: another run has it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--output-dir {folder} cannot be written ({error.strerror}), a folder for the run was "
            "expected: checkpoints and logs go there. Choose another one."
        ) from error
    try:
        # of this process alone: worker processes, which may outlive it, do not inherit this kind
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(
            f"--output-dir {folder} is in use by {_holder(file)}, a folder of its own was expected "
            "for each run: two would write over each other. Wait for that run, end it, or choose "
            "another --output-dir."
        ) from error
    file.truncate(0)
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}, file)
    file.flush()
    _held.append(file)
    freed = sweep(folder / "checkpoints")
    if freed:
        say(f"removed checkpoints that were half written: {freed:,} bytes freed")


def _holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        said = json.load(file)
        return f"process {said['pid']} on {said['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
