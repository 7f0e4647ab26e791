"""Packs the segments of a corpus into rows: PREFIX.pack beside it says which segments share one.

Rows are filled best-fit decreasing within windows of neighbouring segments of one type, so memory
does not grow with the corpus. Each window leaves a few rows unfilled, which is nothing beside a
million segments.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy

from stageline.corpus.best_fit import best_fit
from stageline.corpus.corpus_files import open_corpus
from stageline.corpus.files_out import GrowingFile, read_chunks
from stageline.corpus.header import path_of
from stageline.corpus.mapped import MappedSegments
from stageline.corpus.packed_rows import PackedRows, PackHeader, encode_pack_header, windows
from stageline.errors import DataError, UserError

WINDOW = 1 << 20  # segments
_PARTS = (".pack.offsets.part", ".pack.members.part", ".pack.part")


def pack_corpus(
    prefix: str | Path, row_length: int | None = None, *, overwrite: bool = False
) -> PackedRows:
    """Packs the segments of each type into rows, and writes PREFIX.pack; whole or not at all.

    Segments cut `greedy` fill rows to a per cent or less; `even` ones leave up to a tenth empty.
    The same rows lie there already: nothing is done.

    Args:
        row_length: tokens of a row; None: the `seq_length` of the corpus.
        overwrite: in place of rows of another length.

    Raises:
        UserError: a segment is longer than a row, or rows of another length lie there.
        StorageError: it cannot be written.
    """
    corpus = open_corpus(prefix)
    row_length = row_length or corpus.header.rules.seq_length
    there = _rows_there(prefix)
    if there is not None and not overwrite:
        if there.row_length == row_length:
            return there
        raise UserError(
            f"{prefix}.pack has rows of {there.row_length} tokens, and rows of {row_length} are to "
            "be written. Runs may be using those that are there: add --overwrite, or pack a copy "
            "of the corpus."
        )
    try:
        _write(corpus, row_length)
    finally:
        for part in _PARTS:
            path_of(prefix, part).unlink(missing_ok=True)
    return PackedRows(prefix)


def _rows_there(prefix: str | Path) -> PackedRows | None:
    try:
        return PackedRows(prefix)
    except DataError:  # none, or of no use to anybody
        return None


def _write(corpus: MappedSegments, row_length: int) -> None:
    with contextlib.ExitStack() as stack:
        offsets, members, whole = (
            stack.enter_context(contextlib.closing(GrowingFile(path_of(corpus.prefix, part))))
            for part in _PARTS
        )
        counts = _write_arrays(corpus, row_length, offsets, members)
        digest = hashlib.sha256()
        for chunk in _chunks(offsets, members):
            digest.update(chunk)
        header = PackHeader(
            row_length=row_length,
            corpus=corpus.digest,
            window=WINDOW,
            arrays_sha256=digest.hexdigest(),
            **counts,
        )
        whole.write(encode_pack_header(header))
        for chunk in _chunks(offsets, members):
            whole.write(chunk)
        whole.sync()
    os.replace(whole.path, path_of(corpus.prefix, ".pack"))


def _write_arrays(
    corpus: MappedSegments, row_length: int, offsets: GrowingFile, members: GrowingFile
) -> dict[str, list[int]]:
    """Writes the rows of all windows; returns the figures of each type."""
    num_types = len(corpus.header.types)
    counts = {name: [0] * num_types for name in ("num_rows", "num_segments", "num_tokens")}
    offsets.write(bytes(8))
    for low, high in windows(corpus, WINDOW):
        lengths = corpus.lengths(low, high)
        _check_lengths(corpus, low, lengths, row_length)
        ends, packed = best_fit(lengths, row_length)
        offsets.write((ends + low).astype("<u8").tobytes())  # `low` members are before them
        members.write((packed + low).astype("<u8").tobytes())
        kind = int(numpy.searchsorted(corpus.type_starts, low, side="right")) - 1
        counts["num_rows"][kind] += len(ends)
        counts["num_segments"][kind] += len(lengths)
        counts["num_tokens"][kind] += int(lengths.sum())
    return counts


def _chunks(*files: GrowingFile) -> Iterator[bytes]:
    for file in files:
        file.sync()
        yield from read_chunks(file.path)


def _check_lengths(
    corpus: MappedSegments, low: int, lengths: numpy.ndarray, row_length: int
) -> None:
    longest = int(lengths.argmax())
    if lengths[longest] > row_length:
        raise UserError(
            f"segment {low + longest} of {corpus.prefix} has {lengths[longest]} tokens, and rows "
            f"are to have {row_length}. No segment longer than a row was expected, because rows "
            "hold whole segments: give longer rows, or build the corpus with a smaller "
            "--seq-length."
        )
