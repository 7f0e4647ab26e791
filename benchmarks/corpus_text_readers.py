"""What corpus_text.py does with the files of a package: from man pages, HTML, dictionaries to text.

Standard library alone; manual pages are rendered by mandoc, the Bible by the program that came
with it. A reader yields (name, text); nothing is mended in the text: form feeds of RFCs, line ends
and double spaces stay, since they are what a corpus builder must bring back.
"""

import gzip
import html.parser
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

Texts = Iterator[tuple[str, str]]
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BLOCKS = frozenset(
    "p div li ul ol dl dt dd br hr h1 h2 h3 h4 h5 h6 pre table tr blockquote section title".split()
)
_PAGE_BLOCKS = frozenset("p title item code screen td example note section info desc".split())
_BACKSPACED = re.compile(".\b")


def decoded(data: bytes, *, is_chinese: bool) -> str:
    """The text; old English files are Latin-1. Old Chinese ones are left out: which code is it?"""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "" if is_chinese else data.decode("latin-1")


def read_bytes(path: Path) -> bytes:
    """A file's bytes, unpacked."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix in (".gz", ".dz") else data


def plain(path: Path, *, is_chinese: bool) -> Texts:
    """The file as it is."""
    yield "", decoded(read_bytes(path), is_chinese=is_chinese)


def manual(path: Path, *, mandoc: Path) -> Texts:
    """A manual page as a terminal shows it, without overstrikes; those that only point: nothing."""
    source = read_bytes(path)
    if source.startswith(b".so "):
        return
    command = [str(mandoc), "-T", "utf8", "-O", "width=100"]
    done = subprocess.run(command, input=source, capture_output=True, check=False)
    yield "", _BACKSPACED.sub("", done.stdout.decode("utf-8", "replace"))


class _Page(html.parser.HTMLParser):
    """Collects the text of a page; a block begins a line."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._silent = 0
        self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in ("script", "style")
        self._verbatim += tag == "pre"
        if tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._silent = max(0, self._silent - (tag in ("script", "style")))
        self._verbatim = max(0, self._verbatim - (tag == "pre"))
        if tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.pieces.append(data if self._verbatim else re.sub(r"\s+", " ", data))


def web_page(path: Path) -> Texts:
    """The text of an HTML file."""
    data = read_bytes(path)
    named = re.search(rb"charset=[\"']?([-\w]+)", data[:2000])
    page = _Page()
    try:
        page.feed(data.decode(named.group(1).decode() if named else "utf-8", "strict"))
    except (UnicodeDecodeError, LookupError):
        return
    yield "", re.sub(r" *\n[ \n]*\n", "\n\n", "".join(page.pieces)).strip() + "\n"


def xml_page(path: Path) -> Texts:
    """The text of help pages (Mallard), of DocBook without entities, and of drawings."""
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError:
        return
    blocks = []
    for element in root.iter():
        name = str(element.tag).rpartition("}")[2]
        if name in _PAGE_BLOCKS or name in ("flowPara", "tspan", "para"):
            text = re.sub(r"\s+", " ", "".join(_own_text(element))).strip()
            blocks += [text] if text else []
    yield "", "\n".join(blocks) + "\n" if blocks else ""


def _own_text(element: ElementTree.Element) -> Iterator[str]:
    """Text of an element and of what is inline in it; blocks in it speak for themselves."""
    yield element.text or ""
    for child in element:
        if str(child.tag).rpartition("}")[2] not in _PAGE_BLOCKS | {"flowPara", "tspan", "para"}:
            yield from _own_text(child)
        yield child.tail or ""


def dictionary(path: Path) -> Texts:
    """The entries of a dictd dictionary: its index gives each one's place in base 64."""
    data = read_bytes(path)
    index = path.parent / (path.name.split(".")[0] + ".index")
    seen = set()
    for line in index.read_bytes().split(b"\n"):
        fields = line.split(b"\t")
        if len(fields) < 3 or fields[0].startswith(b"00-") or fields[1] in seen:
            continue
        seen.add(fields[1])
        start, length = (_number(field.decode()) for field in fields[1:3])
        yield f"#{start}", decoded(data[start : start + length], is_chinese=False)


def _number(digits: str) -> int:
    number = 0
    for digit in digits:
        number = number * 64 + _DIGITS.index(digit)
    return number


def sayings(path: Path) -> Texts:
    """The parts of a fortune file, between lines of one per cent sign."""
    text = re.sub("\x1b\\[[0-9;]*m", "", decoded(read_bytes(path), is_chinese=False))
    for number, part in enumerate(re.split(r"^%\n", text, flags=re.MULTILINE)):
        yield f"#{number}", part


def bible(program: Path, data: Path) -> Texts:
    """The King James Bible, a document a book."""
    command = [str(program), "-f", "-p", str(data.parent), "gen1:1-rev22:21"]
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    books: dict[str, list[str]] = {}
    for line in text.splitlines():
        books.setdefault(re.split(r"\d+:", line, maxsplit=1)[0], []).append(line)
    for name, lines in books.items():
        yield f"#{name}", "\n".join(lines) + "\n"
