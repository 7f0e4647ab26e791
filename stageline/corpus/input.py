"""The input of a corpus: files, the chunks they are divided into, and the documents in them.

The division is always the same: chunks of about a megabyte, named by their file and their number in
it, so that a build resumes where it was. Files are read here, block by block, and whole lines or
rows are handed to the workers.

A line ends at "\n"; a "\r" before it belongs to the end. In text files a line is a document and
an empty line an empty document; between JSON lines empty lines are skipped.
"""

import glob
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from stageline.corpus.header import edges_digest
from stageline.errors import DataError, UserError, spelled

TEXT = "text"
JSON = "json"
PARQUET = "parquet"
KINDS = {".txt": TEXT, ".jsonl": JSON, ".json": JSON, ".ndjson": JSON, ".parquet": PARQUET}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # their names in pyarrow
CHUNK_BYTES = 1 << 20
EMPTY = "empty document"

Document = Callable[[Any], str]
# parts of a row group are numbered from a multiple of it: groups before need not be read
_PARTS_OF_GROUP = 1 << 32
# bad lines of a chunk that are kept in full; all are counted
_KEPT = 1000
_SHOWN = 80
# a build next to its input lists bad lines there, and must not read them when it resumes
_OUR_LIST = ".bad.jsonl"
_EXPECTED = "Name files, folders or patterns of .txt, .jsonl, .json, .ndjson or .parquet."


@dataclass(frozen=True)
class Source:
    """A file as it was when the build began."""

    path: str
    kind: str  # text, json or parquet
    compression: str  # .gz, .bz2, .zst, or "" for none
    size: int
    time_ns: int  # time of its last change
    edges: str  # `edges_digest`: tells a file that was changed to the same size and time


def find_sources(files: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Source]:
    """Return the files of names, folders and patterns, in the order in which they are read.

    What a pattern or a folder (with its subfolders) holds is sorted by name. Of a folder, hidden
    files and those with other suffixes are left out.

    Raises:
        UserError: nothing is there, a name has no known suffix, or a file is named twice.
        DataError: a file cannot be read.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not given:
        raise UserError(f"no input files were named. {_EXPECTED}")
    paths: dict[str, Path] = {}
    for path in (path for item in given for path in _paths_of(os.fspath(item))):
        first = paths.setdefault(os.path.realpath(path), path)
        if first is not path:
            raise UserError(f"{path} and {first} are the same file. Name it once.")
    sources = []
    for path in paths.values():
        suffix, compression = _suffixes(path)
        kind = KINDS.get(suffix)
        if kind is None or (kind == PARQUET and compression):
            ending = "".join(path.suffixes[-2:]) or "nothing"
            raise UserError(f"{path} ends in {ending!r}. {_EXPECTED}")
        try:
            stat, edges = path.stat(), edges_digest(path)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error}). Check permissions and disk."
            ) from error
        about = (stat.st_size, stat.st_mtime_ns, edges)
        sources.append(Source(str(path), kind, compression, *about))
    return sources


def _paths_of(name: str) -> list[Path]:
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():  # glob leaves hidden files out
        inside = map(Path, glob.glob(f"{glob.escape(name)}/**", recursive=True))
        found = [file for file in inside if _suffixes(file)[0] in KINDS]
    else:
        found = [Path(match) for match in glob.glob(name, recursive=True)]
    files = sorted(file for file in found if file.is_file() and not file.name.endswith(_OUR_LIST))
    if not files:
        what = f"the folder {path} holds no file" if path.is_dir() else f"there is no file {name}"
        raise UserError(f"{what} to build from. {_EXPECTED}")
    return files


def _suffixes(path: Path) -> tuple[str, str]:
    """Return (suffix of the kind, that of the compression) of a name."""
    suffix = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), suffix) if suffix in COMPRESSIONS else (suffix, "")


def holds_json_lines(source: Source) -> bool:
    """Return whether the first line of a plain text file is a JSON object."""
    if source.kind != TEXT or source.compression:
        return False
    with open(source.path, "rb") as file:
        try:
            return bool(json_object(file.readline(CHUNK_BYTES).decode("utf-8")))
        except (BadDocument, UnicodeDecodeError):
            return False


@dataclass(frozen=True)
class Chunk:
    """A task for a worker: a stretch of a file."""

    file: int
    part: int  # number of the chunk in the file
    kind: str  # text, json or parquet
    path: str
    num_bytes: int  # bytes of the file on the disk, for the progress
    payload: bytes  # whole lines, or an Arrow stream of rows
    ends_too_long: bool = False  # a line longer than a document may be was skipped behind it


def iter_chunks(
    sources: Sequence[Source],
    *,
    first: tuple[int, int] = (0, 0),
    max_document_bytes: int,
    columns: Sequence[str] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Chunk]:
    """Yield all chunks in order, from (file, part) `first` on.

    Raises:
        DataError: a compressed file is damaged, a .json file is one list, or no Parquet.
    """
    for file in range(first[0], len(sources)):
        source, part = sources[file], first[1] if file == first[0] else 0
        if source.kind == PARQUET:
            chunks = _parquet_chunks(source, file, part, columns, chunk_bytes)
        else:
            chunks = _text_chunks(source, file, max_document_bytes, chunk_bytes)
        yield from (chunk for chunk in chunks if chunk.part >= part)


def _text_chunks(
    source: Source, file: int, max_document_bytes: int, chunk_bytes: int
) -> Iterator[Chunk]:
    with open(source.path, "rb") as raw:
        before = 0
        blocks = _line_blocks(_text_blocks(source, raw, chunk_bytes), max_document_bytes)
        for part, (lines, ends_too_long) in enumerate(blocks):
            head = lines[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
            if part == 0 and source.kind == JSON and head.startswith(b"["):
                raise DataError(
                    f"{source.path} begins with '[': one JSON list. Write a JSON object on each "
                    "line (jq -c '.[]')."
                )
            # pyarrow closes the file at its end
            read = source.size if raw.closed else min(raw.tell(), source.size)
            yield Chunk(file, part, source.kind, source.path, read - before, lines, ends_too_long)
            before = read


def _line_blocks(blocks: Iterable[bytes], max_document_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Yield (whole lines, whether a line that is too long came after them)."""
    rest = b""
    skips = False  # inside a line that is too long
    for block in blocks:
        if skips:
            end = block.find(b"\n")
            if end < 0:
                continue
            block, skips = block[end + 1 :], False
        end = block.rfind(b"\n")
        # a CR before the end does not count
        if end < 0 and len(rest) + len(block) > max_document_bytes + 1:
            yield b"", True
            rest, skips = b"", True
        elif end < 0:
            rest += block
        else:
            yield rest + block[: end + 1], False
            rest = block[end + 1 :]
    if rest:
        yield rest, False


def _text_blocks(source: Source, raw: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """Yield blocks of the text, from all compressed frames of the file."""
    if not source.compression or not source.size:
        yield from iter(lambda: raw.read(num_bytes), b"")
        return
    import pyarrow  # late: slow to import

    kind = COMPRESSIONS[source.compression]
    try:
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), kind)
        while block := stream.read(num_bytes):
            yield block
    except OSError as error:
        raise DataError(
            f"{source.path} cannot be decompressed to its end ({error}). Get it again."
        ) from error


def _parquet_chunks(
    source: Source, file: int, part: int, columns: Sequence[str] | None, chunk_bytes: int
) -> Iterator[Chunk]:
    """Yield the chunks of a Parquet file, from the row group of `part` on."""
    import pyarrow  # late: slow to import
    import pyarrow.parquet

    wanted = None if columns is None else list(columns)
    try:
        table = pyarrow.parquet.ParquetFile(source.path, buffer_size=1 << 20, pre_buffer=False)
        names = table.schema_arrow.names
        missing = ", ".join(sorted(set(wanted or ()).difference(names)))
        if missing:
            raise DataError(
                f"{source.path} has no column {missing}; it has {', '.join(names)}. Name the "
                "fields of a document."
            )
        groups = [table.metadata.row_group(group) for group in range(table.num_row_groups)]
        per_byte = source.size / max(1, sum(group.total_byte_size for group in groups))
        for group in range(part // _PARTS_OF_GROUP, len(groups)):
            num_rows, num_bytes = groups[group].num_rows, groups[group].total_byte_size
            rows = max(1, num_rows * chunk_bytes // max(1, num_bytes))
            size = int(num_bytes * per_byte * min(1, rows / max(1, num_rows)))
            how = {"row_groups": [group], "columns": wanted, "use_threads": False}
            batches = enumerate(table.iter_batches(rows, **how), start=group * _PARTS_OF_GROUP)
            for number, batch in batches:
                sink = io.BytesIO()
                with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                yield Chunk(file, number, PARQUET, source.path, size, payload=sink.getvalue())
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{source.path} cannot be read as Parquet ({error}). Get it again or rename it."
        ) from error


class BadLine(NamedTuple):
    """A row that gave no document; `line` counts from 1, `kind` is for the counts."""

    line: int
    kind: str
    reason: str
    start: str


class BadDocument(Exception):
    """A row that cannot be a document: kind and reason."""


@dataclass
class ChunkRows:
    """Documents and bad lines of a chunk; lines are counted from 1 in the chunk."""

    texts: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # the line of each text
    num_lines: int = 0  # also empty and bad ones
    bad: list[BadLine] = field(default_factory=list)  # the first ones
    bad_kinds: Counter[str] = field(default_factory=Counter)  # all bad rows are counted

    def take(self, line: int, row: Any, make: Document) -> None:
        """Take the document of a row, or note a bad line."""
        try:
            text = make(row)
            if not isinstance(text, str):
                kind = type(text).__name__
                raise BadDocument("not text", f"the document is {kind}, not text")
            if not text:
                raise BadDocument(EMPTY, "the document is empty")
            text.encode()
        except MemoryError:
            raise
        except Exception as error:  # also what a user's function raises: it is the row's fault
            match error:
                case BadDocument():
                    kind, reason = error.args
                case UnicodeDecodeError():
                    kind, reason = "invalid UTF-8", f"byte {error.start + 1}: {error.reason}"
                case UnicodeEncodeError():
                    kind = "lone surrogate"
                    reason = f"character {error.start} is half of a surrogate pair"
                case KeyError():
                    kind, reason = "missing field", f"no field {error}"
                case _:
                    kind, reason = "refused", f"{type(error).__name__}: {error}"
            self.refuse(line, kind, reason, str(row))
            return
        self.texts.append(text)
        self.numbers.append(line)

    def refuse(self, line: int, kind: str, reason: str, start: str) -> None:
        """Note a bad line."""
        self.bad_kinds[kind] += 1
        if len(self.bad) < _KEPT:
            shown = start[:_SHOWN].encode("utf-8", errors="surrogateescape")
            self.bad.append(BadLine(line, kind, reason, shown.decode(errors="backslashreplace")))


def default_document(row: Any) -> str:
    """Return the line of a text file, or the field "text" of a row."""
    if not isinstance(row, dict):
        return row
    if "text" not in row:
        names = ", ".join(sorted(map(str, row))) or "none"
        raise BadDocument("missing field", f"no field 'text'; the row has the fields {names}")
    return row["text"]


def json_object(line: str) -> dict[str, Any]:
    """Return the object that a line of JSON holds, or raise BadDocument."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadDocument("bad JSON", f"no JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadDocument("bad JSON", f"a JSON {type(row).__name__}, not an object")
    return row


def read_chunk(chunk: Chunk, document: Document, max_document_bytes: int) -> ChunkRows:
    """Return the documents of a chunk."""
    rows = ChunkRows()
    if chunk.kind == PARQUET:
        _read_parquet(rows, chunk, document, max_document_bytes)
        return rows
    body, ends_too_long = chunk.payload, chunk.ends_too_long
    if chunk.part == 0:
        body = body.removeprefix(b"\xef\xbb\xbf")
    # A byte that is not UTF-8 becomes half a surrogate pair, which no UTF-8 text contains.
    lines = body.decode("utf-8", errors="surrogateescape").replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()  # nothing follows the end of the last line
    rows.num_lines = len(lines) + ends_too_long

    def make(line: str) -> str:
        if not line.isascii():
            line.encode("utf-8", "surrogateescape").decode("utf-8")  # raises if it is not UTF-8
        return document(line if chunk.kind == TEXT else json_object(line))

    can_be_long = len(body) > max_document_bytes
    for number, line in enumerate(lines, start=1):
        if can_be_long and len(line.encode("utf-8", "surrogateescape")) > max_document_bytes:
            rows.refuse(number, *_too_long("line", max_document_bytes), line)
        elif chunk.kind == TEXT or line.strip():
            rows.take(number, line, make)
    if ends_too_long:
        rows.refuse(rows.num_lines, *_too_long("line", max_document_bytes), "")
    return rows


def _too_long(what: str, limit: int) -> tuple[str, str]:
    return "too long", spelled(f"the {what} is longer than {limit} bytes (`max_document_bytes`)")


def _read_parquet(
    rows: ChunkRows, chunk: Chunk, document: Document, max_document_bytes: int
) -> None:
    import pyarrow

    def make(row: Any) -> str:
        if isinstance(row, UnicodeDecodeError):
            raise BadDocument("invalid UTF-8", f"a field is no UTF-8 ({row.reason})")
        text = document(row)
        size = len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0
        if size > max_document_bytes:
            raise BadDocument(*_too_long("document", max_document_bytes))
        return text

    def dicts(batch: Any) -> list[Any]:
        """Return the rows; a row whose text is not UTF-8 is replaced by its error."""
        try:
            found: list[Any] = batch.to_pylist()
            return found
        except UnicodeDecodeError as error:
            if batch.num_rows == 1:
                return [error]
            return [row for at in range(batch.num_rows) for row in dicts(batch.slice(at, 1))]

    for batch in pyarrow.ipc.open_stream(chunk.payload):
        for row in dicts(batch):
            rows.num_lines += 1
            rows.take(rows.num_lines, row, make)
