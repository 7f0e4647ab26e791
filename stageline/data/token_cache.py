"""Keeps the token ids of rows, so that they are rendered and tokenized once and not each epoch.

Before training one process fills the cache, and the others of its machine wait for it. A row is
found by what it says (and by the sizes of its pictures), in a folder that is named by all else that
decides its tokens (token_key.py). So nothing that is found can be old; what is not found is encoded
as without a cache.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from stageline.data.encode import Encoded
from stageline.data.images import image_size
from stageline.data.rows import read_row
from stageline.data.sampler import is_stream
from stageline.data.token_file import DamagedTokens, Entry, TokenFile, to_entry, write_tokens
from stageline.data.workers import end_with_rank
from stageline.errors import DataError, MemoryFull, StorageError, UserError
from stageline.seeds import host_state_kept, seed_host

_CHUNK = 256  # rows that a process encodes at a time


@dataclass(eq=False)
class TokenCache:
    """Encoded rows of one way to write them.

    Args:
        prompt, prompt_fn, image_token: of rows that are kept; others are not looked up.

    Attributes:
        files: of the datasets of a run.
        num_hits, num_misses: of this process.
    """

    prompt: str
    prompt_fn: Callable[..., Any]
    image_token: Callable[..., Any]
    files: list[TokenFile] = field(default_factory=list)
    num_hits: int = 0
    num_misses: int = 0
    _notes: dict[bytes, Encoded] | None = None

    def name_of(
        self,
        images: Sequence[Any] | None,
        sample: dict[str, Any],
        *,
        prompt: str,
        prompt_fn: Callable[..., Any],
        image_token: Callable[..., Any],
    ) -> bytes | None:
        """What a row is called; None where it is not kept."""
        if (
            prompt != self.prompt
            or prompt_fn is not self.prompt_fn
            or image_token is not self.image_token
        ):
            return None
        facts = {name: value for name, value in sample.items() if name != "source"}
        try:
            # in the given order: a tool's arguments are written in it
            text = json.dumps([facts, [image_size(image) for image in images or ()]])
        except (TypeError, ValueError):  # holds what is no text, and may be anything
            return None
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def get(self, name: bytes) -> Encoded | None:
        """A row, if it is kept."""
        for file in self.files:
            found = file.get(name)
            if found is not None:
                self.num_hits += 1
                return found
        self.num_misses += 1
        return None

    def note(self, name: bytes, encoded: Encoded) -> None:
        """Tells of a row that was encoded."""
        if self._notes is not None:
            self._notes[name] = encoded

    def entries(self, dataset: Any, encode: Callable[..., Any], rows: range) -> list[Entry]:
        """All that is encoded for some rows; bad rows are left for training to tell."""
        made = []
        for row in rows:
            self._notes = {}
            try:
                encode(*read_row(dataset, row))
            except DataError:
                pass
            made += [to_entry(name, encoded) for name, encoded in self._notes.items()]
        self._notes = None
        return made


_of_processor: "weakref.WeakKeyDictionary[Any, TokenCache]" = weakref.WeakKeyDictionary()


def token_cache_of(processor: Any) -> TokenCache | None:
    """The cache of rows that this processor tokenizes, if there is one."""
    return _of_processor.get(processor)


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
            "--token-cache came with a dataset that is streamed. One with a fixed number of rows "
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
            "--token-cache, or leave it out."
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
        texts = {"prompt": cache.prompt, "prompt_fn": cache.prompt_fn}
        name = cache.name_of(images, sample, image_token=cache.image_token, **texts)
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
    make = functools.partial(cache.entries, dataset, encode)
    if num_workers == 0 or sys.platform != "linux":
        for chunk in chunks:
            yield from make(chunk)
        return
    context = multiprocessing.get_context("fork")  # some processors cannot be pickled
    _Job.make = make
    try:
        with ProcessPoolExecutor(num_workers, context, initializer=_begin) as pool:
            for made in pool.map(_Job.run, chunks):
                yield from made
    except BrokenProcessPool as error:
        raise MemoryFull(
            f"a process that fills --token-cache was killed, one of {num_workers}. Memory for all "
            "of them was expected: set a smaller --token-cache-workers."
        ) from error
    finally:
        _Job.make = None


class _Job:
    """What forked processes do; they find it here, and get only numbers of rows."""

    make: Callable[[range], list[Entry]] | None = None

    @staticmethod
    def run(rows: range) -> list[Entry]:
        assert _Job.make is not None
        return _Job.make(rows)


def _begin() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
    end_with_rank(0)
