"""A peer of corpus.py as a process: is told to go, and its memory is watched from outside."""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

_SECONDS_BETWEEN_LOOKS = 0.05
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "PYTHONPATH": "",
}


class Process:
    """Says READY, DONE and RESULT; goes on after each at a line of input."""

    def __init__(self, command: list[str], settings: dict[str, Any]) -> None:
        self._command = [*command, json.dumps(settings)]
        self._environment = {
            **os.environ,
            **_ENVIRONMENT,
            "HF_DATASETS_CACHE": settings.get("folder", "/tmp"),
        }

    def run(self, *, is_measured: bool = False) -> dict[str, float]:
        """What it says of itself; with `peak`, bytes, if its memory is to be looked at."""
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment,
            )
            watch = _Watch(process.pid) if is_measured else None
            result = self._talk(process, watch)
            if process.wait() != 0:
                errors.seek(0)
                raise SystemExit(f"{self._command[1:3]} ended:\n{errors.read()[-3000:]}")
        return result

    @staticmethod
    def _talk(process: subprocess.Popen, watch: "_Watch | None") -> dict[str, float]:
        result: dict[str, float] = {}
        for line in process.stdout or ():
            if line.startswith(("READY", "DONE")):
                if watch and line.startswith("READY"):
                    watch.start()
                elif watch:
                    result["peak"] = watch.stop()
                with contextlib.suppress(BrokenPipeError):  # its errors are told
                    process.stdin.write("\n")
                    process.stdin.flush()
            elif line.startswith("RESULT "):
                result |= json.loads(line.removeprefix("RESULT "))
        return result


class _Watch(threading.Thread):
    """Looks at the memory of a process and of those below it; shared pages count once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._peak = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            self._peak = max(self._peak, sum(map(_anonymous_bytes, _tree(self._pid))))

    def stop(self) -> int:
        """Bytes at most."""
        self._ended.set()
        self.join()
        return self._peak


def _tree(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in file.read_text().split():
                found += _tree(int(child))
    return found


def _anonymous_bytes(pid: int) -> int:
    """Its share of memory that no file stands behind."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        sizes = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", text, flags=re.MULTILINE)
        return sum(map(int, sizes)) * 1024
    return 0
