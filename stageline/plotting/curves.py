"""Draws the loss curve of a run from its log. Reads one file, writes one file."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# a loss that falls by more than this factor shows its end on a logarithmic axis only
LOG_SCALE_FROM = 30.0


def read_log(path: str | Path) -> tuple[list[dict], list[dict]]:
    """The training and the evaluation records of a JSON-lines log, in order of steps.

    A line that a crash cut off is left out. Where a run was continued from an earlier step, what
    the log holds beyond that step belongs to weights that are gone: the later lines replace it.
    """
    records: list[dict] = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if not isinstance(record, dict) or "step" not in record:
                continue
            while records and _order(records[-1]) >= _order(record):
                records.pop()
            records.append(record)
    steps = [record for record in records if not _is_eval(record)]
    return steps, [record for record in records if _is_eval(record)]


def smooth(values: Sequence[float], *, width: int | None = None) -> list[float]:
    """Running mean over `width` values around each; it does not lag behind.

    At the ends the window shrinks on both sides, so that the first and the last value stay.

    Args:
        width: odd; by default about a twentieth of the values.
    """
    count = len(values)
    reach = (width - 1) // 2 if width is not None else count // 40
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    smoothed = []
    for index in range(count):
        side = min(reach, index, count - 1 - index)
        smoothed.append((sums[index + side + 1] - sums[index - side]) / (2 * side + 1))
    return smoothed


def loss_figure(
    steps: Sequence[dict], evaluations: Sequence[dict], *, title: str | None = None
) -> Figure:
    """Loss of each step, smoothed, and on held-out samples; the learning rate below.

    What the loss tells besides is drawn thinly, on held-out samples as crosses. Steps whose loss or
    gradient was not finite are marked at the foot of the upper picture.
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses = _draw_losses(upper, steps)
    losses += _draw_evaluations(upper, evaluations)
    _draw_figures(upper, steps, evaluations)
    _mark_non_finite(upper, steps)
    if losses and min(losses) > 0 and max(losses) > LOG_SCALE_FROM * min(losses):
        upper.set_yscale("log")
    upper.set_ylabel("loss per supervised token")
    if upper.get_legend_handles_labels()[0]:
        upper.legend()
    if title:
        upper.set_title(title, fontsize=10, parse_math=False)
    rates = [
        (record["step"], record["learning_rate"]) for record in steps if "learning_rate" in record
    ]
    lower.plot([step for step, _ in rates], [rate for _, rate in rates], color="tab:green")
    lower.set_ylabel("learning rate")
    lower.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    lower.set_xlabel("optimizer step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_loss(log_path: str | Path, png_path: str | Path) -> None:
    """Draws the log at `log_path` into `png_path`; the picture is named after the log's folder.

    Who looks at the file meanwhile sees the old or the new one, never half of it.
    """
    png_path = Path(png_path)
    steps, evaluations = read_log(log_path)
    figure = loss_figure(steps, evaluations, title=Path(log_path).resolve().parent.name)
    temporary = png_path.with_name(png_path.name + ".tmp")
    figure.savefig(temporary, dpi=100, format="png")
    temporary.replace(png_path)


def _draw_losses(axes: Axes, steps: Sequence[dict]) -> list[float]:
    known = [record for record in steps if _is_number(record.get("loss"))]
    x, y = [record["step"] for record in known], [record["loss"] for record in known]
    if not known:
        return []
    smoothed = smooth(y)
    if smoothed == y:  # too few steps to smooth
        axes.plot(x, y, color="tab:blue", marker=".", label=f"training (last {y[-1]:.4g})")
        return y
    axes.plot(x, y, color="tab:blue", alpha=0.35, linewidth=1, label="training")
    axes.plot(x, smoothed, color="tab:blue", label=f"training, smoothed (last {y[-1]:.4g})")
    return y


def _draw_evaluations(axes: Axes, evaluations: Sequence[dict]) -> list[float]:
    known = [record for record in evaluations if _is_number(record.get("loss"))]
    x, y = [record["step"] for record in known], [record["loss"] for record in known]
    if not known:
        return []
    best = min(known, key=lambda record: record["loss"])
    label = f"held out (last {y[-1]:.4g}, best {best['loss']:.4g} at step {best['step']})"
    axes.plot(x, y, "o-", color="tab:red", markersize=4, label=label)
    return y


def _draw_figures(axes: Axes, steps: Sequence[dict], evaluations: Sequence[dict]) -> None:
    names = dict.fromkeys(name for record in steps for name in record.get("loss_figures", ()))
    for index, name in enumerate(names):
        color = f"C{(index + 4) % 10}"  # other ones than those of the losses
        for records, style in ((steps, "-"), (evaluations, "x")):
            known = [record for record in records if _is_number(record.get(name))]
            x, y = [record["step"] for record in known], [record[name] for record in known]
            y = smooth(y) if style == "-" else y
            label = name.replace("_", " ") if style == "-" else None
            axes.plot(x, y, style, color=color, linewidth=0.8, markersize=4, label=label)


def _mark_non_finite(axes: Axes, steps: Sequence[dict]) -> None:
    bad = [record["step"] for record in steps if record.get("non_finite")]
    if bad:
        axes.plot(
            bad,
            [0.02] * len(bad),
            "x",
            color="black",
            transform=axes.get_xaxis_transform(),  # the foot of the picture, whatever the scale
            label=f"not finite ({len(bad)} steps)",
        )


def _order(record: dict) -> tuple[int, bool]:
    return record["step"], _is_eval(record)  # a step's evaluation comes after the step


def _is_eval(record: dict) -> bool:
    return record.get("kind") == "eval"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
