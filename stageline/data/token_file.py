"""A folder of encoded rows: written once as a whole, then mapped into memory and never changed.

`ids.bin` and `marks.bin` hold the tokens of one row after the other; `names.npy` the rows' names in
order, with their places in `places.npy`. Nothing is pickled. What does not have the sums that
`facts.json` says is not believed.
"""

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy

from stageline.data.encode import Encoded

# a bit each in a token's marks, and eight bits further whether the row has such marks at all
_MARKS = ("is_target", "is_cuttable", "is_marked", "is_text", "is_answer", "is_image")
_NAME = numpy.dtype([("high", "<u8"), ("low", "<u8")])
_CHUNK = 1 << 24
_FILES = ("ids.bin", "marks.bin", "names.npy", "places.npy")

Entry = tuple[bytes, numpy.ndarray, numpy.ndarray]  # name, ids, marks


class DamagedTokens(Exception):
    """A folder that is not what was written."""


def to_entry(name: bytes, encoded: Encoded) -> Entry:
    """A row as it is written."""
    marks = numpy.zeros(len(encoded), "<u2")
    for bit, kind in enumerate(_MARKS):
        if own := getattr(encoded, kind):
            marks |= numpy.array(own, "<u2") << bit | 1 << bit + 8
    return name, numpy.array(encoded.input_ids, "<i4"), marks


class TokenFile:
    """The rows of one folder.

    Raises:
        DamagedTokens: a file is missing, cut or changed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            for name in _FILES:
                if _sum(folder / name) != facts["sums"][name]:
                    raise DamagedTokens(f"{folder / name} is not what was written")
            self._names = numpy.load(folder / "names.npy", mmap_mode="r", allow_pickle=False)
            self._places = numpy.load(folder / "places.npy", mmap_mode="r", allow_pickle=False)
            self._ids = _mapped(folder / "ids.bin", "<i4")
            self._marks = _mapped(folder / "marks.bin", "<u2")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedTokens(f"{folder}: {error}") from error

    def __len__(self) -> int:
        return len(self._names)

    def get(self, name: bytes) -> Encoded | None:
        """A row by its name; None where there is none."""
        wanted = numpy.frombuffer(name, _NAME)[0]
        first, last = 0, len(self._names)
        while first < last:  # numpy's search does not compare pairs
            middle = (first + last) // 2
            if _order(self._names[middle]) < _order(wanted):
                first = middle + 1
            else:
                last = middle
        if first == len(self._names) or self._names[first] != wanted:
            return None
        start, length = map(int, self._places[first])
        marks = self._marks[start : start + length]
        there = int(marks[0]) if length else 0
        kinds = {
            kind: ((marks & 1 << bit) != 0).tolist() if there & 1 << bit + 8 else []
            for bit, kind in enumerate(_MARKS)
        }
        return Encoded(self._ids[start : start + length].tolist(), **kinds)


def write_tokens(folder: Path, entries: Iterable[Entry], *, key: dict[str, Any]) -> None:
    """Writes a folder that appears whole; replaces one of that name.

    Args:
        key: what the rows depend on, for people.
    """
    unfinished = folder.with_name(f"unfinished-{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        names, places, start = bytearray(), [], 0
        with (unfinished / "ids.bin").open("wb") as ids_file:
            with (unfinished / "marks.bin").open("wb") as marks_file:
                for name, ids, marks in entries:
                    names += name
                    places.append((start, len(ids)))
                    start += len(ids)
                    ids_file.write(ids.tobytes())
                    marks_file.write(marks.tobytes())
        array = numpy.frombuffer(bytes(names), _NAME)
        # of a row that came twice the first stays
        _, first = numpy.unique(array, return_index=True)
        numpy.save(unfinished / "names.npy", array[first], allow_pickle=False)
        table = numpy.array(places, numpy.int64).reshape(-1, 2)
        numpy.save(unfinished / "places.npy", table[first], allow_pickle=False)
        facts = {"sums": {name: _sum(unfinished / name) for name in _FILES}, "key": key}
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        (unfinished / "facts.json").write_text(text, encoding="utf-8")
        if folder.exists():
            os.rename(folder, unfinished / "damaged")
        os.rename(unfinished, folder)
        shutil.rmtree(folder / "damaged", ignore_errors=True)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _order(name: Any) -> tuple[int, int]:
    return int(name["high"]), int(name["low"])


def _mapped(path: Path, dtype: str) -> numpy.ndarray:
    if path.stat().st_size == 0:  # cannot be mapped
        return numpy.empty(0, dtype)
    return numpy.memmap(path, dtype, mode="r")


def _sum(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    size, value = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            value = zlib.crc32(chunk, value)
    return [size, value]
