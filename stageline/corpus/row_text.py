"""Makes documents of the rows of a chunk, and says of every other row what is wrong with it.

A line ends at "\n"; a "\r" before it belongs to the end. In text files a line is a document and
an empty line an empty document; between JSON lines empty lines are passed over.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from stageline.corpus.chunks import Chunk
from stageline.corpus.encoder import why_bad
from stageline.corpus.journal import JSON, PARQUET, TEXT
from stageline.errors import UserError, spelled

Document = Callable[[Any], str]
DEFAULT_FIELD = "text"
EMPTY = "empty document"
# what of a chunk's bad lines is kept in full; all are counted
_KEPT = 1000
_SHOWN = 80
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class BadLine:
    """A row that gave no document.

    Attributes:
        line: counted from 1 in its file.
        kind: of a few, for the counts.
        reason: what came and what was expected.
        start: how the row begins.
    """

    line: int
    kind: str
    reason: str
    start: str


class BadDocument(Exception):
    """A row that cannot be a document: kind and reason."""


@dataclass
class ChunkRows:
    """What a chunk gave.

    Attributes:
        texts: the documents.
        numbers: the line of each, counted from 1 in the chunk.
        num_lines: all lines, also empty and bad ones.
        bad: the first bad lines, counted from 1 in the chunk.
        bad_kinds: how many of which kind.
    """

    texts: list[str] = field(default_factory=list)
    numbers: list[int] | range = field(default_factory=list)
    num_lines: int = 0
    bad: list[BadLine] = field(default_factory=list)
    bad_kinds: Counter[str] = field(default_factory=Counter)

    def refuse(self, line: int, kind: str, reason: str, start: str | bytes) -> None:
        """Notes a bad line."""
        self.bad_kinds[kind] += 1
        if len(self.bad) < _KEPT:
            if isinstance(start, bytes):
                start = start[:_SHOWN].decode("utf-8", errors="backslashreplace")
            start = start[:_SHOWN].encode("utf-8", errors="backslashreplace").decode()
            self.bad.append(BadLine(line, kind, reason, start))


def read_chunk(chunk: Chunk, *, document: Document | None, max_document_bytes: int) -> ChunkRows:
    """The documents of a chunk.

    Args:
        document: makes one of a line of text, or of the dict of a JSON line or Parquet row; by
            default the line itself, or the field "text".
        max_document_bytes: of a line, or of the document of a Parquet row.
    """
    rows = ChunkRows()
    if chunk.kind == PARQUET:
        _read_parquet(rows, chunk, document or default_document, max_document_bytes)
        return rows
    body, ends_too_long = chunk.payload, chunk.ends_too_long
    if body is None:
        body, ends_too_long = read_lines(
            chunk.path, chunk.start, chunk.stop, max_document_bytes=max_document_bytes
        )
    if chunk.part == 0:
        body = body.removeprefix(b"\xef\xbb\xbf")
    _read_body(rows, body, chunk.kind, document, max_document_bytes)
    if ends_too_long:
        rows.num_lines += 1
        _refuse_long(rows, rows.num_lines, max_document_bytes, b"")
    return rows


def read_lines(path: str, start: int, stop: int, *, max_document_bytes: int) -> tuple[bytes, bool]:
    """The lines of a plain file that begin between two bytes.

    Returns:
        The lines, and whether another one came that is longer than allowed: of it no more is
        read than that.
    """
    with open(path, "rb", buffering=0) as raw:
        # the byte before tells whether a line begins at `start`
        raw.seek(max(0, start - 1))
        body = _read_fully(raw, stop - raw.tell())
        if start > 0:
            first = body.find(b"\n") + 1
            if first == 0:
                return b"", False
            body = body[first:]
        if not body or body.endswith(b"\n"):
            return body, False
        return _with_end_of_line(raw, body, max_document_bytes)


def _read_fully(raw: Any, num_bytes: int) -> bytes:
    blocks = []
    while num_bytes > 0 and (block := raw.read(num_bytes)):
        blocks.append(block)
        num_bytes -= len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def _with_end_of_line(raw: Any, body: bytes, max_document_bytes: int) -> tuple[bytes, bool]:
    begin = body.rfind(b"\n") + 1
    blocks, length = [body], len(body) - begin
    most = max_document_bytes + 1  # a CR before the end does not count
    while length <= most and (block := raw.read(_READ_BYTES)):
        end = block.find(b"\n")
        if end >= 0:
            blocks.append(block[: end + 1])
            return b"".join(blocks), False
        blocks.append(block)
        length += len(block)
    if length > most:
        return body[:begin], True
    return b"".join(blocks), False


def _read_body(
    rows: ChunkRows, body: bytes, kind: str, document: Document | None, max_document_bytes: int
) -> None:
    lines = _split(body)
    rows.num_lines = len(lines)
    can_be_long = len(body) > max_document_bytes
    if kind == TEXT and document is None and not can_be_long and _all_plain(rows, lines):
        return
    make = _line_maker(kind, document)
    for number, line in enumerate(lines, start=1):
        if can_be_long and _num_bytes(line) > max_document_bytes:
            _refuse_long(rows, number, max_document_bytes, line)
            continue
        _take(rows, number, line, make, skips_blank=kind == JSON)


def _split(body: bytes) -> Sequence[str | bytes]:
    """The lines without their ends; as bytes where one of them is no UTF-8."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        lines: list[Any] = body.replace(b"\r\n", b"\n").split(b"\n")
    else:
        lines = (text.replace("\r\n", "\n") if "\r\n" in text else text).split("\n")
    if not lines[-1]:
        lines.pop()  # what comes after the last line's end
    return lines


def _all_plain(rows: ChunkRows, lines: Sequence[str | bytes]) -> bool:
    """Takes lines that are documents as they are, all at once; False: they are not."""
    if not lines or isinstance(lines[0], bytes) or not all(lines):
        return False
    rows.texts = cast("list[str]", list(lines))  # those of a chunk are of one type
    rows.numbers = range(1, len(lines) + 1)
    return True


def _num_bytes(line: str | bytes) -> int:
    if isinstance(line, bytes) or line.isascii():
        return len(line)
    return len(line.encode("utf-8", errors="surrogatepass"))


def _line_maker(kind: str, document: Document | None) -> Callable[[str], str]:
    if kind == TEXT:
        return document or _identity
    make = document or default_document
    return lambda line: make(_json_object(line))


def _identity(line: str) -> str:
    return line


def _take(
    rows: ChunkRows,
    number: int,
    line: str | bytes,
    make: Callable[[str], str],
    *,
    skips_blank: bool,
) -> None:
    try:
        if isinstance(line, bytes):
            line = line.decode("utf-8")
        if skips_blank and not line.strip():
            return
        text = make(line)
        check_text(text)
    except MemoryError:
        raise
    except Exception as error:  # also what a user's function raises: it is the row's fault
        rows.refuse(number, *_explained(error), line)
        return
    assert isinstance(rows.numbers, list)  # a range is that of a whole chunk
    rows.texts.append(text)
    rows.numbers.append(number)


def default_document(row: Any) -> str:
    """The field "text" of a row."""
    if not isinstance(row, dict):
        return row
    if DEFAULT_FIELD not in row:
        names = ", ".join(sorted(map(str, row))) or "none"
        raise BadDocument(
            "missing field", f"no field {DEFAULT_FIELD!r}; the row has the fields {names}"
        )
    return row[DEFAULT_FIELD]


def check_text(text: Any) -> None:
    """Refuses what is no document.

    Raises:
        BadDocument: no text, nothing in it, or half a character of UTF-16.
    """
    if not isinstance(text, str):
        raise BadDocument("not text", f"the document is {type(text).__name__}, not text")
    if not text:
        raise BadDocument(EMPTY, "the document is empty")
    reason = why_bad(text)
    if reason is not None:
        raise BadDocument("lone surrogate", reason)


def _json_object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadDocument("bad JSON", f"no JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadDocument("bad JSON", f"a JSON {type(row).__name__}, not an object")
    return row


def _explained(error: Exception) -> tuple[str, str]:
    if isinstance(error, BadDocument):
        return error.args[0], error.args[1]
    if isinstance(error, UnicodeDecodeError):
        return "invalid UTF-8", f"byte {error.start + 1} of the line is no UTF-8 ({error.reason})"
    if isinstance(error, KeyError):
        return "missing field", f"no field {error}"
    if isinstance(error, UserError):
        return "refused", str(error)
    return "refused", f"{type(error).__name__}: {error}"


def _refuse_long(rows: ChunkRows, line: int, limit: int, start: str | bytes) -> None:
    reason = f"the line is longer than {limit} bytes (`max_document_bytes`)"
    rows.refuse(line, "too long", spelled(reason), start)


def _read_parquet(
    rows: ChunkRows, chunk: Chunk, document: Document, max_document_bytes: int
) -> None:
    def make(row: Any) -> str:
        if isinstance(row, UnicodeDecodeError):
            raise BadDocument("invalid UTF-8", f"a field is no UTF-8 ({row.reason})")
        text = document(row)
        if isinstance(text, str) and _num_bytes(text) > max_document_bytes:
            limit = f"{max_document_bytes} bytes (`max_document_bytes`)"
            raise BadDocument("too long", spelled(f"the document is longer than {limit}"))
        return text

    for row in _arrow_rows(chunk.payload or b""):
        rows.num_lines += 1
        try:
            text = make(row)
            check_text(text)
        except Exception as error:  # as in `_take`
            rows.refuse(rows.num_lines, *_explained(error), str(row)[:_SHOWN])
            continue
        assert isinstance(rows.numbers, list)
        rows.texts.append(text)
        rows.numbers.append(rows.num_lines)


def _arrow_rows(payload: bytes) -> Iterator[Any]:
    """The rows as dicts; instead of one whose text is no UTF-8 the error."""
    import pyarrow

    for batch in pyarrow.ipc.open_stream(payload):
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            for index in range(batch.num_rows):
                try:
                    yield batch.slice(index, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    yield error
