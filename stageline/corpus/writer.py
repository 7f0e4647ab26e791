"""Write a corpus segment by segment; a writer can resume after a kill.

Memory does not grow with the corpus. While it is written, its files are parts (PREFIX.bin.part,
...); `close` renames them, the `.idx` last, so that a corpus with an `.idx` is complete.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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

_CHUNK = 1 << 22


class GrowingFile:
    """A part (NAME.part) that grows, with its sha256; it can resume at an earlier length.

    Args:
        size, sha256: what `sync` returned before. The file is cut to that size and read once, to
            check that it holds what was written. None starts again from the beginning.
    """

    def __init__(self, path: Path, *, size: int = 0, sha256: str | None = None) -> None:
        self.path = path
        self.size = size
        self._hash = hashlib.sha256()
        with writing(path):  # never "wb": that would empty the file before the lock is held
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            # The lock belongs to this process: forked workers do not keep it after a kill.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # else a file system without locks
                self._file.close()
                raise UserError(
                    f"{path} is being written by another process. Wait for it, or end it."
                ) from error
        if sha256 is not None:
            left = size
            # through the one handle: closing another would give up the lock
            while chunk := self._file.read(min(_CHUNK, left)):
                self._hash.update(chunk)
                left -= len(chunk)
            if left or self.sha256 != sha256:
                raise DataError(
                    f"{path} is not what was written when this corpus was left, so it cannot be "
                    "continued. Start again with `overwrite`."
                )
        self._file.truncate(size)
        self._file.seek(size)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; the state counts them from now on."""
        with writing(self.path):
            self._file.write(data)
        self._hash.update(data)
        self.size += memoryview(data).nbytes

    def sync(self) -> dict[str, Any]:
        """Write everything to the disk; return the arguments that resume here."""
        with writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"size": self.size, "sha256": self.sha256}

    @property
    def sha256(self) -> str:
        """The sha256 of all bytes so far."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the part; it keeps its name."""
        self._file.close()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a StorageError where a file cannot be written; finished work is kept."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}. Make room, or the folder "
            "writable, and run the same command again: it continues."
        ) from error


_PARTS = ("bin", "offsets", "flags")
ENDINGS = ("bos_only", "eos_only", "neither", "both")


class CorpusWriter:
    """Writes the files of a prefix.

    Args:
        path_prefix: the files are PREFIX.bin, PREFIX.idx, PREFIX.dis and PREFIX.tmp.
        type_names: the segments of each type are added in this order, a type after the other; by
            default one type with the name of the file.
        overwrite: a finished corpus of that prefix is replaced when this one closes.
        sources: where the text is from (anything JSON holds); goes into the header.
        state: what `state()` gave before: the writer resumes there and forgets what was added
            later. The other arguments have to be the same.

    Raises:
        UserError: there is a finished corpus and no `overwrite`, or another process writes it.
        DataError: the parts are not those of `state`.
        StorageError: the files cannot be written.
    """

    def __init__(
        self,
        path_prefix: str | Path,
        *,
        tokenizer: TokenizerInfo,
        rules: CutRules,
        language: str,
        type_names: Sequence[str] = (),
        overwrite: bool = False,
        sources: Sequence = (),
        state: dict[str, Any] | None = None,
    ) -> None:
        self.path_prefix = os.fspath(path_prefix)
        self._tokenizer, self._rules, self._language = tokenizer, rules, language
        self._type_names = type_names or (Path(path_prefix).name,)
        self._sources = sources
        self._dtype = numpy.dtype(dtype_for(tokenizer.vocab_size))
        for path in (path_of(path_prefix, ".idx"), path_of(path_prefix, ".bin")):
            if path.exists() and not overwrite:
                raise UserError(
                    f"{path} exists: this corpus is finished. Give another `save_prefix`, or "
                    "replace it with `overwrite`."
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        told = state or {
            "counts": [[0, 0, 0]] * len(self._type_names),
            "endings": [0] * 4,
            "type_index": 0,
            "files": dict.fromkeys(_PARTS, {}),
        }
        self._counts = numpy.array(told["counts"], dtype=numpy.int64)
        self._endings = numpy.array(told["endings"], dtype=numpy.int64)
        self._type_index = told["type_index"]
        files = told["files"]
        self._files = {name: GrowingFile(self._part(name), **files[name]) for name in _PARTS}
        if state is None:
            self._files["offsets"].write(bytes(8))

    def add(self, segments: Segments, *, type_index: int = 0) -> None:
        """Append segments to a type, which closes earlier types."""
        assert self._type_index <= type_index < len(self._counts), "types come in order"
        assert len(segments.tokens) == int(segments.lengths.sum()) and (segments.lengths > 0).all()
        if not len(segments):
            return
        assert int(segments.lengths.max()) <= self._rules.seq_length, "a segment is too long"
        vocab_size = self._tokenizer.vocab_size
        if int(segments.tokens.max()) >= vocab_size:
            place = int(numpy.argmax(segments.tokens >= vocab_size))
            index = int(self._counts[:, 0].sum())
            index += int(numpy.searchsorted(numpy.cumsum(segments.lengths), place, side="right"))
            raise DataError(
                f"Token id {segments.tokens[place]} in segment {index} of {self.path_prefix}; the "
                f"ids of tokenizer {self._tokenizer.name!r} are below {vocab_size}. Use one "
                "tokenizer for all."
            )
        start = int(self._counts[:, 1].sum())
        self._type_index = type_index
        ends = numpy.cumsum(segments.lengths, dtype=numpy.uint64) + numpy.uint64(start)
        tokens = segments.tokens.astype(self._dtype.newbyteorder("<"), copy=False)
        arrays = {"bin": tokens, "offsets": ends.astype("<u8"), "flags": segments.flags}
        for name, array in arrays.items():
            self._files[name].write(numpy.ascontiguousarray(array).data.cast("B"))
        begins = int(numpy.count_nonzero(segments.flags & BEGINS))
        self._counts[type_index] += (len(segments), len(tokens), begins)
        has_bos, has_eos = (segments.flags & HAS_BOS) != 0, (segments.flags & HAS_EOS) != 0
        ways = (has_bos & ~has_eos, has_eos & ~has_bos, ~has_bos & ~has_eos, has_bos & has_eos)
        self._endings += [int(numpy.count_nonzero(way)) for way in ways]

    def state(self) -> dict:
        """Sync all files to the disk and return the JSON state that resumes here."""
        return {
            "counts": self._counts.tolist(),
            "endings": self._endings.tolist(),
            "type_index": self._type_index,
            "files": {name: file.sync() for name, file in self._files.items()},
        }

    def close(self, *, when_whole: Callable[[], object] = lambda: None) -> CorpusHeader:
        """Complete the corpus under its final names; return its header.

        Args:
            when_whole: called when all is written: after it, `name_files` does what a kill left.
        """
        for file in self._files.values():
            file.sync()
            file.close()
        arrays = self._files["offsets"].sha256 + self._files["flags"].sha256
        header = CorpusHeader(
            dtype=self._dtype.name,
            tokenizer=self._tokenizer,
            rules=self._rules,
            language=self._language,
            types=tuple(
                map(SegmentType, itertools.count(), self._type_names, *self._counts.T.tolist())
            ),
            bin_size=self._files["bin"].size,
            bin_sha256=self._files["bin"].sha256,
            edges_sha256=edges_digest(self._part("bin")),
            arrays_sha256=hashlib.sha256(arrays.encode()).hexdigest(),
            sources=tuple(self._sources),
        )
        with open(self._part("idx"), "wb") as index:
            index.write(encode_header(header))
            for name in ("offsets", "flags"):
                with open(self._part(name), "rb") as part:
                    shutil.copyfileobj(part, index)
            index.flush()
            os.fsync(index.fileno())
        counts = {
            "counts": [kind.num_segments for kind in header.types],
            "types": [asdict(kind) for kind in header.types],
        }
        endings = dict(zip(ENDINGS, self._endings.tolist(), strict=True))
        for name, values in (("dis", counts), ("tmp", endings)):
            text = json.dumps(values, ensure_ascii=False, indent=1) + "\n"
            self._part(name).write_text(text, encoding="utf-8")
        when_whole()
        name_files(self.path_prefix)
        return header

    def discard(self) -> None:
        """Delete the parts; a finished corpus of this prefix stays as it was."""
        for file in self._files.values():
            file.close()
        for name in (*_PARTS, "idx", "dis", "tmp"):
            self._part(name).unlink(missing_ok=True)

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.discard()

    def _part(self, name: str) -> Path:
        return path_of(self.path_prefix, f".{name}.part")


def name_files(path_prefix: str | Path) -> None:
    """Give the parts of a whole corpus their last names, those that do not have them yet."""
    if path_of(path_prefix, ".bin.part").exists():
        # Remove an old index first: it must never be next to new tokens.
        path_of(path_prefix, ".idx").unlink(missing_ok=True)
    for suffix in (".bin", ".dis", ".tmp", ".idx"):  # the index last: with it, a corpus is complete
        part = path_of(path_prefix, f"{suffix}.part")
        if part.exists():
            os.replace(part, path_of(path_prefix, suffix))
    folder = os.open(path_of(path_prefix, ".idx").parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    for name in (".offsets", ".flags"):
        path_of(path_prefix, f"{name}.part").unlink(missing_ok=True)
