"""Plain text for pre-training: rows of a corpus, and the bodies of the `pt` collate part.

All of a row is in the loss: the tokenizer's first tokens, the text, EOS. Padding is known by its
place, so it may be EOS too. A sample of a corpus has `segments`, arrays of token ids, in place of a
text; all but the first token of each is in the loss. Samples with `is_packed` hold several segments
a row, none of which sees another.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy
from torch.utils.data import Dataset

from stageline.data.batches.batch import Images, MicroBatch, Sample, pad_rows, sample_name
from stageline.data.batches.collate import (
    Item,
    collate_encoded,
    encode_sft,
    pack_encoded,
    row_options,
)
from stageline.data.batches.collate_part import EncodedSample, all_encoded
from stageline.data.text.encode import Encoded
from stageline.data.text.limit import TextOverlong, limit_length
from stageline.data.text.processor import get_tokenizer
from stageline.data.text.template import IMAGE, parse_template
from stageline.errors import DataError, UserError

BEGINS = 1  # the flag of a segment that is the first one of its document
_LOOK_BACK = 1 << 20  # most segments of a document
Range = tuple[int, int]


class CorpusRows(Dataset):
    """The rows of a corpus, type behind type: a segment a row, or rows that were packed before.

    Args:
        corpus: `header`, `corpus[i]` -> token ids of a segment, `type_starts`.
        ranges: of each type, the first of its rows and the one behind its last.
        source: what errors call the corpus.
        packed: `packed[row]` -> its segments, `row_length`, `digest`; None: a segment a row.
        make_sampler: (sizes, *, names, **options) -> what draws the rows of training; see
            `has_sampler` of sampler.py for its options.
        fingerprint_of: tokenizer -> its fingerprint, as the corpus has it; None: not compared.
    """

    is_fixed = True  # reading a row draws nothing at random
    has_tokens = True  # samples are token ids, not text

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
        """Return the segment (or the packed row) of the corpus that a row of this dataset is."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        kind = bisect_right(self._ends, row)
        return self.ranges[kind][1] - (self._ends[kind] - row)

    def unpacked(self) -> "CorpusRows":
        """Return all segments of the corpus, a row each, drawn in the same proportions."""
        return CorpusRows(
            self.corpus,
            type_ranges(self.corpus.type_starts),
            source=self.source,
            make_sampler=self._draw,
            fingerprint_of=self._fingerprint_of,
        )

    @property
    def row_length(self) -> int:
        """Tokens of a row at most."""
        if self.packed is not None:
            return int(self.packed.row_length)
        return self.corpus.header.rules.seq_length

    def make_sampler(self, **options: Any) -> Any:
        """Return what draws the rows of training; see `has_sampler`."""
        assert self._draw is not None, "rows that are held out are not drawn"
        names = [kind.name for kind in self.corpus.header.types]
        return self._draw(self.sizes, names=names, **options)

    def describe(self, row: int) -> str:
        """Return where a row is from."""
        kind = "segment" if self.packed is None else "packed row"
        return f"{self.source}: {kind} {self.place_of(row)}"

    def fingerprint(self) -> str:
        """Return what tells whether another dataset has the same rows; reads the header only."""
        packed = None if self.packed is None else self.packed.digest
        words = [self.corpus.header.digest, self.ranges, packed]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()

    def check(
        self, *, processor: Any, max_token_num: int, vocab_size: int | None, overlong: TextOverlong
    ) -> str:
        """Refuse a corpus that does not go with the run, and describe it."""
        header, known = self.corpus.header, self.corpus.header.tokenizer
        problem = ""
        if known is not None and known.fingerprint and self._fingerprint_of is not None:
            tokenizer = get_tokenizer(processor)
            if self._fingerprint_of(tokenizer) != known.fingerprint:
                name = Path(str(getattr(tokenizer, "name_or_path", "") or "?")).name
                problem = (
                    f"was made with the tokenizer {known.name}, and the one of the run is another "
                    f"({name}). Use the corpus's (`processor_path`), or give "
                    "`dataset.any_tokenizer` true if both give the same ids."
                )
        if vocab_size is not None and known is not None and known.vocab_size > vocab_size:
            problem = problem or (
                f"has ids up to {known.vocab_size - 1} (tokenizer {known.name}), the model's "
                f"embedding has {vocab_size} rows. Build it with the tokenizer of the model."
            )
        is_packed = self.packed is not None
        if self.row_length > max_token_num and (overlong == "error" or is_packed):
            cure = "build the corpus with a smaller `seq_length`, or use `collate_fn.overlong` cut"
            if is_packed:
                cure = "pack the corpus into shorter rows (`dataset.row_length`)"
            problem = problem or (
                f"has rows of up to {self.row_length} tokens, `max_token_num` is {max_token_num}. "
                f"Raise `max_token_num` to {self.row_length}, or {cure}."
            )
        if problem:
            raise UserError(f"{self.source} {problem}")
        kind = "packed rows" if is_packed else "segments"
        types = ", ".join(
            f"{item.name}: {size}" for item, size in zip(header.types, self.sizes, strict=True)
        )
        return f"{len(self)} {kind} of {self.source} ({types}), at most {self.row_length} tokens"


def type_ranges(starts: Sequence[int]) -> list[Range]:
    """Return the range of each type, from where each starts and where the last one ends."""
    return list(pairwise(map(int, starts)))


def held_out_starts(corpus: Any, test_size: int | float) -> list[int]:
    """Return the first held-out segment of each type; it begins a document near the type's end.

    Args:
        test_size: least number of held-out segments of each type, or below 1 a share of them.
    """
    starts = []
    for (first, stop), kind in zip(
        type_ranges(corpus.type_starts), corpus.header.types, strict=True
    ):
        share = test_size if isinstance(test_size, int) else round(test_size * (stop - first))
        count = max(share, 1)
        start = max(stop - count, first)
        low = max(first, start + 1 - _LOOK_BACK)  # back to the last place where a document begins
        begins = numpy.flatnonzero(numpy.asarray(corpus.flags(low, start + 1)) & BEGINS)
        start = low + int(begins[-1]) if len(begins) else first
        if start <= first < stop:
            raise UserError(
                f"`dataset.test_size` {test_size} holds out all {stop - first} segments of type "
                f"{kind.name}. Lower it, or give another corpus as `dataset.test_path`."
            )
        starts.append(start)
    return starts


def encode_text(images: Images, sample: Sample, **common: Any) -> EncodedSample:
    """Encode one text, all of it in the loss; or the segments of a sample of a corpus."""
    if "segments" in sample:
        segments = _encode_ready(sample, **common)
        return EncodedSample(images, sample, segments, sum(map(len, segments)), segments)
    if images:
        raise DataError(
            f"{sample_name(sample)} has {len(images)} images, and `collate_fn` pt takes only text. "
            "Use `collate_fn` sft."
        )
    if isinstance(sample.get("text"), str) and "messages" not in sample:
        slots = {part.slot for part in parse_template(common["prompt"])} - {"", IMAGE}
        if "TEXT" not in slots and not all(slot.lower() in sample for slot in slots):
            common["prompt"] = "[TEXT]"  # the template is of other rows
    encoded = encode_sft(images, sample, **common)
    (row,) = encoded.rows
    if not any(row.is_target):
        return encoded  # dropped
    return replace(encoded, rows=[replace(row, is_target=[True] * len(row))])


def _encode_ready(
    sample: Sample,
    *,
    max_token_num: int,
    pad_token_id: int = 0,
    overlong: TextOverlong = "error",
    stage: int = 0,
    **common: Any,
) -> list[Encoded]:
    """Return the segments of one sample, each in the loss as a whole."""
    segments = sample["segments"]
    total = sum(map(len, segments))
    if total <= max_token_num:
        # arrays, not lists: a corpus is read as fast as its tokens can be copied
        return [
            Encoded(ids, numpy.ones(len(ids), bool), numpy.zeros(len(ids), bool))  # type: ignore
            for ids in segments
        ]
    assert len(segments) == 1, "`CorpusRows.check` refuses packed rows that are too long"
    limited = limit_length(
        Encoded(segments[0].tolist(), [True] * total, [False] * total),
        max_token_num=max_token_num,
        overlong=overlong,
        name=sample_name(sample),
        pad_token_id=pad_token_id,
        warn=stage == 0,
    )
    return [limited]


def collate_text(samples: Sequence[Item], **common: Any) -> MicroBatch:
    """Make one micro-batch, a text or a sample of a corpus a row: ids, mask and labels [B, T]."""
    encoded = all_encoded(samples, encode_text, **common)
    if "segments" not in encoded[0].sample:
        return collate_encoded(encoded, **common)
    if any(one.sample.get("is_packed") for one in encoded):
        return pack_encoded([[one] for one in encoded], **common)
    return pad_rows([row for one in encoded for row in one.rows], **row_options(**common))


def collate_packed_text(rows: Sequence[Sequence[Item]], **common: Any) -> MicroBatch:
    """Make one micro-batch of rows of several texts or segments, none of which sees another."""
    return pack_encoded([all_encoded(row, encode_text, **common) for row in rows], **common)
