"""Keeps the token ids of rows, so that they are rendered and tokenized once and not each epoch.

Before training one process fills the cache, and the others of its machine wait for it. A row is
found by what it says (and by the sizes of its pictures), in a folder that is named by all else that
decides its tokens (`token_key`). So nothing that is found can be old; what is not found is encoded
as without a cache.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import inspect
import json
import multiprocessing
import os
import shutil
import sys
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from filelock import FileLock

from stageline.contracts import unwrapped
from stageline.data.batches.sampler import is_stream
from stageline.data.batches.step_maker import end_with_rank, read_row
from stageline.data.images.image_cache import processor_settings
from stageline.data.images.images import ImageExpander, image_size
from stageline.data.text.encode import Encoded, TextEncoder
from stageline.errors import DataError, MemoryFull, StorageError, UserError
from stageline.seeds import host_state_kept, seed_host

# a bit each in a token's marks, and eight bits further whether the row has such marks at all
_MARKS = ("is_target", "is_cuttable", "is_marked", "is_text", "is_answer", "is_image")
_NAME_BYTES = 16
_COPY_CHUNK = 1 << 24
_CHUNK = 256  # rows that a process encodes at a time
# of what this package makes of a row: raise it with a change that gives some row other ids or marks
# (tests/unit/test_token_cache.py holds the digest of a few)
FORMAT = 1
_PACKAGES = ("transformers", "tokenizers", "jinja2")
_CLOCK = "strftime_now"  # a chat template with it writes the date
_FILES = ("tokens.bin", "names.npy", "places.npy")
_TOKEN = numpy.dtype([("id", "<i4"), ("marks", "<u2")])

Entry = tuple[bytes, numpy.ndarray]  # name of a row, its tokens


class DamagedTokens(Exception):
    """A folder that is not what was written."""


def to_array(encoded: Encoded) -> numpy.ndarray:
    """A row as it is kept: 6 bytes a token."""
    tokens = numpy.zeros(len(encoded), _TOKEN)
    tokens["id"] = encoded.input_ids
    for bit, kind in enumerate(_MARKS):
        if own := getattr(encoded, kind):
            tokens["marks"] |= numpy.array(own, "<u2") << bit | 1 << bit + 8
    return tokens


def from_array(tokens: numpy.ndarray) -> Encoded:
    """The row as it was."""
    marks = tokens["marks"]
    there = int(marks[0]) if len(marks) else 0
    kinds = {
        kind: ((marks & 1 << bit) != 0).tolist() if there & 1 << bit + 8 else []
        for bit, kind in enumerate(_MARKS)
    }
    return Encoded(tokens["id"].tolist(), **kinds)


class TokenFile:
    """The rows of one folder, which is written once as a whole and then mapped into memory.

    `tokens.bin` holds the tokens of one row after the other; `names.npy` the rows' names in order,
    with their places in `places.npy`. Nothing is pickled. What does not have the sums that
    `facts.json` says is not believed.

    Raises:
        DamagedTokens: a file is missing, cut or changed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            for name in _FILES:
                if _sum(folder / name) != facts["sums"][name]:
                    raise DamagedTokens(f"{folder / name} is not what was written")
            self._names = numpy.load(folder / "names.npy", mmap_mode="r", allow_pickle=False)
            self._places = numpy.load(folder / "places.npy", mmap_mode="r", allow_pickle=False)
            self._tokens = numpy.empty(0, _TOKEN)
            if (folder / "tokens.bin").stat().st_size:  # an empty file cannot be mapped
                self._tokens = numpy.memmap(folder / "tokens.bin", _TOKEN, mode="r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedTokens(f"{folder}: {error}") from error

    def __len__(self) -> int:
        return len(self._names)

    def get(self, name: bytes) -> numpy.ndarray | None:
        """A row by its name; None where there is none."""
        first = int(self._names.searchsorted(numpy.array(name, f"S{_NAME_BYTES}")))
        if self._names[first : first + 1].tobytes() != name:
            return None
        start, length = map(int, self._places[first])
        return self._tokens[start : start + length]


def write_tokens(folder: Path, entries: Iterable[Entry], *, key: dict[str, Any]) -> None:
    """Writes a folder that appears whole; replaces one of that name.

    Args:
        key: what the rows depend on, for people.
    """
    unfinished = folder.with_name(f"unfinished-{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        names, places, start = bytearray(), [], 0
        with (unfinished / "tokens.bin").open("wb") as file:
            for name, tokens in entries:
                names += name
                places.append((start, len(tokens)))
                start += len(tokens)
                file.write(tokens.tobytes())
        array = numpy.frombuffer(bytes(names), f"S{_NAME_BYTES}")
        # of a row that came twice the first stays
        _, first = numpy.unique(array, return_index=True)
        numpy.save(unfinished / "names.npy", array[first], allow_pickle=False)
        table = numpy.array(places, numpy.int64).reshape(-1, 2)
        numpy.save(unfinished / "places.npy", table[first], allow_pickle=False)
        facts = {"sums": {name: _sum(unfinished / name) for name in _FILES}, "key": key}
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        (unfinished / "facts.json").write_text(text, encoding="utf-8")
        if folder.exists():
            os.rename(folder, unfinished / "damaged")
        os.rename(unfinished, folder)
        shutil.rmtree(folder / "damaged", ignore_errors=True)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _sum(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    size, value = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_COPY_CHUNK):
            size += len(chunk)
            value = zlib.crc32(chunk, value)
    return [size, value]


@dataclass(eq=False)
class TokenCache:
    """Encoded rows of one way to write them.

    Args:
        prompt, prompt_fn, image_token: of rows that are kept; others are not looked up.

    Attributes:
        files: of the datasets of a run.
        rows: kept in memory.
        num_hits, num_misses: of this process.
    """

    prompt: str
    prompt_fn: Callable[..., Any]
    image_token: Callable[..., Any]
    files: list[TokenFile] = field(default_factory=list)
    rows: dict[bytes, numpy.ndarray] = field(default_factory=dict)
    num_hits: int = 0
    num_misses: int = 0
    _room: int = 0

    @property
    def is_used(self) -> bool:
        """Whether a row may be found, or is to be kept."""
        return bool(self.files or self.rows or self._room)

    @property
    def texts(self) -> dict[str, Any]:
        """What rows that are kept are rendered with."""
        return {
            "prompt": self.prompt,
            "prompt_fn": self.prompt_fn,
            "image_token": self.image_token,
        }

    def name_of(
        self,
        images: Sequence[Any] | None,
        sample: dict[str, Any],
        *,
        words: Any = None,
        is_prompt: bool = False,
        **texts: Any,
    ) -> bytes | None:
        """What a row is called; None where it is not kept.

        Args:
            words: that are marked in it.
            is_prompt: it ends where the answer begins.
            texts: what it is rendered with, as `texts`.
        """
        if texts != self.texts:
            return None
        facts: list[Any] = [{name: sample[name] for name in sample if name != "source"}]
        facts.append([image_size(image) for image in images or ()])
        if words is not None:
            facts.append(words.words)
        if is_prompt:
            facts.append("prompt")
        try:
            text = json.dumps(facts)  # in the given order: a tool's arguments are written in it
        except (TypeError, ValueError):  # holds what is no text, and may be anything
            return None
        return hashlib.blake2b(text.encode(), digest_size=_NAME_BYTES).digest()

    def get(self, name: bytes) -> Encoded | None:
        """A row, if it is kept."""
        found = self.rows.get(name)
        for file in self.files if found is None else ():
            found = file.get(name)
            if found is not None:
                break
        self.num_hits += found is not None
        self.num_misses += found is None
        return None if found is None else from_array(found)

    def note(self, name: bytes, encoded: Encoded) -> None:
        """Tells of a row that was encoded."""
        if len(self.rows) < self._room:
            self.rows[name] = to_array(encoded)

    @contextlib.contextmanager
    def keeping(self, most: int) -> Iterator[None]:
        """Rows that are encoded meanwhile stay in memory, so many of them at most."""
        self._room = min(len(self.rows) + most, sys.maxsize)
        try:
            yield
        finally:
            self._room = 0

    def encoded_now(self, dataset: Any, encode: Callable[..., Any], rows: range) -> list[Entry]:
        """All that is encoded for some rows; bad rows are left for training to tell."""
        with self.keeping(sys.maxsize):
            for row in rows:
                with contextlib.suppress(DataError):
                    encode(*read_row(dataset, row))
        made = list(self.rows.items())
        self.rows.clear()
        return made


_of_processor: "weakref.WeakKeyDictionary[Any, TokenCache]" = weakref.WeakKeyDictionary()


def token_cache_of(processor: Any) -> TokenCache | None:
    """The cache of rows that this processor tokenizes, if there is one."""
    return _of_processor.get(processor)


def encoded_once(
    make: Callable[[], Encoded],
    images: Sequence[Any] | None,
    sample: dict[str, Any],
    *,
    processor: Any,
    **way: Any,
) -> Encoded:
    """The row as it is kept, or made and, where rows are to be kept, told of.

    Args:
        way: what else `TokenCache.name_of` asks.
    """
    cache = token_cache_of(processor)
    if cache is None or not cache.is_used:
        return make()
    kept_as = cache.name_of(images, sample, **way)
    if kept_as is not None and (kept := cache.get(kept_as)) is not None:
        return kept
    encoded = make()
    if kept_as is not None:
        cache.note(kept_as, encoded)
    return encoded


def use_token_cache(processor: Any, cache: TokenCache | None) -> None:
    """From now on rows are looked up in `cache`; None: in none."""
    if cache is None:
        _of_processor.pop(processor, None)
    else:
        _of_processor[processor] = cache


def fill_token_cache(
    folder: str | Path,
    cache: TokenCache,
    dataset: Any,
    *,
    encode: Callable[..., Any],
    key: dict[str, Any],
    num_workers: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Adds the rows of a dataset to a cache that is in use: those of the folder, or made now.

    Any number of processes may do this at once: one encodes, the others wait and read.

    Args:
        folder: of all datasets and ways to write them.
        encode: (images, sample) -> anything; encodes what training will.
        key: of `token_key`.
        num_workers: processes that encode; 0: this one.

    Raises:
        UserError: the dataset is a stream.
        StorageError: the folder cannot be written to.
    """
    if is_stream(dataset):
        raise UserError(
            "`token_cache` came with a dataset that is streamed. One with a fixed number of rows "
            "was expected, because all rows are encoded before training begins: leave one out."
        )
    key = {**key, "first row": _first_name(cache, dataset)}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    place = Path(folder).absolute() / name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            file = _whole(place, say)
            if file is None:
                with host_state_kept():
                    entries = _encoded(cache, dataset, encode, num_workers)
                    write_tokens(place, entries, key=key)
                file = TokenFile(place)
                say(f"token cache {place}: {len(file)} rows encoded")
    except OSError as error:
        raise StorageError(
            f"the token cache {place.parent} cannot be written to ({error}). A folder with room "
            "was expected, because the tokens of all rows are kept there: name another one with "
            "`token_cache`, or leave it out."
        ) from error
    cache.files.append(file)


def _first_name(cache: TokenCache, dataset: Any) -> str | None:
    """Rows of files of another name may have other ids, and then other names."""
    with host_state_kept():  # a dataset may draw
        seed_host(0)
        try:
            images, sample = read_row(dataset, 0)
        except DataError:
            return None
        name = cache.name_of(images, sample, **cache.texts)
    return None if name is None else name.hex()


def _whole(place: Path, say: Callable[[str], None]) -> TokenFile | None:
    if not place.exists():
        return None
    try:
        file = TokenFile(place)
    except DamagedTokens as error:
        say(f"token cache: {error}; it is made anew")
        return None
    say(f"token cache {place}: {len(file)} rows found")
    return file


def _encoded(
    cache: TokenCache, dataset: Any, encode: Callable[..., Any], num_workers: int
) -> Iterator[Entry]:
    rows = range(len(dataset))
    chunks = [rows[start : start + _CHUNK] for start in rows[::_CHUNK]]
    make = functools.partial(cache.encoded_now, dataset, encode)
    if num_workers == 0 or sys.platform != "linux":
        for chunk in chunks:
            yield from make(chunk)
        return
    context = multiprocessing.get_context("fork")  # some processors cannot be pickled
    try:
        with ProcessPoolExecutor(num_workers, context, _begin, (make,)) as pool:
            for made in pool.map(_run, chunks):
                yield from made
    except BrokenProcessPool as error:
        raise MemoryFull(
            f"a process that fills `token_cache` was killed, one of {num_workers}. Memory for all "
            "of them was expected: set a smaller `token_cache_workers`."
        ) from error


_make: Callable[[range], list[Entry]] | None = None  # of a forked process


def _begin(make: Callable[[range], list[Entry]]) -> None:
    global _make
    _make = make
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
    end_with_rank(0)


def _run(rows: range) -> list[Entry]:
    assert _make is not None
    return _make(rows)


def token_key(
    *,
    prompt: str,
    prompt_fn: Callable[..., Any],
    image_token: Callable[..., Any],
    processor: Any,
    collate: Callable[..., Any],
    fingerprint: str | None,
) -> dict[str, Any]:
    """All that decides the token ids of rows, by name; of long texts the digest.

    It names a cache, so that none is ever old.

    Args:
        collate: the part that encodes rows, with its options.
        fingerprint: of the dataset, where it has one.
    """
    tokenizer = TextEncoder.of(processor).tokenizer  # refuses those without a backend
    templates = [getattr(each, "chat_template", None) for each in (processor, tokenizer)]
    key: dict[str, Any] = {
        "rows": fingerprint,
        "tokenizer": _digest(tokenizer.backend_tokenizer.to_str()),
        "special tokens": {
            name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())
        },
        "tokenizer class": f"{type(processor).__name__} {type(tokenizer).__name__}",
        "chat template": _digest(repr(templates)),
        "prompt": prompt,
        "prompt_fn": _identity(prompt_fn),
        "image_token": _identity(image_token),
        "collate_fn": _identity(collate),
        "images": None,
        "format": FORMAT,
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }
    if ImageExpander.of(processor) is not None:
        key["images"] = json.loads(json.dumps(processor_settings(processor), default=str))
    if _CLOCK in repr(templates):
        key["date"] = datetime.date.today().isoformat()
    return key


def _identity(part: Callable[..., Any]) -> dict[str, Any]:
    """A part by its name, the file it is in, and its options."""
    options: dict[str, Any] = {}
    while isinstance(part, functools.partial):
        given = {str(place): _plain(value) for place, value in enumerate(part.args)}
        options = {**given, **part.keywords, **options}
        part = part.func
    part = unwrapped(part)
    owner = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    try:
        source = Path(inspect.getfile(owner)).read_bytes()
    except (TypeError, OSError):  # made without a file
        source = b""
    return {
        "name": f"{owner.__module__}.{owner.__qualname__}",
        "file": hashlib.sha256(source).hexdigest(),
        "state": {} if owner is part else _plain(getattr(part, "__dict__", {})),
        "options": {str(name): _plain(value) for name, value in options.items()},
    }


def _plain(value: Any) -> Any:
    """A value as JSON has it; functions by what they are."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _identity(value) if callable(value) else f"{type(value).__name__} {value}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
