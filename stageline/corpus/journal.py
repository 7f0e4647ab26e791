"""What a build that was killed needs to go on: PREFIX.journal, written whole every few seconds.

It holds the settings, what the inputs were, the first chunk that is not written yet, the counts
and the state of the writer. It is gone when the corpus is finished.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stageline.errors import DataError, StorageError, UserError

# -- finds the files that a corpus is built from, and remembers what they were --------------------
# Knows suffixes, sizes and times; what a line means is in `row_text`.

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
                "complete and build anew (`overwrite`)."
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


# -------------------------------------------------------------------------------------------------

VERSION = 1
SUFFIX = ".journal"


@dataclass
class Progress:
    """How far a build is. All of it is JSON.

    Attributes:
        file, part: the first chunk that is not written.
        num_lines: of the current file, before that chunk.
        num_bytes: of all files, as they lie on the disk.
        counts: of the cutter, by name.
        bad_kinds: bad lines of each kind.
        bad_bytes: of the list of bad lines; num_listed: lines of it.
        is_closing: all is added; only the names of the files are to change.
    """

    file: int = 0
    part: int = 0
    num_lines: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    bad_kinds: dict[str, int] = field(default_factory=dict)
    bad_bytes: int = 0
    num_listed: int = 0
    is_closing: bool = False

    @property
    def num_bad(self) -> int:
        return sum(self.bad_kinds.values())


class Journal:
    """The journal of a prefix.

    Args:
        settings: what decides over the bytes of the corpus, name -> what JSON holds.
    """

    def __init__(
        self, path_prefix: str, *, settings: dict[str, Any], sources: Sequence[Source]
    ) -> None:
        self.path = Path(f"{path_prefix}{SUFFIX}")
        self._settings = json.loads(json.dumps(settings))
        self._sources = [asdict(source) for source in sources]

    def write(self, progress: Progress, writer_state: dict[str, Any]) -> None:
        """Replaces the journal; a kill leaves the old one or the new one.

        Raises:
            StorageError: it cannot be written.
        """
        values = {
            "version": VERSION,
            "settings": self._settings,
            "sources": self._sources,
            "progress": asdict(progress),
            "writer": writer_state,
        }
        draft = self.path.with_name(f"{self.path.name}.part")
        try:
            with draft.open("w", encoding="utf-8") as file:
                json.dump(values, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.path)
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror or error}. What was written "
                "before is kept: make room and run the same command again."
            ) from error

    def read(self) -> tuple[Progress, dict[str, Any]] | None:
        """(progress, state of the writer) of the build that was left; None: there is none.

        Raises:
            UserError: it was another build; names all that changed.
            DataError: the journal is no journal.
        """
        if not self.path.exists():
            return None
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            version = values["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path} is not the journal of a build ({error}). It says where to go on: "
                "begin anew with `overwrite`."
            ) from error
        changes = [f"  journal version: was {version}, is {VERSION}"] if version != VERSION else []
        changes = changes or self._changes(values)
        if changes:
            listed = "\n".join(changes)
            raise UserError(
                f"{self.path} is of a build that was left, and this is another one:\n{listed}\n"
                "The same command was expected, because one corpus would else be built in two "
                "ways: set back what changed, give another `save_prefix`, or begin anew with "
                "`overwrite`."
            )
        return Progress(**values["progress"]), values["writer"]

    def remove(self) -> None:
        """The corpus is finished, or begun anew."""
        self.path.unlink(missing_ok=True)

    def _changes(self, values: dict[str, Any]) -> list[str]:
        before, now = _flat(values["settings"]), _flat(self._settings)
        changes = [
            f"  {name}: was {before.get(name)!r}, is {now.get(name)!r}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        return changes + _changed_sources(values["sources"], self._sources)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _changed_sources(before: Sequence[dict], now: Sequence[dict]) -> list[str]:
    old, new = ({source["path"]: source for source in sources} for sources in (before, now))
    changes = [f"  input {path}: is not named any more" for path in old if path not in new]
    changes += [f"  input {path}: was not named before" for path in new if path not in old]
    for path in old:
        if path in new and old[path] != new[path]:
            first, second = old[path], new[path]
            names = [name for name in first if first[name] != second.get(name)]
            what = ", ".join(f"{name} was {first[name]}, is {second.get(name)}" for name in names)
            changes.append(f"  input {path}: {what}")
    if not changes and list(old) != list(new):
        changes.append("  the inputs come in another order")
    return changes


@contextlib.contextmanager
def only_build(path_prefix: str) -> Iterator[None]:
    """Refuses a second build of the same prefix at the same time.

    Raises:
        UserError: one is at work.
        StorageError: the folder cannot be written.
    """
    path = Path(f"{path_prefix}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}. The corpus is to lie beside "
            "it: choose a folder that can be written."
        ) from error
    with file:
        _lock(file.fileno(), path, path_prefix)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock(handle: int, path: Path, path_prefix: str) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    try:
        # of this process, not of the open file: workers that outlive a killed build hold nothing
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # else it was the lock of a build that ended this moment
        is_ours = path.exists() and os.stat(path).st_ino == os.fstat(handle).st_ino
    except OSError as error:
        is_ours = error.errno not in (errno.EACCES, errno.EAGAIN)  # a file system without locks
    if not is_ours:
        raise UserError(
            f"another build writes {path_prefix} at this moment. One was expected, because both "
            "would write the same files: wait for it, or give another `save_prefix`."
        )
