"""What is known of image files: size and kind, their content's hash, and whether they decode.

A file is known by its path, length and both times of change, so that one that was replaced is a
new one. In memory, and in a file of lines if there is one: every process reads the lines of the
others and adds its own. A line that is torn or damaged is passed over.
"""

import hashlib
import json
import os
import warnings
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What one image file is.

    Attributes:
        size: width and height as the header says them, before any turning.
        mode, format: Pillow's names.
        is_turned: people see width and height exchanged (EXIF).
        digest: hash of the content, where it was read.
        is_whole: its pixels were decoded without an error.
    """

    size: tuple[int, int]
    mode: str
    format: str
    is_turned: bool = False
    digest: str | None = None
    is_whole: bool = False


def file_key(path: str, stat: os.stat_result) -> str:
    """Tells one state of a file from others."""
    text = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


class ImageIndex:
    """Facts of files by their key.

    Args:
        file: where they are kept; None: in memory alone.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known: dict[str, FileFacts] = {}
        self._read_bytes = 0

    def get(self, key: str) -> FileFacts | None:
        """What is known of a file, also by other processes."""
        if key not in self._known:
            self._read_news()
        return self._known.get(key)

    def note(self, key: str, facts: FileFacts) -> None:
        """Adds to what is known."""
        old = self._known.get(key)
        if old is not None and (old.size, old.mode, old.format) == (
            facts.size,
            facts.mode,
            facts.format,
        ):
            facts = replace(
                facts, digest=facts.digest or old.digest, is_whole=facts.is_whole or old.is_whole
            )
        if facts == old:
            return
        self._known[key] = facts
        self._write(key, facts)

    def _write(self, key: str, facts: FileFacts) -> None:
        if self._file is None:
            return
        try:
            # one write of one line: those of several processes do not mix
            place = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(place, _line(key, facts))
            finally:
                os.close(place)
        except OSError as error:
            warnings.warn(f"the index {self._file} of images is not kept: {error}", stacklevel=2)
            self._file = None

    def _read_news(self) -> None:
        """Reads what was added since; a line without its end comes next time."""
        if self._file is None:
            return
        try:
            if self._file.stat().st_size <= self._read_bytes:
                return
            with self._file.open("rb") as file:
                file.seek(self._read_bytes)
                news = file.read()
        except OSError:  # not there yet, or gone: then nothing is known
            return
        whole = news[: news.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            entry = _parse(line)
            if entry is not None:
                self._known[entry[0]] = entry[1]


def _line(key: str, facts: FileFacts) -> bytes:
    fields = [key, *facts.size, facts.mode, facts.format, facts.is_turned]
    text = json.dumps([*fields, facts.digest, facts.is_whole]).encode()
    return b"\n%08x %s\n" % (zlib.crc32(text), text)  # a torn line before it ends here


def _parse(line: bytes) -> tuple[str, FileFacts] | None:
    check, _, text = line.partition(b" ")
    try:
        if int(check, 16) != zlib.crc32(text):
            return None
        fields: list[Any] = json.loads(text)
        key, width, height, mode, kind, is_turned, digest, is_whole = fields
        return key, FileFacts((width, height), mode, kind, is_turned, digest, is_whole)
    except ValueError:
        return None
