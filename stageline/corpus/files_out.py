"""A file that grows and knows its sha256, and can go on from an earlier length.

Written as a part (NAME.part) and renamed when whole. Knows bytes only.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from stageline.errors import DataError, StorageError

CHUNK = 1 << 22


class GrowingFile:
    """Appends bytes to a part.

    Args:
        path: the part.
        size, sha256: None starts anew; else what an earlier `state` said: the file is cut to that
            size and read once, so that what it holds is known to be what was written.

    Raises:
        DataError: the part is shorter than that, or holds something else.
        StorageError: it cannot be written.
    """

    def __init__(self, path: Path, *, size: int = 0, sha256: str | None = None) -> None:
        self.path = path
        self.size = size
        self._hash = hashlib.sha256()
        if sha256 is not None:
            self._check_part(size, sha256)
        try:
            self._file = open(path, "r+b" if sha256 is not None else "wb")
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write(self, data: bytes | memoryview) -> None:
        """Appends; the state counts them from now on."""
        try:
            self._file.write(data)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._hash.update(data)
        self.size += memoryview(data).nbytes

    def sync(self) -> dict:
        """Everything is on the disk; returns what `size` and `sha256` are for going on here."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        return {"size": self.size, "sha256": self.sha256}

    @property
    def sha256(self) -> str:
        """Of all bytes so far."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """Closes the part; it keeps its name."""
        self._file.close()

    def _check_part(self, size: int, sha256: str) -> None:
        found = self.path.stat().st_size if self.path.exists() else -1
        if found < size:
            there = f"{found:,} bytes" if found >= 0 else "missing"
            raise DataError(
                f"{self.path} is {there}; {size:,} bytes were written when this corpus was left:"
                " the part was cut or deleted, so it cannot be gone on with. Start anew with"
                " --overwrite."
            )
        for chunk in read_chunks(self.path, size=size):
            self._hash.update(chunk)
        if self.sha256 != sha256:
            raise DataError(
                f"{self.path} holds other bytes than were written when this corpus was left:"
                " another program changed it, so it cannot be gone on with. Start anew with"
                " --overwrite."
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


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be written: {error.strerror or error}. What was written before is kept:"
        " make room (or the folder writable) and run the same command again."
    )
