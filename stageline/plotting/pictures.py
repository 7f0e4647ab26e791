"""Pictures of an evaluation: samples with their predictions, and the shares of each group.

Samples are written as a Markdown table, too. Fonts for all pictures of the engine are set here.
"""

import textwrap
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from stageline.tables import markdown_table, natural_key

# fonts with Chinese, Japanese or Korean characters that systems come with, in order of preference
_CJK_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "PingFang SC"),
    *("Hiragino Sans GB", "Heiti SC", "Microsoft YaHei", "SimHei", "SimSun", "Arial Unicode MS"),
    *("Noto Sans CJK JP", "Unifont"),
)
_INSTALLED = {font.name for font in font_manager.fontManager.ttflist}
# a character comes from the first font that has it
matplotlib.rcParams["font.family"] = [
    "DejaVu Sans",
    *(name for name in _CJK_FONTS if name in _INSTALLED),
]


def save_figure(figure: Figure, path: Path, *, dpi: int = 100, has_pdf: bool = True) -> None:
    """Write a PNG file and next to it a PDF, for papers; each replaces the old one as a whole."""
    pdf = path.with_suffix(".pdf")
    options: dict[str, Any] = {"metadata": {"CreationDate": None}}  # the same picture: equal bytes
    files = [(path, "png", {"dpi": dpi}), (pdf, "pdf", options)]
    for target, kind, how in files if has_pdf else files[:1]:
        temporary = target.with_name(target.name + ".tmp")
        with warnings.catch_warnings():  # a character that no font has is drawn as a box
            warnings.filterwarnings("ignore", message="Glyph")
            figure.savefig(temporary, format=kind, **how)
        temporary.replace(target)


# inches, of a picture of groups
WIDTH = 7.0
BAR = 0.26
AROUND = 0.75  # space of a panel for its title and axis
LEGEND = 0.35
MOST_GROUPS = 40  # groups in a panel; the largest are shown

_COLOR, _UNPARSED, _CHANCE = "#4c78a8", "#c8ccd0", "#e45756"

Groups = Mapping[str, Mapping[str, Any]]


def groups_figure(report: Mapping[str, Any]) -> Figure | None:
    """Draw a panel a grouping: share of right answers, its interval, unparsed ones, chance.

    Grades, which have no Wilson interval, are shown by their mean. None: the report has no groups.
    """
    groupings: dict[str, Groups] = dict(report["groupings"])
    if report["groups"] and report["groups"] not in groupings.values():
        groupings = {"group": report["groups"], **groupings}
    if not groupings:
        return None
    panels = []
    for name, groups in groupings.items():
        largest = sorted(groups.items(), key=lambda item: -item[1]["num_samples"])[:MOST_GROUPS]
        from_top = sorted(largest, key=lambda item: natural_key(item[0]), reverse=True)
        panels.append((name, from_top))
    heights = [AROUND + BAR * len(groups) for _, groups in panels]
    figure = Figure(figsize=(WIDTH, sum(heights) + LEGEND), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, from_top) in zip(axes, panels, strict=True):
        has_grades = report["interval_95"] is None
        _draw(panel, name, from_top, overall=report["score"], has_grades=has_grades)
    named: dict[str, Any] = {}
    for panel in axes:
        named |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels())}
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=len(named),
                  frameon=False, fontsize=8)  # fmt: skip
    return figure


def _draw(
    axes: Axes,
    name: str,
    groups: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    overall: float | None,
    has_grades: bool,
) -> None:
    shares = [share for _, share in groups]
    scores = [share["score"] for share in shares]
    places = range(len(groups))
    unparsed = [share.get("unparsed_share", 0.0) for share in shares]
    if any(unparsed):
        axes.barh(places, unparsed, left=scores, color=_UNPARSED, label="unparsed")
    # graded scores have the bootstrap's interval only, a single one of them none
    intervals = [
        share["interval_95"] or share["bootstrap_95"] or [share["score"]] * 2 for share in shares
    ]
    lows = [max(0.0, score - low) for score, (low, _) in zip(scores, intervals, strict=True)]
    highs = [max(0.0, high - score) for score, (_, high) in zip(scores, intervals, strict=True)]
    axes.barh(places, scores, xerr=[lows, highs], color=_COLOR, capsize=2,
              error_kw={"elinewidth": 1}, label="score" if has_grades else "right")  # fmt: skip
    if overall is not None:
        axes.axvline(overall, color="#24292f", linewidth=0.8, linestyle="--", label="all samples")
    known = [(place, share["chance"]) for place, share in enumerate(shares) if "chance" in share]
    if known:  # each group has its own chance, as numbers of choices differ
        rows, chances = (numpy.array(column) for column in zip(*known, strict=True))
        axes.vlines(chances, rows - 0.45, rows + 0.45, colors=_CHANCE, lw=1.6, label="chance")
    labels = [f"{group} ({share['num_samples']})" for group, share in groups]
    axes.set_yticks(list(places), labels, fontsize=8, parse_math=False)
    most = max((high for _, high in intervals), default=1.0)  # bits of a byte may be more than 1
    axes.set(xlim=(0, max(1.0, most)), ylim=(-0.6, len(groups) - 0.4))
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    what = "mean score" if has_grades else "share of right answers"
    axes.set_title(f"{name}: {what}, 95 % intervals", fontsize=9, parse_math=False)


_COLORS = {True: "#1a7f37", False: "#cf222e", None: "#6e7781"}
_WORDS = {True: "right", False: "wrong", None: ""}
_LINE = 32  # characters; wide ones are twice as wide
_MOST_LINES = 4  # limit for the prediction and each other paragraph
Row = tuple[Sequence[Any] | None, Mapping[str, Any], str]  # images, sample, prediction


def plot_predictions(
    rows: Sequence[Row],
    path: Path,
    *,
    correct: Sequence[bool | None] | None = None,
    summary: str = "",
) -> None:
    """Write a grid of samples, and next to it `path` with the suffix .md, which cuts no text.

    Args:
        correct: True is green, False red, None grey; default: whether the prediction is the answer.
        summary: the heading of all; by default how many of these are wrong.
    """
    if not rows:
        return
    known = [shown(sample, images) for images, sample, _ in rows]
    if correct is None:
        answers = [answer.strip() for _, _, answer in known]
        pairs = zip(answers, rows, strict=True)
        correct = [answer == row[2].strip() if answer else None for answer, row in pairs]
    if not summary and (num_known := len(correct) - correct.count(None)):
        summary = f"{correct.count(False)} wrong of {num_known}"
    columns = min(6, len(rows))
    num_rows = -(-len(rows) // columns)
    height = 2.0 if all(image is None for image, _, _ in known) else 4.0
    figure = Figure(figsize=(2.4 * columns, height * num_rows + 0.3), layout="constrained")
    figure.suptitle(summary, fontsize=11, parse_math=False)
    style: dict[str, Any] = {"fontsize": 8, "parse_math": False}  # a dollar sign is one
    table = [["id", "", "sample"]]
    for place, (_, sample, prediction) in enumerate(rows):
        image, *texts = known[place]
        question, answer, said = (" ".join(str(one).split()) for one in (*texts, prediction))
        said, answer = f"→ {said or '(nothing)'}", answer and f"answer: {answer}"
        name, color = str(sample.get("id", place)), _COLORS[correct[place]]
        axes = figure.add_subplot(num_rows, columns, place + 1, xticks=[], yticks=[])
        if image is None:
            axes.set_box_aspect(0.02)
        else:
            picture = image.convert("RGB")
            picture.thumbnail((512, 512))  # no larger than what is drawn
            axes.imshow(picture)
        axes.set_title(_wrapped(said), color=color, weight="bold", **style)
        around = [_wrapped(text) for text in (question, answer) if text]
        axes.set_xlabel("\n".join([name, *around]), **style)
        for spine in axes.spines.values():
            spine.set(edgecolor=color, linewidth=1.5)
        whole = "\n".join(filter(None, (question, said, answer)))
        table.append([name, _WORDS[correct[place]], whole])
    save_figure(figure, path)
    head = f"{summary}.\n\n" if summary else ""
    text = f"{head}{markdown_table(table, num_texts=3)}\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def _wrapped(text: str) -> str:
    width = _LINE // 2 if any(unicodedata.east_asian_width(one) in "WF" for one in text) else _LINE
    return "\n".join(textwrap.wrap(text, width, max_lines=_MOST_LINES, placeholder="…"))


def shown(sample: Mapping[str, Any], images: Sequence[Any] | None) -> tuple[Any, str, str]:
    """Return the picture, the question and the answer that show a sample.

    Several images are put next to each other, at the height of the lowest. For messages, the
    question is the last turn of the user and the answer is the last turn of the assistant.
    """
    turns = {
        str(message.get("role")): _text_of(message.get("content"))
        for message in sample.get("messages") or []
        if isinstance(message, Mapping)
    }
    question = str(sample.get("question") or turns.get("user", ""))
    answer = sample.get("answer", sample.get("caption"))
    answer = turns.get("assistant", "") if answer is None else str(answer)
    if not images or len(images) == 1:
        return (images[0] if images else None), question, answer
    height = min(image.height for image in images)
    scaled = [
        image.convert("RGB").resize((max(1, round(image.width * height / image.height)), height))
        for image in images
    ]
    joined = Image.new("RGB", (sum(image.width for image in scaled), height))
    for index, image in enumerate(scaled):
        joined.paste(image, (sum(before.width for before in scaled[:index]), 0))
    return joined, question, answer


def _text_of(content: Any) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content or "")
