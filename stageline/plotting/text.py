"""Text in pictures: fonts that have its characters, and lines that fit. Draws nothing."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# fonts with Chinese, Japanese or Korean characters that systems come with, in order of preference
_CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "Source Han Sans CN",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Hiragino Sans GB",
    "Heiti SC",
    "Microsoft YaHei",
    "SimHei",
    "SimSun",
    "Arial Unicode MS",
    "Noto Sans CJK JP",
    "Unifont",
)
_PLACEHOLDER = "□"
_NOT_FIRST = frozenset(",.;:!?)]}，。、；：！？）】》」』”’")


@lru_cache(maxsize=1)
def font_families() -> tuple[str, ...]:
    """The families to draw with: a character comes from the first one that has it."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return ("DejaVu Sans", *(name for name in _CJK_FONTS if name in installed))


@lru_cache(maxsize=4)
def _fonts(is_bold: bool) -> tuple[tuple[str, frozenset[int]], ...]:
    """File and characters of each family."""
    weight = "bold" if is_bold else "normal"
    paths = [
        font_manager.findfont(font_manager.FontProperties(family=name, weight=weight))
        for name in font_families()
    ]
    return tuple((path, frozenset(font_manager.get_font(path).get_charmap())) for path in paths)


def drawable(text: str) -> str:
    """The text with a box for each character that no font has; control characters go."""
    known = frozenset().union(*(characters for _, characters in _fonts(is_bold=False)))
    shown = []
    for character in text.replace("\t", "    "):
        if character == "\n" or ord(character) in known:
            shown.append(character)
        elif unicodedata.category(character)[0] not in "CM":  # marks join the one before
            shown.append(_PLACEHOLDER)
    return "".join(shown)


def text_columns(text: str) -> float:
    """Columns that the text takes where a Chinese character takes two."""
    return sum(_columns(character) for character in text)


@lru_cache(maxsize=8192)
def _ems(character: str, is_bold: bool) -> float:
    for path, characters in _fonts(is_bold):
        if ord(character) in characters:
            font = font_manager.get_font(path)
            font.set_size(100, 72)
            return font.load_char(ord(character)).linearHoriAdvance / 65536 / 100
    return 1.0


def text_inches(text: str, *, size: float, is_bold: bool = False) -> float:
    """Width of one line as drawn with letters of `size` points."""
    hinting = 1.04  # letters are moved to whole pixels
    return sum(_ems(character, is_bold) for character in text) * size / 72 * hinting


def wrap_text(
    text: str,
    width: float,
    *,
    max_lines: int = 8,
    measure: Callable[[str], float] = text_columns,
) -> list[str]:
    """Lines that are not wider than `width`.

    Breaks at spaces, beside wide characters, and inside words that are longer than a line. What
    does not fit into `max_lines` ends in "…".

    Args:
        measure: width of a text, in the unit of `width`.
    """
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += _wrap_paragraph(paragraph, width, measure)
    if len(lines) <= max_lines:
        return lines
    last = lines[max_lines - 1]
    while last and measure(last + "…") > width:
        last = last[:-1]
    return [*lines[: max_lines - 1], last.rstrip() + "…"]


def _wrap_paragraph(paragraph: str, width: float, measure: Callable[[str], float]) -> list[str]:
    lines, line = [], ""
    for word in _words(paragraph):
        if line and measure(line + word) > width:
            lines.append(line.rstrip())
            line, word = "", word.lstrip()
        while measure(word) > width:  # a word longer than a line
            head = _head(word, width, measure)
            lines.append(head.rstrip())
            word = word[len(head) :]
        line += word
    return [*lines, line.rstrip()]


def _words(paragraph: str) -> list[str]:
    """What must not be broken; the spaces before a word belong to it."""
    words: list[str] = []
    for character in paragraph:
        is_own = _columns(character) == 2 or (bool(words) and _columns(words[-1][-1]) == 2)
        starts = is_own and character not in _NOT_FIRST
        if not words or starts or (character == " " and words[-1].strip() != ""):
            words.append(character)
        else:
            words[-1] += character
    return words


def _head(word: str, width: float, measure: Callable[[str], float]) -> str:
    end = 1
    while end < len(word) and measure(word[: end + 1]) <= width:
        end += 1
    return word[:end]


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    if character == _PLACEHOLDER:
        return 2
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def markdown_cell(text: str) -> str:
    """The text as it can stand in a cell of a Markdown table."""
    for mark, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|")):
        text = text.replace(mark, written)
    return "<br>".join(text.splitlines())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells may hold any text."""
    lines = [
        header,
        ["---"] * len(header),
        *[[markdown_cell(cell) for cell in row] for row in rows],
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


# -- draws the shares of a report: a bar for each group, with its interval, a panel a grouping ----

# inches
WIDTH = 7.0
BAR = 0.26
AROUND = 0.75  # of a panel, for its title and axis
MOST_GROUPS = 40  # of a panel; the largest ones

_COLOR, _UNPARSED = "#4c78a8", "#c8ccd0"

Groups = Mapping[str, Mapping[str, Any]]


def plot_groups(report: Mapping[str, Any], path: str | Path) -> None:
    """Writes a picture of all groupings of a report; where it has none, nothing."""
    figure = groups_figure(report)
    if figure is None:
        return
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)


def groups_figure(report: Mapping[str, Any]) -> Figure | None:
    """A panel a grouping: share of right answers, its interval, the unparsed ones behind it."""
    groupings: dict[str, Groups] = dict(report["groupings"])
    if report["groups"] and report["groups"] not in groupings.values():
        groupings = {"group": report["groups"], **groupings}
    if not groupings:
        return None
    panels = [(name, _largest(groups)) for name, groups in groupings.items()]
    heights = [AROUND + BAR * len(groups) for _, groups in panels]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, groups) in zip(axes, panels, strict=True):
        _draw(panel, name, groups, overall=report["score"])
    return figure


def _largest(groups: Groups) -> list[tuple[str, Mapping[str, Any]]]:
    """The groups with most samples, in order of their names, from the top."""
    by_size = sorted(groups.items(), key=lambda item: -item[1]["num_samples"])[:MOST_GROUPS]
    return sorted(by_size, reverse=True)


def _draw(
    axes: Axes,
    name: str,
    groups: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    overall: float | None,
) -> None:
    shares = [share for _, share in groups]
    scores = [share["score"] for share in shares]
    places = range(len(groups))
    axes.barh(places, [share.get("unparsed_share", 0.0) for share in shares], left=scores,
              color=_UNPARSED, label="unparsed")  # fmt: skip
    intervals = [_interval(share) for share in shares]
    lows = [max(0.0, score - low) for score, (low, _) in zip(scores, intervals, strict=True)]
    highs = [max(0.0, high - score) for score, (_, high) in zip(scores, intervals, strict=True)]
    axes.barh(places, scores, xerr=[lows, highs], color=_COLOR, capsize=2,
              error_kw={"elinewidth": 1}, label="right")  # fmt: skip
    if overall is not None:
        axes.axvline(overall, color="#24292f", linewidth=0.8, linestyle="--", label="all")
    labels = [f"{drawable(group)} ({share['num_samples']})" for group, share in groups]
    axes.set_yticks(list(places), labels, fontsize=8, family=list(font_families()))
    axes.set(xlim=(0, 1))
    axes.set_title(f"{name}: share of right answers, 95 % intervals", fontsize=9)
    axes.legend(fontsize=7, loc="lower right")


def _interval(share: Mapping[str, Any]) -> Sequence[float]:
    """That of a share; graded scores have the bootstrap's alone, a single one of them none."""
    return share["interval_95"] or share["bootstrap_95"] or [share["score"]] * 2
