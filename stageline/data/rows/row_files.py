"""Files of rows: what they were when they were read, their lines, and what is no such file.

Knows nothing of what a line means.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stageline.errors import DataError, UserError

MAX_LINE_BYTES = 32 << 20  # a book has 1 MiB
_CHUNK = 1 << 20
# what files begin with that are no text; in the order of _SUFFIXES
_MAGIC = (
    (b"\x1f\x8b", "gzip", "decompress it first (gunzip)"),
    (b"PK\x03\x04", "zip", "unpack it first (unzip)"),
    (b"\x28\xb5\x2f\xfd", "zstandard", "decompress it first (unzstd)"),
    (b"\xfd7zXZ\x00", "xz", "decompress it first (unxz)"),
    (b"BZh", "bzip2", "decompress it first (bunzip2)"),
    (b"PAR1", "parquet", "write its rows as JSON lines (pandas: to_json(lines=True))"),
    (b"ARROW1", "arrow", "write its rows as JSON lines (datasets: to_json)"),
    (b"SQLite format 3", "SQLite", "write its rows as JSON lines"),
)
_SUFFIXES = {".gz": 0, ".zip": 1, ".zst": 2, ".xz": 3, ".bz2": 4, ".parquet": 5, ".arrow": 6}


@dataclass(frozen=True)
class RowFile:
    """A file as it was when its rows were read.

    Attributes:
        time_ns: of its last change.
        digest: SHA-256 of its bytes.
    """

    path: Path
    size: int
    time_ns: int
    digest: str

    def check_unchanged(self) -> None:
        """Refuses to go on with rows of a file that is another one by now.

        Raises:
            DataError: names both sizes and times.
        """
        try:
            now = os.stat(self.path)
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be found any more ({error.strerror}), and its rows are in "
                "use. A run's data has to stay, because else nobody could say what was trained: "
                "put the file back and start again."
            ) from error
        if (now.st_size, now.st_mtime_ns) != (self.size, self.time_ns):
            raise DataError(
                f"{self.path} changed while it was in use: it had {self.size} bytes, last changed "
                f"at {self.time_ns / 1e9:.6f} s, and has {now.st_size}, changed at "
                f"{now.st_mtime_ns / 1e9:.6f} s. A run's data has to stay as it is, because else "
                "nobody could say what was trained, and processes might read different rows. "
                "Start again with the new file, or write changes into a copy."
            )


def refuse_other_kinds(path: Path, head: bytes) -> None:
    """Refuses archives and tables by their first bytes, and by their names.

    Raises:
        DataError: names kind and cure.
    """
    by_name = _SUFFIXES.get(path.suffix.lower())
    found = next((item for item in _MAGIC if head.startswith(item[0])), None)
    how = "its first bytes say so"
    if found is None and by_name is not None:
        found, how = _MAGIC[by_name], "its name says so, though its first bytes do not"
    if found is not None:
        raise DataError(
            f"{path} is a {found[1]} file ({how}). JSON lines or a JSON list were expected, as "
            f"plain text, because other kinds of files are not read: {found[2]}."
        )


class RowFileReader:
    """Reads a file once, from its beginning to its end, and then knows what it was.

    Raises:
        UserError: there is no such file.
        DataError: it cannot be read, or is of a kind that is not read.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(
                f"there is no file {path}. The dataset's rows were expected there: check "
                "`dataset_path` and the options of the dataset."
            )
        self.path = path
        self._digest = hashlib.sha256()
        self._size = 0
        self._before: os.stat_result | None = None

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number from 1, bytes before it, line) of each line.

        Of a line longer than `MAX_LINE_BYTES` no more than one byte above that is handed out.
        """
        with self._open() as file:
            number = 0
            while True:
                start = self._size
                line = self._read(file.readline, MAX_LINE_BYTES + 1)
                if not line:
                    return
                number += 1
                rest = line
                while len(line) > MAX_LINE_BYTES and rest and not rest.endswith(b"\n"):
                    rest = self._read(file.readline, _CHUNK)
                yield number, start, line

    def whole(self) -> bytes:
        """All bytes."""
        with self._open() as file:
            return self._read(file.read, -1)

    def done(self) -> RowFile:
        """The file that was read."""
        assert self._before is not None, "nothing was read"
        before = self._before
        if (before.st_size, before.st_mtime_ns) != (self._size, os.stat(self.path).st_mtime_ns):
            raise DataError(
                f"{self.path} changed while it was read: {before.st_size} bytes were expected, "
                f"{self._size} came. A file that nobody writes was expected, because each process "
                "has to read the same rows: wait until it is complete, and start again."
            )
        return RowFile(self.path, before.st_size, before.st_mtime_ns, self._digest.hexdigest())

    def _open(self) -> BinaryIO:
        try:
            file = self.path.open("rb")
            self._before = os.fstat(file.fileno())
            head = file.read(16)
            file.seek(0)
        except OSError as error:
            raise self._unreadable(error) from error
        refuse_other_kinds(self.path, head)
        return file

    def _read(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            data = read(size)
        except OSError as error:
            raise self._unreadable(error) from error
        self._size += len(data)
        self._digest.update(data)
        return data

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(
            f"{self.path} cannot be read after {self._size} bytes ({error.strerror or error}). Its "
            "rows are the data of the run: check its rights and its disk."
        )
