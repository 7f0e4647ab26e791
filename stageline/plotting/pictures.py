"""Draws samples with their predictions: a grid of pictures, and the same as a Markdown table."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stageline.plotting.text import drawable, font_families, markdown_table, text_inches, wrap_text

# inches, but for the last one
CELL_WIDTH = 2.2
CARD_WIDTH = 4.4  # of a sample without a picture
GAP = 0.12
LINE_HEIGHT = 0.15
MARGIN = 0.06
FONT_SIZE = 8  # points

ARROW = "→ "
_COLORS = {True: "#1a7f37", False: "#cf222e", None: "#6e7781"}
_WORDS = {True: "right", False: "wrong", None: ""}
_PLAIN = "#24292f"


def caption(question: str, prediction: str, answer: str) -> str:
    """What stands below a sample: the question, an arrow with the prediction, the answer."""
    lines = [_one_line(question), ARROW + (_one_line(prediction) or "(nothing)")]
    if answer:
        lines.append("answer: " + _one_line(answer))
    return "\n".join(line for line in lines if line)


def plot_predictions(
    images: Sequence[Any | None],
    titles: Sequence[str],
    correct: Sequence[bool | None],
    path: str | Path,
    *,
    columns: int = 6,
) -> None:
    """Writes a grid of samples, and beside it `path` with the suffix .md, which cuts no text.

    Args:
        images: one picture per sample, None for a sample of text.
        titles: what stands below each; the line that begins with an arrow has the frame's color
            (`caption` makes such a text).
        correct: True is framed green, False red, None grey.
        columns: at most; samples of text alone are drawn wider and fewer in a row.
    """
    path = Path(path)
    if not images:
        return
    figure = predictions_figure(images, titles, correct, columns=columns)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=100, format="png")
    temporary.replace(path)
    path.with_suffix(".md").write_text(predictions_markdown(titles, correct), encoding="utf-8")


def predictions_markdown(titles: Sequence[str], correct: Sequence[bool | None]) -> str:
    """A table of all texts in full length."""
    rows = [
        (str(index), _WORDS[is_correct], title)
        for index, (title, is_correct) in enumerate(zip(titles, correct, strict=True))
    ]
    known = [is_correct for is_correct in correct if is_correct is not None]
    summary = f"{sum(known)} of {len(known)} right.\n\n" if known else ""
    return summary + markdown_table(("#", "", "sample"), rows)


def predictions_figure(
    images: Sequence[Any | None],
    titles: Sequence[str],
    correct: Sequence[bool | None],
    *,
    columns: int = 6,
) -> Figure:
    """The grid: rows are as high as their pictures and texts, all pictures equally wide."""
    has_pictures = any(image is not None for image in images)
    width = CELL_WIDTH if has_pictures else CARD_WIDTH
    if not has_pictures:
        columns = max(1, columns // 2)
    columns = max(1, min(columns, len(images)))
    texts = [_wrap_title(title, width - 2 * MARGIN) for title in titles]
    pictures = [_small(image) for image in images]
    rows = [
        range(start, min(start + columns, len(images))) for start in range(0, len(images), columns)
    ]
    boxes = [_row_height([pictures[index] for index in row], width) for row in rows]
    captions = [LINE_HEIGHT * max(len(texts[index]) for index in row) + 2 * MARGIN for row in rows]
    height = sum(boxes) + sum(captions) + GAP * (len(rows) + 1)
    figure = Figure(figsize=(columns * (width + GAP) + GAP, height))
    top = height - GAP
    for row, box, below in zip(rows, boxes, captions, strict=True):
        for column, index in enumerate(row):
            left = GAP + column * (width + GAP)
            axes = _add_cell(figure, (left, top - box - below, width, box + below))
            _draw_cell(axes, pictures[index], texts[index], correct[index], below)
        top -= box + below + GAP
    return figure


def _add_cell(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Axes for one sample; their unit is the inch."""
    (left, bottom, width, height), (full_width, full_height) = box, figure.get_size_inches()
    axes = figure.add_axes(
        (left / full_width, bottom / full_height, width / full_width, height / full_height)
    )
    axes.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[])
    return axes


def _draw_cell(
    axes: Axes,
    picture: Any | None,
    lines: Sequence[tuple[str, bool]],
    is_correct: bool | None,
    text_height: float,
) -> None:
    """One sample: the picture above, its text below, a frame around both."""
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
    for index, (line, is_prediction) in enumerate(lines):
        axes.text(
            MARGIN,
            top - LINE_HEIGHT * (index + 0.5),
            line,
            va="center_baseline",
            fontsize=FONT_SIZE,
            family=list(font_families()),
            weight="bold" if is_prediction else "normal",
            color=color if is_prediction else _PLAIN,
            parse_math=False,  # a dollar sign is a dollar sign
            clip_on=True,
        )
    for spine in axes.spines.values():
        spine.set(edgecolor=color, linewidth=1.5)


def _wrap_title(title: str, width: float) -> list[tuple[str, bool]]:
    """Lines of at most `width` inches, and whether each belongs to the prediction."""
    lines = []
    for paragraph in title.split("\n"):
        is_prediction = paragraph.startswith(ARROW)
        measure = functools.partial(text_inches, size=FONT_SIZE, is_bold=is_prediction)
        wrapped = wrap_text(drawable(paragraph), width, measure=measure)
        lines += [(line, is_prediction) for line in wrapped]
    return lines


def _row_height(pictures: Sequence[Any | None], width: float) -> float:
    """Of the pictures of a row; a very tall one is drawn narrower instead."""
    ratios = [picture.height / picture.width for picture in pictures if picture is not None]
    return width * min(1.4, max(ratios, default=0.0))


def _small(image: Any | None) -> Any | None:
    """A copy that is not larger than what is drawn."""
    if image is None:
        return None
    picture = image.convert("RGB")
    picture.thumbnail((512, 512))
    return picture


def _one_line(text: str) -> str:
    return " ".join(str(text).split())
