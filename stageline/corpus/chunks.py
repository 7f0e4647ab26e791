"""Divides the input into chunks of about a megabyte, always in the same way.

A plain file is divided by bytes and read by the workers. Compressed files and Parquet are read
here, one block behind the other, and handed on as they are: only their beginning can be found.
A chunk is named by its file and its number in it, so that a build goes on where it was.
"""

import bz2
import gzip
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from stageline.corpus.journal import JSON, PARQUET, Source
from stageline.errors import DataError, UserError

# -- opens compressed files as streams that notice when they end too early ------------------------

_READ_BYTES = 1 << 16


def open_compressed(raw: BinaryIO, compression: str) -> io.BufferedIOBase:
    """A stream of the decompressed bytes; memory does not grow with the file.

    Args:
        compression: .gz, .bz2 or .zst; several frames in one file are read through.

    Raises:
        UserError: zstandard is not installed.
    """
    if compression == ".gz":
        return gzip.open(raw)
    if compression == ".bz2":
        return bz2.open(raw)
    return io.BufferedReader(_ZstdReader(raw), buffer_size=1 << 18)


def decompression_errors() -> tuple[type[Exception], ...]:
    """The exceptions that say that a compressed file is damaged or ends too early."""
    import zlib

    try:
        from zstandard import ZstdError
    except ImportError:
        return (EOFError, OSError, zlib.error)
    return (EOFError, OSError, zlib.error, ZstdError)


class _ZstdReader(io.RawIOBase):
    """zstandard's own stream reader takes a cut-off file for a whole one; this one does not."""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UserError(
                "a .zst file was named and the package zstandard is not installed: "
                "pip install zstandard, or decompress the file first (unzstd)."
            ) from error
        self._raw = raw
        self._make = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame: Any = None
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_READ_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the zstandard frame ends too early")
                return 0
            self._frame = self._frame or self._make()
            self._output = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size


# -------------------------------------------------------------------------------------------------

CHUNK_BYTES = 1 << 20
# parts of a row group are numbered from a multiple of it: groups before need not be read
_PARTS_OF_GROUP = 1 << 32


@dataclass(frozen=True)
class Chunk:
    """A task for a worker.

    Attributes:
        file: number of the file.
        part: number of the chunk in its file.
        kind: how its rows are read: text, json or parquet.
        path: of the file.
        start, stop: bytes of a plain file; the lines that begin between them are meant.
        payload: whole lines, or an Arrow stream of rows; None: they are in the file.
        ends_too_long: after the lines came one longer than a document may be; it was passed over.
        num_bytes: of the file as it lies on the disk, for the progress.
    """

    file: int
    part: int
    kind: str
    path: str
    start: int
    stop: int
    payload: bytes | None
    ends_too_long: bool
    num_bytes: int


def iter_chunks(
    sources: Sequence[Source],
    *,
    first: tuple[int, int] = (0, 0),
    max_document_bytes: int,
    columns: Sequence[str] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Chunk]:
    """All chunks in order, from one on.

    Args:
        first: (file, part) to begin with.
        columns: of Parquet files; None: all of them.

    Raises:
        DataError: a compressed file is damaged, a .json file is one list, or no Parquet.
    """
    for file in range(first[0], len(sources)):
        part = first[1] if file == first[0] else 0
        source = sources[file]
        if source.kind == PARQUET:
            yield from _parquet_chunks(source, file, part, columns, chunk_bytes)
        elif source.compression:
            yield from _stream_chunks(source, file, part, max_document_bytes, chunk_bytes)
        else:
            yield from _range_chunks(source, file, part, chunk_bytes)


def _range_chunks(source: Source, file: int, part: int, chunk_bytes: int) -> Iterator[Chunk]:
    with open(source.path, "rb") as raw:
        _refuse_list(source, raw.read(64))
    for number, start in enumerate(range(0, source.size, chunk_bytes)):
        stop = min(start + chunk_bytes, source.size)
        if number >= part:
            size = stop - start
            yield Chunk(file, number, source.kind, source.path, start, stop, None, False, size)


def _refuse_list(source: Source, head: bytes) -> None:
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if source.kind == JSON and head.startswith(b"["):
        raise DataError(
            f"{source.path} begins with '[': one JSON list. A JSON object on each line was "
            "expected, because files are read line by line: rewrite it (jq -c '.[]')."
        )


def _stream_chunks(
    source: Source, file: int, part: int, max_document_bytes: int, chunk_bytes: int
) -> Iterator[Chunk]:
    with open(source.path, "rb") as raw:
        before = 0
        blocks = _line_blocks(source, raw, max_document_bytes, chunk_bytes)
        for number, (lines, ends_too_long) in enumerate(blocks):
            if number == 0:
                _refuse_list(source, lines[:64])
            read = min(raw.tell(), source.size)
            if number >= part:
                yield Chunk(
                    *(file, number, source.kind, source.path, 0, 0),
                    *(lines, ends_too_long, read - before),
                )
            before = read


def _line_blocks(
    source: Source, raw: BinaryIO, max_document_bytes: int, chunk_bytes: int
) -> Iterator[tuple[bytes, bool]]:
    """(whole lines, whether a line that is too long came after them) of a compressed file."""
    stream = open_compressed(raw, source.compression)
    rest = b""
    skips = False  # inside a line that is too long
    while block := _read(source, stream, chunk_bytes):
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


def _read(source: Source, stream: io.BufferedIOBase, num_bytes: int) -> bytes:
    try:
        return stream.read(num_bytes)
    except decompression_errors() as error:
        raise DataError(
            f"{source.path} cannot be decompressed to its end ({error or type(error).__name__}). "
            "A whole file was expected, because what is missing would go unnoticed: get it anew, "
            "and build with `overwrite`."
        ) from error


def _parquet_chunks(
    source: Source, file: int, part: int, columns: Sequence[str] | None, chunk_bytes: int
) -> Iterator[Chunk]:
    table = _open_parquet(source)
    _check_columns(source, table.schema_arrow.names, columns)
    groups = [table.metadata.row_group(group) for group in range(table.num_row_groups)]
    per_byte = source.size / max(1, sum(group.total_byte_size for group in groups))
    for group in range(part // _PARTS_OF_GROUP, len(groups)):
        facts = groups[group]
        rows = max(1, facts.num_rows * chunk_bytes // max(1, facts.total_byte_size))
        size = int(facts.total_byte_size * per_byte * min(1, rows / max(1, facts.num_rows)))
        batches = _parquet_batches(source, table, group, rows, columns)
        for number, batch in enumerate(batches, start=group * _PARTS_OF_GROUP):
            if number >= part:
                yield Chunk(
                    *(file, number, PARQUET, source.path, 0, 0),
                    *(_arrow_stream(batch), False, size),
                )


def _open_parquet(source: Source) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{source.path} is Parquet and the package pyarrow is not installed: pip install "
            "pyarrow, or write its rows as JSON lines."
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(source.path, buffer_size=1 << 20, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise _bad_parquet(source, error) from error


def _bad_parquet(source: Source, error: Exception) -> DataError:
    return DataError(
        f"{source.path} cannot be read as Parquet ({error}). A whole Parquet file was expected by "
        "its suffix: get it anew or rename it."
    )


def _check_columns(source: Source, names: Sequence[str], columns: Sequence[str] | None) -> None:
    missing = [name for name in columns or () if name not in names]
    if missing:
        raise DataError(
            f"{source.path} has the columns {', '.join(names)}, and {', '.join(missing)} was "
            "expected, because documents are made of it: name the fields of a document."
        )


def _parquet_batches(
    source: Source, table: Any, group: int, rows: int, columns: Sequence[str] | None
) -> Iterator[Any]:
    import pyarrow

    wanted = None if columns is None else list(columns)
    try:
        yield from table.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise _bad_parquet(source, error) from error


def _arrow_stream(batch: Any) -> bytes:
    import pyarrow

    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
