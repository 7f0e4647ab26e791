"""A file that grows and knows its sha256, and can go on from an earlier length.

Written as a part (NAME.part) and renamed when whole. Knows bytes only.
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from stageline.errors import DataError, StorageError, UserError

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
            raise _cannot_write(path, error) from error
        self._lock()
        if sha256 is not None:
            self._check_part(size, sha256)
        self._file.truncate(size)
        self._file.seek(size)

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

    def _lock(self) -> None:
        try:
            # of this process alone: workers that it forks do not keep it after a kill
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            self._file.close()
            raise UserError(
                f"{self.path} is being written by another process: two would spoil the corpus. Wait"
                " for it or end it, or give another prefix."
            ) from None

    def _check_part(self, size: int, sha256: str) -> None:
        found = os.fstat(self._file.fileno()).st_size
        if found < size:
            raise DataError(
                f"{self.path} has {found:,} bytes; {size:,} were written when this corpus was left:"
                " the part was cut or deleted, so it cannot be gone on with. Start anew with"
                " --overwrite."
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
