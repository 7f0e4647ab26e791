"""Tensors <-> the bytes of one safetensors file with a checksum: small, exact, and no pickle.

A pixel has 256 values a channel, whatever mean and deviation made of them. So floats are stored as
one byte each and a table of the values, where that gives every bit back; else as they are.
"""

import json
import zlib
from collections.abc import Mapping

import numpy
import torch
from safetensors.numpy import load, save

_CHECK = "crc32"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST = 256  # values that one byte can name
_BUCKETS = 1 << 16


class DamagedEntry(ValueError):
    """Bytes that are not what was written."""


def to_bytes(tensors: Mapping[str, torch.Tensor], *, name: str) -> bytes:
    """A safetensors file.

    Args:
        name: what the file is of; `from_bytes` asks for it again.
    """
    arrays: dict[str, numpy.ndarray] = {}
    kinds: dict[str, str] = {}
    for key, tensor in tensors.items():
        kinds[key] = str(tensor.dtype).removeprefix("torch.")
        bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).numpy()
        packed = _pack(bits, is_float=tensor.dtype == torch.float32)
        if packed is None:
            arrays[key] = bits
        else:
            arrays[f"{key}.codes"], arrays[f"{key}.table"] = packed
    plain = save(arrays)
    header, data = _split(plain)
    header["__metadata__"] = {
        "name": name,
        "dtypes": json.dumps(kinds),
        _CHECK: f"{_checksum(header, data, name, kinds):08x}",
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def from_bytes(content: bytes, *, name: str) -> dict[str, torch.Tensor]:
    """The tensors of `to_bytes`.

    Raises:
        DamagedEntry: cut, changed, or of another name.
    """
    try:
        header, data = _split(content)
        said = header.pop("__metadata__")
        kinds = json.loads(said["dtypes"])
        if said["name"] != name or int(said[_CHECK], 16) != _checksum(header, data, name, kinds):
            raise DamagedEntry("the checksum differs")
        arrays = load(content)
        return {key: _unpack(arrays, key, getattr(torch, kind)) for key, kind in kinds.items()}
    except DamagedEntry:
        raise
    except Exception as error:  # what a changed header leads to is anybody's guess
        raise DamagedEntry(str(error)) from error


def _split(content: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _checksum(header: dict, data: bytes, name: str, kinds: dict[str, str]) -> int:
    told = json.dumps([header, name, kinds], sort_keys=True).encode()
    return zlib.crc32(data, zlib.crc32(told))


def _pack(bits: numpy.ndarray, *, is_float: bool) -> tuple[numpy.ndarray, numpy.ndarray] | None:
    """(codes in the shape of `bits`, table [channels, 256]); None: more values than codes."""
    if bits.itemsize == 1 or bits.size == 0:
        return None
    for channels in (3, 1):
        split = _by_channel(bits, channels)
        if split is None:
            continue
        tables = [numpy.unique(split[:, channel]) for channel in range(channels)]
        if max(map(len, tables)) > _MOST:
            continue
        codes = numpy.empty(bits.shape, numpy.uint8)
        places = _by_channel(codes, channels)
        table = numpy.zeros((channels, _MOST), bits.dtype)
        for channel, values in enumerate(tables):
            places[:, channel] = _places(split[:, channel], values, is_float=is_float)
            table[channel, : len(values)] = values
        return codes, table
    return None


def _places(bits: numpy.ndarray, values: numpy.ndarray, *, is_float: bool) -> numpy.ndarray:
    """Where each of `bits` stands in the sorted `values`, which hold it."""
    if is_float and numpy.isfinite(values.view(numpy.float32)).all():
        known = values.view(numpy.float32)
        low, high = known.min(), known.max()
        if high > low:
            # a look-up by size takes a tenth of a search; the same sum for both, so it is exact
            step = numpy.float32(_BUCKETS - 1) / (high - low)
            buckets = ((known - low) * step).astype(numpy.uint16)
            if len(set(buckets.tolist())) == len(known):
                table = numpy.zeros(_BUCKETS, numpy.uint8)
                table[buckets] = numpy.arange(len(known))
                return table[((bits.view(numpy.float32) - low) * step).astype(numpy.uint16)]
    return numpy.searchsorted(values, bits)


def _by_channel(values: numpy.ndarray, channels: int) -> numpy.ndarray | None:
    """A view [rest, channels, pixels]: of images [..., C, H, W] or of patches [..., C * pixels]."""
    if channels == 1:
        return values.reshape(1, 1, -1)
    if values.ndim >= 3 and values.shape[-3] == channels:
        return values.reshape(-1, channels, values.shape[-2] * values.shape[-1])
    if values.shape[-1] % channels == 0:
        return values.reshape(-1, channels, values.shape[-1] // channels)
    return None


def _unpack(arrays: Mapping[str, numpy.ndarray], key: str, dtype: torch.dtype) -> torch.Tensor:
    if key in arrays:
        bits = arrays[key]
        bits = bits if bits.flags.writeable else bits.copy()
    else:
        codes, table = arrays[f"{key}.codes"], arrays[f"{key}.table"]
        bits = numpy.empty(codes.shape, table.dtype)
        split, places = _by_channel(codes, len(table)), _by_channel(bits, len(table))
        for channel, values in enumerate(table):
            places[:, channel] = values[split[:, channel]]
    return torch.from_numpy(bits).view(dtype)
