"""Text in pictures: fonts that have its characters, and lines that fit. Draws nothing."""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from matplotlib import font_manager

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
_BREAKS_BEFORE = set(",.;:!?)]}，。、；：！？）】》」』”’")


@lru_cache(maxsize=1)
def font_families() -> tuple[str, ...]:
    """The families to draw with: a character comes from the first one that has it."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return ("DejaVu Sans", *(name for name in _CJK_FONTS if name in installed))


@lru_cache(maxsize=1)
def _known_characters() -> frozenset[int]:
    paths = [
        font_manager.findfont(font_manager.FontProperties(family=name)) for name in font_families()
    ]
    return frozenset().union(*(font_manager.get_font(path).get_charmap() for path in paths))


def drawable(text: str) -> str:
    """The text with a box for each character that no font has; control characters go."""
    known = _known_characters()
    shown = []
    for character in text.replace("\t", "    "):
        if character == "\n" or ord(character) in known:
            shown.append(character)
        elif unicodedata.category(character)[0] not in "CM":  # marks join the one before
            shown.append(_PLACEHOLDER)
    return "".join(shown)


def text_width(text: str) -> int:
    """Columns that the text takes where a Chinese character takes two."""
    return sum(_character_width(character) for character in text)


def wrap_text(text: str, width: int, *, max_lines: int = 8) -> list[str]:
    """Lines of at most `width` columns.

    Breaks at spaces, beside wide characters, and inside words that are longer than a line. What
    does not fit into `max_lines` ends in "…".
    """
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += _wrap_paragraph(paragraph, width)
    if len(lines) <= max_lines:
        return lines
    last = lines[max_lines - 1]
    while text_width(last) > width - 1:
        last = last[:-1]
    return [*lines[: max_lines - 1], last.rstrip() + "…"]


def _wrap_paragraph(paragraph: str, width: int) -> list[str]:
    lines, line, used = [], "", 0
    for word in _words(paragraph):
        size = text_width(word)
        if used + len(word) - len(word.lstrip()) and used + size > width:
            lines.append(line.rstrip())
            line, used = "", 0
            word = word.lstrip()
            size = text_width(word)
        while size > width:  # a word longer than a line
            head = _head(word, width)
            lines.append(head)
            word = word[len(head) :]
            size = text_width(word)
        line += word
        used += size
    return [*lines, line.rstrip()]


def _words(paragraph: str) -> list[str]:
    """What must not be broken; the spaces before a word belong to it."""
    words: list[str] = []
    for character in paragraph:
        is_own = _character_width(character) == 2 and character not in _BREAKS_BEFORE
        starts = not words or is_own or (character == " " and words[-1].strip() != "")
        after_wide = bool(words) and _character_width(words[-1][-1]) == 2
        if starts or (after_wide and character not in _BREAKS_BEFORE):
            words.append(character)
        else:
            words[-1] += character
    return words


def _head(word: str, width: int) -> str:
    used = 0
    for index, character in enumerate(word):
        used += _character_width(character)
        if used > width:
            return word[: max(index, 1)]
    return word


def _character_width(character: str) -> int:
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
