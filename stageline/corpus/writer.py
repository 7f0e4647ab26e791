"""Writes a corpus segment by segment, and can go on after a kill. Memory does not grow with it.

While it is being written a corpus lies in parts (PREFIX.bin.part, ...); `close` renames them, the
`.idx` last, so that what has an `.idx` is whole.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy

from stageline.corpus.header import (
    BEGINS,
    HAS_BOS,
    HAS_EOS,
    CorpusHeader,
    CutRules,
    Segments,
    SegmentType,
    TokenizerInfo,
    dtype_for,
    edges_digest,
    encode_header,
    path_of,
)
from stageline.errors import DataError, StorageError, UserError

# A file that grows and knows its sha256, and can go on from an earlier length.
# Written as a part (NAME.part) and renamed when whole. Knows bytes only.

CHUNK = 1 << 22


class GrowingFile:
    """Appends bytes to a part.

    Args:
        path: the part.
        size, sha256: None starts anew; else what an earlier `state` said: the file is cut to that
            size and read once, so that what it holds is known to be what was written.

    Raises:
        UserError: another process is writing it.
        DataError: the part is shorter than that, or holds something else.
        StorageError: it cannot be written.
    """

    def __init__(self, path: Path, *, size: int = 0, sha256: str | None = None) -> None:
        self.path = path
        self.size = size
        self._hash = hashlib.sha256()
        try:
            # never "wb": that would empty it before it is known to be ours
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise cannot_write(path, error) from error
        if not lock_file(self._file):
            self._file.close()
            raise UserError(
                f"{self.path} is being written by another process: two would spoil the corpus. Wait"
                " for it or end it, or give another prefix."
            )
        if sha256 is not None:
            self._check_part(size, sha256)
        self._file.truncate(size)
        self._file.seek(size)

    def write(self, data: bytes | memoryview) -> None:
        """Appends; the state counts them from now on."""
        try:
            self._file.write(data)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._hash.update(data)
        self.size += memoryview(data).nbytes

    def sync(self) -> dict:
        """Everything is on the disk; returns what `size` and `sha256` are for going on here."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error
        return {"size": self.size, "sha256": self.sha256}

    @property
    def sha256(self) -> str:
        """Of all bytes so far."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """Closes the part; it keeps its name."""
        self._file.close()

    def _check_part(self, size: int, sha256: str) -> None:
        found = os.fstat(self._file.fileno()).st_size
        if found < size:
            raise DataError(
                f"{self.path} has {found:,} bytes; {size:,} were written when this corpus was left:"
                " the part was cut or deleted, so it cannot be gone on with. Start anew with"
                " `overwrite`."
            )
        left = size
        while left:  # through the one handle: closing another would give up the lock
            chunk = self._file.read(min(CHUNK, left))
            self._hash.update(chunk)
            left -= len(chunk)
        if self.sha256 != sha256:
            raise DataError(
                f"{self.path} holds other bytes than were written when this corpus was left:"
                " another program changed it, so it cannot be gone on with. Start anew with"
                " `overwrite`."
            )


def read_chunks(path: Path, *, size: int | None = None) -> Iterator[bytes]:
    """The first `size` bytes of a file (all of them for None), in chunks."""
    left = path.stat().st_size if size is None else size
    with open(path, "rb") as file:
        while left > 0:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                return
            left -= len(chunk)
            yield chunk


def lock_file(file: IO[Any]) -> bool:
    """Locks a file until it is closed; False: another process has."""
    try:
        # of this process alone: workers that it forks do not keep it after a kill
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # a file system without locks
    return True


def cannot_write(path: Path, error: OSError) -> StorageError:
    """The error of a file that cannot be written; what was built so far is kept."""
    return StorageError(
        f"{path} cannot be written: {error.strerror or error}. What was written before is kept:"
        " make room (or the folder writable) and run the same command again."
    )


_PARTS = ("bin", "offsets", "flags")
ENDINGS = ("bos_only", "eos_only", "neither", "both")


class CorpusWriter:
    """Writes the files of a prefix.

    Args:
        path_prefix: the files are PREFIX.bin, PREFIX.idx, PREFIX.dis and PREFIX.tmp.
        type_names: the segments of each type are added in this order, a type after the other.
        overwrite: a finished corpus of that prefix is replaced when this one closes.
        sources: where the text is from (anything JSON holds); goes into the header.
        mixed_rules: see `CorpusHeader`.

    Raises:
        UserError: there is a finished corpus, and no `overwrite`.
        StorageError: the files cannot be written.
    """

    _type_index: int

    def __init__(
        self,
        path_prefix: str | Path,
        *,
        tokenizer: TokenizerInfo,
        rules: CutRules,
        language: str,
        type_names: Sequence[str] = ("0",),
        overwrite: bool = False,
        sources: Sequence = (),
        mixed_rules: Sequence[str] = (),
    ) -> None:
        self._settings: dict[str, Any] = {
            "tokenizer": asdict(tokenizer),
            "rules": asdict(rules),
            "language": language,
            "type_names": list(type_names),
            "overwrite": overwrite,
            "sources": list(sources),
            "mixed_rules": list(mixed_rules),
        }
        self._begin(path_prefix, (".idx", ".bin"))
        self._files = {name: GrowingFile(self._part(name)) for name in _PARTS}
        self._files["offsets"].write(bytes(8))

    @classmethod
    def resume(cls, path_prefix: str | Path, state: dict) -> "CorpusWriter":
        """Goes on where `state` was taken; what was added after it is forgotten.

        Raises:
            DataError: the parts are not those that were left.
        """
        writer = cls.__new__(cls)
        writer._settings = state["settings"]
        writer._begin(path_prefix, (".idx",))
        _undo_half_close(writer.path_prefix)
        writer._counts = numpy.array(state["counts"], dtype=numpy.int64)
        writer._endings = numpy.array(state["endings"], dtype=numpy.int64)
        writer._type_index = state["type_index"]
        writer._files = {
            name: GrowingFile(writer._part(name), **state["files"][name]) for name in _PARTS
        }
        return writer

    def add(self, segments: Segments, *, type_index: int = 0) -> None:
        """Appends segments to a type; earlier types are closed by that.

        Raises:
            DataError: an id that the tokenizer does not have.
        """
        assert self._type_index <= type_index < len(self._counts), "types come in order"
        assert len(segments.tokens) == int(segments.lengths.sum()) and (segments.lengths > 0).all()
        if not len(segments):
            return
        self._check_length(segments)
        self._check_ids(segments)
        start = int(self._counts[:, 1].sum())
        self._type_index = type_index
        ends = numpy.cumsum(segments.lengths, dtype=numpy.uint64) + numpy.uint64(start)
        tokens = segments.tokens.astype(self._dtype.newbyteorder("<"), copy=False)
        self._files["bin"].write(_bytes_of(tokens))
        self._files["offsets"].write(_bytes_of(ends.astype("<u8", copy=False)))
        self._files["flags"].write(_bytes_of(segments.flags.astype(numpy.uint8, copy=False)))
        begins = int(numpy.count_nonzero(segments.flags & BEGINS))
        self._counts[type_index] += (len(segments), len(tokens), begins)
        self._endings += count_endings(segments.flags)

    def state(self) -> dict:
        """All that `resume` needs, as JSON holds it; what was added so far is on the disk."""
        return {
            "settings": self._settings,
            "counts": self._counts.tolist(),
            "endings": self._endings.tolist(),
            "type_index": self._type_index,
            "files": {name: file.sync() for name, file in self._files.items()},
        }

    def close(self) -> CorpusHeader:
        """Makes the corpus whole under its final names.

        Returns:
            Its header.
        """
        for file in self._files.values():
            file.sync()
            file.close()
        header = self._header()
        self._write_index(header)
        counts = {
            "counts": [kind.num_segments for kind in header.types],
            "types": [asdict(kind) for kind in header.types],
        }
        _write_json(path_of(self.path_prefix, ".dis.part"), counts)
        endings = dict(zip(ENDINGS, self._endings.tolist(), strict=True))
        _write_json(path_of(self.path_prefix, ".tmp.part"), endings)
        # an old index goes first: it must never lie beside new tokens
        path_of(self.path_prefix, ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".dis", ".tmp", ".idx"):  # last: what has an index is whole
            os.replace(path_of(self.path_prefix, f"{suffix}.part"), self._final(suffix))
        _sync_folder(self._final(".idx").parent)
        for name in ("offsets", "flags"):
            self._part(name).unlink()
        return header

    def discard(self) -> None:
        """Deletes the parts; a finished corpus of this prefix stays as it was."""
        for file in self._files.values():
            file.close()
        for name in (*_PARTS, "idx", "dis", "tmp"):
            self._part(name).unlink(missing_ok=True)

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Leaves no parts behind a failure; does not close."""
        if error is not None:
            self.discard()

    def _begin(self, path_prefix: str | Path, suffixes: tuple[str, ...]) -> None:
        self.path_prefix = os.fspath(path_prefix)
        settings = self._settings
        if not settings["overwrite"]:
            _refuse_finished(self.path_prefix, suffixes)
        self._final(".bin").parent.mkdir(parents=True, exist_ok=True)
        self._vocab_size = settings["tokenizer"]["vocab_size"]
        self._dtype = numpy.dtype(dtype_for(self._vocab_size))
        self._counts = numpy.zeros((len(settings["type_names"]), 3), dtype=numpy.int64)
        self._endings = numpy.zeros(4, dtype=numpy.int64)
        self._type_index = 0

    def _final(self, suffix: str) -> Path:
        return path_of(self.path_prefix, suffix)

    def _part(self, name: str) -> Path:
        return path_of(self.path_prefix, f".{name}.part")

    def _check_ids(self, segments: Segments) -> None:
        if int(segments.tokens.max()) < self._vocab_size:
            return
        place = int(numpy.argmax(segments.tokens >= self._vocab_size))
        within = int(numpy.searchsorted(numpy.cumsum(segments.lengths), place, side="right"))
        number = int(self._counts[:, 0].sum()) + within
        raise DataError(
            f"Token id {segments.tokens[place]} in segment {number} of {self.path_prefix};"
            f" tokenizer {self._settings['tokenizer']['name']!r} says its ids are below"
            f" {self._vocab_size}: its vocab_size is wrong, or another tokenizer made the ids."
            " Use one tokenizer for all, and check its files."
        )

    def _check_length(self, segments: Segments) -> None:
        longest, limit = int(segments.lengths.max()), self._settings["rules"]["seq_length"]
        if longest > limit:
            raise DataError(
                f"A segment of {longest} tokens for {self.path_prefix}, whose segments have at most"
                f" {limit} (seq_length): cut documents before adding them, or raise `seq_length`."
            )

    def _header(self) -> CorpusHeader:
        settings = self._settings
        kinds = zip(settings["type_names"], self._counts.tolist(), strict=True)
        return CorpusHeader(
            dtype=self._dtype.name,
            tokenizer=TokenizerInfo(**settings["tokenizer"]),
            rules=CutRules(**settings["rules"]),
            language=settings["language"],
            types=tuple(SegmentType(i, name, *counts) for i, (name, counts) in enumerate(kinds)),
            bin_size=self._files["bin"].size,
            bin_sha256=self._files["bin"].sha256,
            edges_sha256=edges_digest(self._part("bin")),
            arrays_sha256=self._arrays_digest(),
            sources=tuple(settings["sources"]),
            mixed_rules=tuple(settings["mixed_rules"]),
        )

    def _arrays_digest(self) -> str:
        both = self._files["offsets"].sha256 + self._files["flags"].sha256
        return hashlib.sha256(both.encode()).hexdigest()

    def _write_index(self, header: CorpusHeader) -> None:
        with open(self._part("idx"), "wb") as index:
            index.write(encode_header(header))
            for name in ("offsets", "flags"):
                for chunk in read_chunks(self._part(name)):
                    index.write(chunk)
            index.flush()
            os.fsync(index.fileno())


def count_endings(flags: numpy.ndarray) -> numpy.ndarray:
    """int64 [4]: segments with BOS only, EOS only, neither, both."""
    has_bos, has_eos = (flags & HAS_BOS) != 0, (flags & HAS_EOS) != 0
    both = int(numpy.count_nonzero(has_bos & has_eos))
    bos = int(numpy.count_nonzero(has_bos)) - both
    eos = int(numpy.count_nonzero(has_eos)) - both
    return numpy.array([bos, eos, len(flags) - bos - eos - both, both], dtype=numpy.int64)


def _bytes_of(array: numpy.ndarray) -> memoryview:
    return numpy.ascontiguousarray(array).data.cast("B")


def _refuse_finished(prefix: str, suffixes: tuple[str, ...]) -> None:
    for suffix in suffixes:
        if path_of(prefix, suffix).exists():
            raise UserError(
                f"{path_of(prefix, suffix)} exists: a finished corpus is not overwritten unasked."
                " Give another prefix, or `overwrite` to replace it."
            )


def _undo_half_close(prefix: str) -> None:
    # killed between the first and the last rename of `close`
    part, whole = path_of(prefix, ".bin.part"), path_of(prefix, ".bin")
    if not part.exists() and whole.exists() and not path_of(prefix, ".idx").exists():
        os.replace(whole, part)


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
