"""A folder that keeps what was made of image files, for later epochs and other runs.

Any number of processes write at the same time: an entry appears whole, by a rename. Its name is
the hash of the picture's content and of how it was processed, so an entry is never out of date.
When the folder has its size, nothing more is added; nothing is removed. An entry that is damaged
is made again. Trouble with the disk is told once, and the run goes on without.
"""

import os
import time
import uuid
import warnings
from pathlib import Path

import torch

from stageline.data.entry_file import DamagedEntry, from_bytes, to_bytes
from stageline.data.image_index import ImageIndex

BLOCK = 1 << 16  # bytes that one byte of the file `used` stands for
OLD_SECONDS = 3600  # after which a file that was not finished never will be


class ImageCache:
    """Entries of tensors by name, and what is known of image files.

    Args:
        folder: is made; may be used by several runs and machines.
        max_bytes: of all entries together.

    Attributes:
        index: of image files; it is small and has no limit.
        num_hits, num_misses: of this process.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int) -> None:
        self.folder = Path(folder).absolute()
        self.max_bytes = max_bytes
        self.num_hits = self.num_misses = 0
        self._reads = self._writes = True
        self._unfinished = self.folder / "unfinished"
        self._used = self.folder / "used"
        try:
            self._unfinished.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            self._stop_writing(f"cannot be made: {error}")
        self.index = ImageIndex(self.folder / "files.txt")

    def get(self, name: str) -> dict[str, torch.Tensor] | None:
        """The tensors of an entry; None where there is none, or none that is whole."""
        if not self._reads:
            return None
        try:
            tensors = from_bytes(self._place(name).read_bytes(), name=name)
        except (OSError, DamagedEntry):
            self.num_misses += 1
            return None
        self.num_hits += 1
        return tensors

    def put(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps an entry, if there is room."""
        if not self._writes:
            return
        content = to_bytes(tensors, name=name)
        try:
            if self.used_bytes + len(content) > self.max_bytes:
                self._stop_writing(
                    f"holds its {self.max_bytes / 2**30:.4g} GiB; the other pictures are processed "
                    "each time. Raise --image-cache-gib, or empty the folder"
                )
                return
            self._write(self._place(name), content)
        except OSError as error:
            self._stop_writing(f"cannot be written to: {error}. What it holds is still used")

    def ignore(self) -> None:
        """From now on nothing is read or written: what is there is wrong."""
        self._reads = self._writes = False

    @property
    def used_bytes(self) -> int:
        """Of all entries, as the processes that wrote them counted: rounded up to blocks."""
        try:
            return self._used.stat().st_size * BLOCK
        except FileNotFoundError:
            return 0

    def _place(self, name: str) -> Path:
        return self.folder / "pixels" / name[:2] / f"{name}.safetensors"

    def _write(self, place: Path, content: bytes) -> None:
        is_new = not place.exists()
        unfinished = self._unfinished / f"{place.stem}-{uuid.uuid4().hex}"
        try:
            unfinished.write_bytes(content)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(unfinished, place)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        if is_new:
            self._count(len(content))

    def _count(self, num_bytes: int) -> None:
        """Adds to the bytes in use: appending needs no lock, and no process has to walk about."""
        place = os.open(self._used, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(place, b"." * -(-num_bytes // BLOCK))
        finally:
            os.close(place)

    def _sweep(self) -> None:
        """Removes what killed processes left."""
        for path in self._unfinished.iterdir():
            try:
                if time.time() - path.stat().st_mtime > OLD_SECONDS:
                    path.unlink()
            except FileNotFoundError:  # another process was faster
                continue

    def _stop_writing(self, why: str) -> None:
        self._writes = False
        warnings.warn(f"the image cache {self.folder} {why}", stacklevel=3)
