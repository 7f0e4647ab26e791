"""Writes a corpus segment by segment, and can go on after a kill. Memory does not grow with it.

While it is being written a corpus lies in parts (PREFIX.bin.part, ...); `close` renames them, the
`.idx` last, so that what has an `.idx` is whole.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy

from stageline.corpus.files_out import GrowingFile, read_chunks
from stageline.corpus.header import (
    CorpusHeader,
    SegmentType,
    dtype_for,
    edges_digest,
    encode_header,
    path_of,
)
from stageline.corpus.segments import BEGINS, HAS_BOS, HAS_EOS, CutRules, Segments, TokenizerInfo
from stageline.errors import DataError, UserError

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
                f" {limit} (seq_length): cut documents before adding them, or raise --seq-length."
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
                " Give another prefix, or --overwrite to replace it."
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
