"""Pictures of an evaluation: samples with their predictions, and the shares of each group.

Samples are written as a Markdown table, too. Fonts and lines that fit are found here for all
pictures of the engine.
"""

import functools
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import regex  # transformers brings it
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import text_to_path
from PIL import Image

from stageline.tables import markdown_table, natural_key

# fonts with Chinese, Japanese or Korean characters that systems come with, in order of preference
_CJK_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "PingFang SC"),
    *("Hiragino Sans GB", "Heiti SC", "Microsoft YaHei", "SimHei", "SimSun", "Arial Unicode MS"),
    *("Noto Sans CJK JP", "Unifont"),
)
_PLACEHOLDER = "□"
# pieces that are not broken, with the spaces before them: words, and wide characters one by one;
# no line begins with a closing mark
_WIDE = rf"\p{{East_Asian_Width=W}}\p{{East_Asian_Width=F}}{_PLACEHOLDER}"
_CLOSING = r"[,.;:!?)\]}，。、；：！？）】》」』”’]"
_PIECES = regex.compile(rf" *(?:[^ {_WIDE}]+|[{_WIDE}]){_CLOSING}*| +")


@functools.cache
def font_families() -> tuple[str, ...]:
    """Return the families to draw with: a character comes from the first one that has it."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return ("DejaVu Sans", *(name for name in _CJK_FONTS if name in installed))


@functools.cache
def _known_characters() -> frozenset[int]:
    properties = [font_manager.FontProperties(family=name) for name in font_families()]
    fonts = [font_manager.get_font(font_manager.findfont(each)) for each in properties]
    return frozenset().union(*(font.get_charmap() for font in fonts))


def drawable(text: str) -> str:
    """Return the text with a box for each character that no font has; control characters go."""
    shown = []
    for character in text.replace("\t", "    "):
        if character == "\n" or ord(character) in _known_characters():
            shown.append(character)
        elif unicodedata.category(character)[0] not in "CM":  # marks join the one before
            shown.append(_PLACEHOLDER)
    return "".join(shown)


def text_inches(text: str, *, size: float, is_bold: bool = False) -> float:
    """Return the width of one line as drawn with letters of `size` points."""
    weight = "bold" if is_bold else "normal"
    font = font_manager.FontProperties(family=list(font_families()), weight=weight, size=size)
    points, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return points / 72 * 1.04  # hinting moves letters to whole pixels


def wrap_text(
    text: str, width: float, *, measure: Callable[[str], float], max_lines: int = 8
) -> list[str]:
    """Return lines that are not wider than `width`.

    Breaks at spaces, next to wide characters, and inside words that are longer than a line. The
    text that does not fit into `max_lines` ends in "…".

    Args:
        measure: width of a text, in the unit of `width`.
    """
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        line = ""
        for word in _PIECES.findall(paragraph):
            if line and measure(line + word) > width:
                lines.append(line.rstrip())
                line, word = "", word.lstrip()
            while measure(word) > width:  # a word longer than a line
                end = 1
                while measure(word[: end + 1]) <= width:
                    end += 1
                lines.append(word[:end].rstrip())
                word = word[end:]
            line += word
        lines.append(line.rstrip())
    if len(lines) <= max_lines:
        return lines
    last = lines[max_lines - 1]
    while last and measure(last + "…") > width:
        last = last[:-1]
    return [*lines[: max_lines - 1], last.rstrip() + "…"]


def save_figure(figure: Figure, path: Path, *, dpi: int = 100, has_pdf: bool = True) -> None:
    """Write a PNG file and next to it a PDF, for papers; each replaces the old one as a whole."""
    pdf = path.with_suffix(".pdf")
    options: dict[str, Any] = {"metadata": {"CreationDate": None}}  # the same picture: equal bytes
    files = [(path, "png", {"dpi": dpi}), (pdf, "pdf", options)]
    for target, kind, how in files if has_pdf else files[:1]:
        temporary = target.with_name(target.name + ".tmp")
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


def plot_groups(report: Mapping[str, Any], path: Path) -> None:
    """Write a picture of all groupings of a report; where it has none, nothing."""
    figure = groups_figure(report)
    if figure is not None:
        save_figure(figure, path, dpi=110)


def groups_figure(report: Mapping[str, Any]) -> Figure | None:
    """Draw a panel a grouping: share of right answers, its interval, unparsed ones, chance.

    Grades, which have no Wilson interval, are shown by their mean.
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
    labels = [f"{drawable(group)} ({share['num_samples']})" for group, share in groups]
    axes.set_yticks(list(places), labels, fontsize=8, family=list(font_families()))
    most = max((high for _, high in intervals), default=1.0)  # bits of a byte may be more than 1
    axes.set(xlim=(0, max(1.0, most)), ylim=(-0.6, len(groups) - 0.4))
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    what = "mean score" if has_grades else "share of right answers"
    axes.set_title(f"{name}: {what}, 95 % intervals", fontsize=9, parse_math=False)


# inches, but for the last one
CELL_WIDTH = 2.2
CARD_WIDTH = 4.4  # width of a sample without a picture
GAP = 0.12
HEAD = 0.3  # above the grid
LINE_HEIGHT = 0.15
MARGIN = 0.06
FONT_SIZE = 8  # points

ARROW = "→ "
_COLORS = {True: "#1a7f37", False: "#cf222e", None: "#6e7781"}
_WORDS = {True: "right", False: "wrong", None: ""}
_PLAIN, _GREY = "#24292f", "#6e7781"


def caption(question: str, prediction: str, answer: str) -> str:
    """Return the text below a sample: the question, an arrow with the prediction, the answer."""
    question, prediction, answer = (
        " ".join(str(text).split()) for text in (question, prediction, answer)
    )
    lines = [question, ARROW + (prediction or "(nothing)"), answer and f"answer: {answer}"]
    return "\n".join(line for line in lines if line)


def plot_predictions(
    images: Sequence[Any | None],
    titles: Sequence[str],
    correct: Sequence[bool | None],
    path: Path,
    *,
    ids: Sequence[str] = (),
    summary: str = "",
    columns: int = 6,
) -> None:
    """Write a grid of samples, and next to it `path` with the suffix .md, which cuts no text.

    Args:
        images: one picture per sample, None for a sample of text.
        titles: the text below each, as `caption` makes it; the line with an arrow has the frame's
            color.
        correct: True is framed green, False red, None grey.
        ids: of the samples, shown with them.
        summary: the heading; by default how many of these are wrong.
        columns: at most; samples of text only are drawn wider and fewer in a row.
    """
    if images:
        known = [is_correct for is_correct in correct if is_correct is not None]
        summary = summary or (f"{known.count(False)} wrong of {len(known)}" if known else "")
        how: dict[str, Any] = {"ids": ids, "summary": summary}
        save_figure(predictions_figure(images, titles, correct, columns=columns, **how), path)
        text = predictions_markdown(titles, correct, **how)
        path.with_suffix(".md").write_text(text, encoding="utf-8")


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


def predictions_markdown(
    titles: Sequence[str],
    correct: Sequence[bool | None],
    *,
    ids: Sequence[str] = (),
    summary: str = "",
) -> str:
    """Return a table of all texts in full length."""
    rows = [["id" if ids else "#", "", "sample"]]
    for index, (title, is_correct) in enumerate(zip(titles, correct, strict=True)):
        rows.append([ids[index] if ids else str(index), _WORDS[is_correct], title])
    head = f"{summary}.\n\n" if summary else ""
    return f"{head}{markdown_table(rows, num_texts=3)}\n"


def wrong_first(num_wrong: int, num_samples: int, num_shown: int) -> str:
    """Return the heading of samples of which the wrong ones are shown first."""
    text = f"{num_wrong} wrong of {num_samples}"
    if num_wrong > num_shown:
        return f"{text}, {num_shown} of them shown"
    return f"{text}, shown first" if num_wrong else text


def predictions_figure(
    images: Sequence[Any | None],
    titles: Sequence[str],
    correct: Sequence[bool | None],
    *,
    ids: Sequence[str] = (),
    summary: str = "",
    columns: int = 6,
) -> Figure:
    """Draw the grid: rows as high as their pictures and texts, all pictures equally wide."""
    has_pictures = any(image is not None for image in images)
    width = CELL_WIDTH if has_pictures else CARD_WIDTH
    if not has_pictures:
        columns = max(1, columns // 2)
    columns = max(1, min(columns, len(images)))
    texts: list[list[tuple[str, str]]] = []  # lines of each, with their color; "": the frame's
    measure = functools.partial(text_inches, size=FONT_SIZE)
    wrap = functools.partial(wrap_text, width=width - 2 * MARGIN)
    for index, title in enumerate(titles):
        texts.append([])
        if ids:
            texts[-1].append((wrap(drawable(ids[index]), measure=measure, max_lines=1)[0], _GREY))
        for paragraph in title.split("\n"):
            bold = paragraph.startswith(ARROW)
            lines = wrap(drawable(paragraph), measure=functools.partial(measure, is_bold=bold))
            texts[-1] += [(line, "" if bold else _PLAIN) for line in lines]
    pictures = [None if image is None else image.convert("RGB") for image in images]
    for picture in filter(None, pictures):
        picture.thumbnail((512, 512))  # no larger than what is drawn
    rows = [
        range(start, min(start + columns, len(images))) for start in range(0, len(images), columns)
    ]
    captions = [LINE_HEIGHT * max(len(texts[index]) for index in row) + 2 * MARGIN for row in rows]
    heights = []
    for row, below in zip(rows, captions, strict=True):
        ratios = [one.height / one.width for index in row if (one := pictures[index]) is not None]
        # a very tall picture is drawn narrower instead
        heights.append(width * min(1.4, max(ratios, default=0.0)) + below)
    full_width = columns * (width + GAP) + GAP
    head = HEAD if summary else 0.0
    full_height = sum(heights) + GAP * (len(rows) + 1) + head
    figure = Figure(figsize=(full_width, full_height))
    if summary:
        left, middle = GAP / full_width, 1 - head / 2 / full_height
        figure.text(left, middle, drawable(summary), va="center", fontsize=11, parse_math=False)
    grid = figure.add_gridspec(
        len(rows), columns, height_ratios=heights,
        left=GAP / full_width, right=1 - GAP / full_width, wspace=GAP / width,
        bottom=GAP / full_height, top=1 - (GAP + head) / full_height,
        hspace=GAP * len(rows) / sum(heights),
    )  # fmt: skip
    for place, row in enumerate(rows):
        for column, index in enumerate(row):
            axes = figure.add_subplot(grid[place, column], xticks=[], yticks=[])
            axes.set(xlim=(0, width), ylim=(0, heights[place]))  # their unit is the inch
            _draw_cell(axes, pictures[index], texts[index], correct[index], captions[place])
    return figure


def _draw_cell(
    axes: Axes,
    picture: Any | None,
    lines: Sequence[tuple[str, str]],
    is_correct: bool | None,
    text_height: float,
) -> None:
    """Draw one sample: the picture above, its text below, a frame around both."""
    (_, width), (_, height) = axes.get_xlim(), axes.get_ylim()
    if picture is not None:
        box_height = height - text_height
        scale = min(width / picture.width, box_height / picture.height)
        half, up = picture.width * scale / 2, picture.height * scale / 2
        # low pictures stand on their text
        extent = (width / 2 - half, width / 2 + half, text_height, text_height + 2 * up)
        axes.imshow(picture, extent=extent, aspect="auto", interpolation="antialiased")
        axes.set(xlim=(0, width), ylim=(0, height))
        top = text_height - MARGIN
    else:
        top = height - MARGIN
        axes.set_facecolor("#f6f8fa")
    color = _COLORS[is_correct]
    for index, (line, line_color) in enumerate(lines):
        axes.text(
            MARGIN,
            top - LINE_HEIGHT * (index + 0.5),
            line,
            va="center_baseline",
            fontsize=FONT_SIZE,
            family=list(font_families()),
            weight="normal" if line_color else "bold",
            color=line_color or color,
            parse_math=False,  # a dollar sign is a dollar sign
            clip_on=True,
        )
    for spine in axes.spines.values():
        spine.set(edgecolor=color, linewidth=1.5)
