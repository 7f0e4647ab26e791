"""Draws the loss curve of a run from its log."""

import json
from pathlib import Path

from matplotlib.figure import Figure

SMOOTHING = 0.9


def read_log(path: str | Path) -> tuple[list[dict], list[dict]]:
    """The training and the evaluation records of a JSON-lines log; a torn last line is left out."""
    steps, evaluations = [], []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        (evaluations if record.get("kind") == "eval" else steps).append(record)
    return steps, evaluations


def smooth(values: list[float], *, weight: float = SMOOTHING) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        smoothed.append(average / (1 - weight**count))
    return smoothed


def loss_figure(steps: list[dict], evaluations: list[dict]) -> Figure:
    """Loss of each step, smoothed, and on held-out samples; the learning rate below."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    known = [record for record in steps if record.get("loss") is not None]
    x, y = [record["step"] for record in known], [record["loss"] for record in known]
    upper.plot(x, y, color="tab:blue", alpha=0.3, label="training, each step")
    upper.plot(x, smooth(y), color="tab:blue", label="training, smoothed")
    held_out = [record for record in evaluations if record.get("loss") is not None]
    if held_out:
        upper.plot(
            [record["step"] for record in held_out],
            [record["loss"] for record in held_out],
            "o-",
            color="tab:red",
            label="held out",
        )
    upper.set_ylabel("loss per supervised token")
    upper.legend()
    upper.grid(alpha=0.3)
    lower.plot(x, [record["learning_rate"] for record in known], color="tab:green")
    lower.set_ylabel("learning rate")
    lower.set_xlabel("optimizer step")
    lower.grid(alpha=0.3)
    return figure


def plot_loss(log_path: str | Path, png_path: str | Path) -> None:
    """Draws the log at `log_path` into `png_path`."""
    loss_figure(*read_log(log_path)).savefig(png_path, dpi=100)
