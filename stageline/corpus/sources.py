"""Finds the files that a corpus is built from, and remembers what they were.

Knows suffixes, sizes and times; what a line means is in `row_text`.
"""

import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stageline.errors import DataError, UserError

TEXT = "text"
JSON = "json"
PARQUET = "parquet"
KINDS = {".txt": TEXT, ".jsonl": JSON, ".json": JSON, ".ndjson": JSON, ".parquet": PARQUET}
COMPRESSIONS = (".gz", ".bz2", ".zst")
_EDGE_BYTES = 1 << 16
# a build beside its input lists bad lines there, and must not read them when it goes on
_OUR_LIST = ".bad.jsonl"
_EXPECTED = (
    "Text was expected, a document a line (.txt), JSON lines (.jsonl .json .ndjson), these "
    "compressed (.gz .bz2 .zst), or .parquet"
)


@dataclass(frozen=True)
class Source:
    """A file as it was when the build began.

    Attributes:
        kind: text, json or parquet.
        compression: .gz, .bz2, .zst, or "" for none.
        time_ns: of its last change.
        edges: SHA-256 of its first and last 64 KiB: a changed file of the same size and time.
    """

    path: str
    kind: str
    compression: str
    size: int
    time_ns: int
    edges: str


def find_sources(files: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Source]:
    """The files of some names, folders and patterns, in the order in which they are read.

    What a pattern or a folder (with its subfolders) holds is sorted by name. A folder gives the
    files with a known suffix; hidden ones are left out.

    Raises:
        UserError: nothing is there, a name has no known suffix, or a file is named twice.
        DataError: a file cannot be read.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not given:
        raise UserError(f"no input files were named. {_EXPECTED}: name files, folders or patterns.")
    paths = [path for item in given for path in _paths_of(os.fspath(item))]
    _check_twice(paths)
    return [_source(path) for path in paths]


def check_unchanged(sources: Sequence[Source]) -> None:
    """Refuses to call a corpus finished whose files changed while they were read.

    Raises:
        DataError: names the first such file.
    """
    for source in sources:
        try:
            now = os.stat(source.path)
        except OSError as error:
            raise _unreadable(source.path, error) from error
        if (now.st_size, now.st_mtime_ns) != (source.size, source.time_ns):
            raise DataError(
                f"{source.path} changed while the corpus was built: it had {source.size} bytes "
                f"and has {now.st_size}, or another time of change. A file that nobody writes was "
                "expected, because else nobody could say what is in the corpus: wait until it is "
                "complete and build anew (--overwrite)."
            )


def _paths_of(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        return _inside(path)
    if path.is_file():
        _kind_of(path)
        return [path]
    found = sorted(Path(match) for match in glob.glob(name, recursive=True))
    files = [match for match in found if match.is_file() and not match.name.endswith(_OUR_LIST)]
    if not files:
        raise UserError(f"there is no file {name}. {_EXPECTED}: check the path or the pattern.")
    for file in files:
        _kind_of(file)
    return files


def _inside(folder: Path) -> list[Path]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and _suffixes(path)[0] in KINDS
        and not path.name.endswith(_OUR_LIST)
        and path.is_file()
    )
    if not files:
        raise UserError(f"the folder {folder} holds no file to build from. {_EXPECTED}.")
    return files


def _suffixes(path: Path) -> tuple[str, str]:
    """(suffix of the kind, that of the compression) of a name."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        return Path(path.stem).suffix.lower(), suffix
    return suffix, ""


def _kind_of(path: Path) -> tuple[str, str]:
    suffix, compression = _suffixes(path)
    kind = KINDS.get(suffix)
    if kind is None or (kind == PARQUET and compression):
        raise UserError(
            f"{path} ends in {''.join(path.suffixes[-2:]) or 'nothing'!r}. {_EXPECTED}, because "
            "the suffix says how a file is read: rename it, or convert it."
        )
    return kind, compression


def _check_twice(paths: Sequence[Path]) -> None:
    seen: dict[str, Path] = {}
    for path in paths:
        first = seen.setdefault(os.path.realpath(path), path)
        if first is not path:
            raise UserError(
                f"{path} and {first} are the same file. Each file was expected once, because its "
                "documents would be in the corpus twice: name it once."
            )


def _source(path: Path) -> Source:
    kind, compression = _kind_of(path)
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            edges = hashlib.sha256(file.read(_EDGE_BYTES))
            file.seek(max(0, stat.st_size - _EDGE_BYTES))
            edges.update(file.read(_EDGE_BYTES))
    except OSError as error:
        raise _unreadable(str(path), error) from error
    return Source(str(path), kind, compression, stat.st_size, stat.st_mtime_ns, edges.hexdigest())


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be read ({error.strerror or error}). The corpus is built from it: check "
        "its rights and its disk."
    )
