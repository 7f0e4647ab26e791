"""Opens compressed files as streams that notice when they end too early."""

import bz2
import gzip
import io
from typing import Any, BinaryIO

from stageline.errors import UserError

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
