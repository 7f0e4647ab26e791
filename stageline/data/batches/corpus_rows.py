"""The rows of a pre-training corpus: a segment a row, or rows that were packed before.

Gets the opened corpus and whatever else it works with as objects; reads a row when it is asked for,
and keeps nothing of any.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
from torch.utils.data import Dataset

from stageline.data.batches.batch import Sample
from stageline.data.text.limit import TextOverlong
from stageline.data.text.processor import get_tokenizer
from stageline.errors import UserError

BEGINS = 1  # the flag of a segment that is the first one of its document
_LOOK_BACK = 4096  # flags that are read at a time
Range = tuple[int, int]


class CorpusRows(Dataset):
    """Segments, or packed rows of segments, type behind type.

    Args:
        corpus: `header`, `corpus[i]` -> token ids of a segment, `type_starts`.
        ranges: of each type, the first of its rows and the one behind its last.
        source: what errors call the corpus.
        packed: `packed[row]` -> its segments, `row_length`, `digest`; None: a segment a row.
        make_sampler: (sizes, **options) -> what draws the rows of training; see sampler.py. Of
            options it gets those of `has_sampler` and all of `mixing`.
        fingerprint_of: tokenizer -> its fingerprint, as the corpus has it; None: not compared.

    Attributes:
        is_fixed: reading a row draws nothing at random.
        has_tokens: samples are token ids, not text.
        mixing: how types are mixed: counts, weights, drop_mode; set before training.
    """

    is_fixed = True
    has_tokens = True

    def __init__(
        self,
        corpus: Any,
        ranges: Sequence[Range],
        *,
        source: str,
        packed: Any = None,
        make_sampler: Callable[..., Any] | None = None,
        fingerprint_of: Callable[[Any], str] | None = None,
    ) -> None:
        self.corpus = corpus
        self.ranges = [(int(first), int(stop)) for first, stop in ranges]
        self.sizes = [stop - first for first, stop in self.ranges]
        self.source = source
        self.packed = packed
        self.mixing: dict[str, Any] = {}
        self._ends = list(accumulate(self.sizes))
        self._draw = make_sampler
        self._fingerprint_of = fingerprint_of

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> tuple[None, Sample]:
        place = self.place_of(row)
        if self.packed is None:
            segments = [self.corpus[place]]
            return None, {"id": str(place), "source": self.source, "segments": segments}
        segments = [self.corpus[int(index)] for index in self.packed[place]]
        sample = {"id": f"packed row {place}", "source": self.source, "segments": segments}
        return None, {**sample, "is_packed": True}

    def place_of(self, row: int) -> int:
        """The segment (or the packed row) of the corpus that a row of this dataset is."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        kind = bisect_right(self._ends, row)
        return self.ranges[kind][1] - (self._ends[kind] - row)

    def unpacked(self) -> "CorpusRows":
        """All segments of the corpus, a row each, drawn in the same proportions."""
        rows = CorpusRows(
            self.corpus,
            type_ranges(self.corpus.type_starts),
            source=self.source,
            make_sampler=self._draw,
            fingerprint_of=self._fingerprint_of,
        )
        rows.mixing = self.mixing
        return rows

    @property
    def row_length(self) -> int:
        """Tokens of a row at most."""
        if self.packed is not None:
            return int(self.packed.row_length)
        return self.corpus.header.rules.seq_length

    def make_sampler(self, **options: Any) -> Any:
        """Draws the rows of training; see `has_sampler`."""
        assert self._draw is not None, "rows that are held out are not drawn"
        names = [kind.name for kind in self.corpus.header.types]
        return self._draw(self.sizes, names=names, **self.mixing, **options)

    def describe(self, row: int) -> str:
        """Where a row is from."""
        kind = "segment" if self.packed is None else "packed row"
        return f"{self.source}: {kind} {self.place_of(row)}"

    def fingerprint(self) -> str:
        """Tells whether another dataset has the same rows; reads the header alone."""
        packed = None if self.packed is None else self.packed.digest
        words = [self.corpus.header.digest, self.ranges, packed]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()

    def check(
        self,
        *,
        processor: Any,
        max_token_num: int,
        vocab_size: int | None,
        overlong: TextOverlong,
    ) -> str:
        """Refuses a corpus that does not go with the run; says what it is.

        Args:
            vocab_size: rows of the model's embedding; None: not known.

        Raises:
            UserError: it is of another tokenizer, has ids without a row, or rows that are too long.
        """
        self._check_tokenizer(processor)
        self._check_ids(vocab_size)
        self._check_lengths(max_token_num, overlong)
        header, kind = self.corpus.header, "segments" if self.packed is None else "packed rows"
        types = ", ".join(
            f"{item.name}: {size}" for item, size in zip(header.types, self.sizes, strict=True)
        )
        return f"{len(self)} {kind} of {self.source} ({types}), at most {self.row_length} tokens"

    def _check_tokenizer(self, processor: Any) -> None:
        known = self.corpus.header.tokenizer
        if known is None or not known.fingerprint or self._fingerprint_of is None:
            return
        tokenizer = get_tokenizer(processor)
        if self._fingerprint_of(tokenizer) == known.fingerprint:
            return
        name = Path(str(getattr(tokenizer, "name_or_path", "") or "?")).name
        raise UserError(
            f"{self.source} was made with the tokenizer {known.name}, and the one of the run "
            f"({name}) is another. The same one was expected, because its ids mean other words to "
            "this model: use the tokenizer of the corpus (`processor_path`), build the corpus "
            "anew, or, if you know that both give the same ids (new tokens were added since), "
            "give `dataset.any_tokenizer` true."
        )

    def _check_ids(self, vocab_size: int | None) -> None:
        known = self.corpus.header.tokenizer
        if vocab_size is None or known is None or known.vocab_size <= vocab_size:
            return
        raise UserError(
            f"{self.source} has ids up to {known.vocab_size - 1} (tokenizer {known.name}), the "
            f"model's embedding has {vocab_size} rows. Each id needs a row, because looking it up "
            "fails otherwise: use a config whose vocab_size is large enough, or build the corpus "
            "with the tokenizer of the model."
        )

    def _check_lengths(self, max_token_num: int, overlong: TextOverlong) -> None:
        if self.row_length <= max_token_num or (overlong != "error" and self.packed is None):
            return
        cure = (
            "pack the corpus into shorter rows (`dataset.row_length`)"
            if self.packed is not None
            else "build it with a smaller `seq_length`, or let `collate_fn.overlong` cut them"
        )
        raise UserError(
            f"{self.source} has rows of up to {self.row_length} tokens, `max_token_num` is "
            f"{max_token_num}. At least {self.row_length} was expected, because rows are trained "
            f"on whole: raise `max_token_num` to {self.row_length}, or {cure}."
        )


def type_ranges(starts: Sequence[int]) -> list[Range]:
    """The range of each type, from where each starts and where the last one ends."""
    starts = [int(start) for start in starts]
    return list(zip(starts, starts[1:], strict=False))


def held_out_starts(corpus: Any, test_size: int | float) -> list[int]:
    """Where the held-out segments of each type begin: at its end, and with a document.

    Args:
        test_size: at least so many segments of each type, or below 1 a share of them.

    Raises:
        UserError: none of a type would be left for training.
    """
    starts = []
    for (first, stop), kind in zip(
        type_ranges(corpus.type_starts), corpus.header.types, strict=True
    ):
        share = test_size if isinstance(test_size, int) else round(test_size * (stop - first))
        count = max(share, 1)
        start = _begin_of_document(corpus, first, stop - count) if count < stop - first else first
        if start <= first < stop:
            raise UserError(
                f"`dataset.test_size` {test_size} holds out all {stop - first} segments of type "
                f"{kind.name}. Some were expected to be left, because training draws from each "
                "type: lower it, or give a corpus of its own as `dataset.test_path`."
            )
        starts.append(start)
    return starts


def _begin_of_document(corpus: Any, first: int, at: int) -> int:
    """The last place up to `at` where a document begins."""
    while at > first:
        low = max(first, at + 1 - _LOOK_BACK)
        begins = numpy.flatnonzero(numpy.asarray(corpus.flags(low, at + 1)) & BEGINS)
        if len(begins):
            return low + int(begins[-1])
        at = low - 1
    return first
