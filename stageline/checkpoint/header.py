"""Reads the header of a safetensors file and refuses a false one, before anything is allocated.

The library checks much of this too; here the message names the file, the tensor and both numbers,
doubled names are seen, and what is no safetensors file at all is called by its name.
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from stageline.errors import CheckpointError

# a tensor takes about 150 bytes: 200,000 of them, more than a model of 10^12 weights in one file
MAX_HEADER_BYTES = 32_000_000
_LENGTH_BYTES = 8
_MAX_COUNT = 2**64 - 1
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_METADATA = "__metadata__"
_LOOKS = (
    (b"version https://git-lfs", "a Git LFS pointer: fetch the file itself with `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive, such as torch.save writes"),
    (b"\x80\x02", "a pickle, such as torch.save wrote once"),
    (b"GGUF", "a GGUF file: convert it to safetensors first"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"\x89HDF", "an HDF5 file"),
    (b"{", "JSON: perhaps the index, or an error message of a server"),
)


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of one tensor.

    Attributes:
        dtype: the format's name of it, such as BF16.
        start, end: its bytes, counted from the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def is_floating_point(self) -> bool:
        """Whether its numbers are floats, of whatever width."""
        return self.dtype.startswith(("F", "BF"))


class _Broken(Exception):
    """Why a header is none."""


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Name -> entry of every tensor in a safetensors file, all of it checked.

    Raises:
        CheckpointError: it is no whole safetensors file; the message says how it differs.
    """
    try:
        descriptor = _open_file(file)
        try:
            size = os.fstat(descriptor).st_size
            text = _read_text(descriptor, size)
        finally:
            os.close(descriptor)
        entries = _parse(text)
        _check_places(entries, begin=_LENGTH_BYTES + len(text), size=size)
    except (_Broken, OSError) as error:
        reason = str(error) if isinstance(error, _Broken) else error.strerror
        raise CheckpointError(
            f"{file} cannot be read: {reason}. A whole safetensors file was expected: it was cut "
            "short, changed, or is something else by that name. Copy it again."
        ) from error
    return entries


def _open_file(file: Path) -> int:
    mode = file.stat().st_mode  # before opening: to open a pipe would wait for its writer
    if stat.S_ISDIR(mode):
        raise _Broken("it is a folder")
    if not stat.S_ISREG(mode):
        raise _Broken("it is a device or a pipe")
    return os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))


def _read_text(descriptor: int, size: int) -> bytes:
    """The header's JSON, of a length that was compared with the file first."""
    start = os.pread(descriptor, 64, 0)
    looks = _looks_like(start)
    if size < _LENGTH_BYTES:
        raise _Broken(f"expected {_LENGTH_BYTES} bytes at least, found {size}{looks}")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if looks and start[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        raise _Broken(looks.removeprefix("; "))
    if length > MAX_HEADER_BYTES:
        raise _Broken(f"its header claims {length} bytes, at most {MAX_HEADER_BYTES} are read")
    if length > size - _LENGTH_BYTES:
        raise _Broken(f"expected {length + _LENGTH_BYTES} bytes for its header, found {size}")
    text = os.pread(descriptor, length, _LENGTH_BYTES)
    if len(text) != length:
        raise _Broken(f"expected {length} bytes of header, found {len(text)}")
    return text


def _looks_like(start: bytes) -> str:
    """What a file is by its first bytes, for the message; "" if nothing is known."""
    plain = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if plain.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "; it looks like HTML: a page of a server that was saved in place of the file"
    for magic, name in _LOOKS:
        if start.startswith(magic):
            return f"; it looks like {name}"
    if start and not start.strip(b"\0"):
        return "; it begins with zeros: its space was reserved and never written"
    return ""


# -- the JSON ----------------------------------------------------------------------------------


def _parse(text: bytes) -> dict[str, TensorEntry]:
    if not text.startswith(b"{"):
        raise _Broken("its header does not begin with {")
    try:
        header = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            # -0 is no count, though Python reads it as 0
            parse_int=lambda digits: -1 if digits.startswith("-") else int(digits),
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise _Broken(f"its header is no UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise _Broken(f"its header is no JSON ({str(error)[:100]})") from error
    _check_metadata(header.pop(_METADATA, None))
    return {name: _entry(name, value) for name, value in header.items()}


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in found if names.count(name) > 1)
        raise _Broken(f"its header has {double!r} twice")
    for name in found:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise _Broken(f"its header has {name!r}, which is no text")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise _Broken(f"its header has {word}, which is no JSON")


def _check_metadata(value: object) -> None:
    if value is not None and not (
        isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    ):
        raise _Broken(f"its {_METADATA} is no object of texts")


def _entry(name: str, value: object) -> TensorEntry:
    if not isinstance(value, dict):
        raise _Broken(f"its entry {name!r} is no object")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _Broken(f"its tensor {name!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _Broken(
            f"its tensor {name!r} has shape {str(shape)[:80]} and offsets {str(offsets)[:80]}"
        )
    return TensorEntry(dtype, tuple(shape), *offsets)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        type(count) is int and 0 <= count <= _MAX_COUNT for count in value
    )


# -- the places --------------------------------------------------------------------------------


def _check_places(entries: dict[str, TensorEntry], *, begin: int, size: int) -> None:
    """Tensors must follow one another to the file's last byte, each as long as its shape says."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            how = "overlaps the one before" if entry.start < position else "leaves a hole"
            raise _Broken(f"its tensor {name!r} {how}: expected at {position}, is at {entry.start}")
        expected = _num_bytes(name, entry)
        if entry.end - entry.start != expected:
            raise _Broken(
                f"its tensor {name!r}, {entry.dtype} {list(entry.shape)}, expected {expected} "
                f"bytes, found {entry.end - entry.start} by its offsets"
            )
        position = entry.end
    if begin + position != size:
        raise _Broken(f"expected {begin + position} bytes by its header, found {size}")


def _num_bytes(name: str, entry: TensorEntry) -> int:
    count = 1
    for length in entry.shape:
        count *= length
        if count > _MAX_COUNT:
            raise _Broken(f"its tensor {name!r} has a shape that overflows: {list(entry.shape)}")
    bits = count * _BITS[entry.dtype]
    if bits > _MAX_COUNT or bits % 8:
        raise _Broken(f"its tensor {name!r} has a shape that is no number of bytes: {entry.shape}")
    return bits // 8
