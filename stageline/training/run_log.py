"""What a run leaves behind: a JSON-lines log, TensorBoard events, a bar, the loss curve.

Only the main rank writes; on others every method does nothing.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stageline.plotting.curves import plot_loss


class RunLog:
    """Writes into a run folder; an existing log is continued.

    Args:
        is_main: whether this rank writes.
    """

    def __init__(self, folder: str | Path, *, total_steps: int, is_main: bool = True) -> None:
        self.folder = Path(folder)
        self.is_main = is_main
        if not is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "log.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._events = _open_events(self.folder / "tensorboard")
        # a log file wants lines, not a bar that redraws itself
        self._bar = tqdm(
            total=total_steps, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        self._start = time.time()

    def log_step(self, step: int, figures: dict[str, Any], *, shown: str) -> None:
        """Logs one optimizer step; `shown` stands beside the bar."""
        if not self.is_main:
            return
        self._write("train", step, figures)
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        if self._bar.disable and (step % 10 == 0 or step == self._bar.total):
            left = (time.time() - self._start) / max(step, 1) * (self._bar.total - step)
            print(f"step {step}/{self._bar.total} {shown} left {left:.0f}s", flush=True)

    def log_eval(self, step: int, figures: dict[str, Any]) -> None:
        """Logs an evaluation and redraws the curve."""
        if self.is_main:
            self._write("eval", step, figures)
            self.draw()

    def print(self, text: str) -> None:
        """Prints without breaking the bar."""
        if self.is_main:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def draw(self) -> None:
        """Draws loss.png from the log."""
        if self.is_main:
            plot_loss(self.path, self.folder / "loss.png")

    def close(self) -> None:
        """Ends the bar and all files."""
        if self.is_main:
            self._bar.close()
            self.draw()
            self._file.close()
            if self._events is not None:
                self._events.close()

    def _write(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **_finite(figures)}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in figures.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name}", value, step)


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON knows neither inf nor nan: they become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def _open_events(folder: Path) -> Any | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("note: tensorboard is not installed, so no events are written", file=sys.stderr)
        return None
    return SummaryWriter(str(folder))
