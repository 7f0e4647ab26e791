"""Texts to segments: each document is encoded once as a whole, and cut only if it does not fit.

The hot loop of a build. Documents that fit become one segment each, all of a batch by a few array
operations; only the others are looked at one by one.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy

from stageline.corpus.cut import DocumentCut, cut_documents
from stageline.corpus.encoder import Encoder, why_bad
from stageline.corpus.header import BEGINS, ENDS, HAS_BOS, HAS_EOS, CutRules, Segments
from stageline.errors import DataError, UserError


@dataclass(frozen=True)
class CutCounts:
    """What became of some documents; counts of several batches can be added.

    Attributes:
        num_documents: documents that gave segments; with the empty and the bad ones all that came.
        num_segments, num_tokens: of these documents; tokens with BOS and EOS.
        num_cut_documents: that gave more than one segment.
        num_sentences_cut: sentences longer than a segment, which had to be cut inside.
        num_empty: without any token; they give no segment.
        num_bad: that cannot be encoded (`why_bad`); they give no segment.
        num_changed: whose text does not come back from its ids, for the tokenizer drops or
            normalises some of it.
    """

    num_documents: int = 0
    num_segments: int = 0
    num_tokens: int = 0
    num_cut_documents: int = 0
    num_sentences_cut: int = 0
    num_empty: int = 0
    num_bad: int = 0
    num_changed: int = 0

    def __add__(self, other: "CutCounts") -> "CutCounts":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return CutCounts(*(mine + its for mine, its in pairs))


class DocumentCutter:
    """Encodes documents and cuts them into segments. Can be pickled if the splitter can."""

    def __init__(self, encoder: Encoder, splitter: Any | None, rules: CutRules) -> None:
        """Takes the parts.

        Args:
            splitter: text -> character offsets where sentences end (`stageline.corpus.sentences`);
                not needed where `rules.splits_sentences` is off.

        Raises:
            UserError: the rules ask for what the tokenizer or the splitter does not have.
        """
        _check_rules(encoder, splitter, rules)
        self.encoder = encoder
        self.splitter = splitter if rules.splits_sentences else None
        self.rules = rules
        self._num_first = int(rules.adds_bos)
        self._num_last = int(rules.adds_eos)

    def __call__(self, texts: Sequence[str]) -> tuple[Segments, CutCounts]:
        """The segments of a batch of documents, in their order; some hundred documents are best."""
        num_texts = len(texts)
        if not self.rules.keeps_newlines:
            texts = [join_lines(text) for text in texts]
        try:
            documents, doubtful = self.encoder.encode_and_doubt(texts)
        except DataError:
            texts = [text for text in texts if why_bad(text) is None]
            documents, doubtful = self.encoder.encode_and_doubt(texts)
        num_bad = num_texts - len(texts)
        num_changed = sum(self.encoder.decode(documents[i]) != texts[i] for i in doubtful)
        sizes = numpy.array([len(ids) for ids in documents], dtype=numpy.int64)
        num_empty = int((sizes == 0).sum())
        if num_empty:
            texts = [text for text, ids in zip(texts, documents, strict=True) if len(ids)]
            documents = [ids for ids in documents if len(ids)]
            sizes = sizes[sizes > 0]
        segments, num_sentences_cut, num_cut = self._segments(texts, documents, sizes)
        counts = CutCounts(
            num_documents=len(documents),
            num_segments=len(segments),
            num_tokens=len(segments.tokens),
            num_cut_documents=num_cut,
            num_sentences_cut=num_sentences_cut,
            num_empty=num_empty,
            num_bad=num_bad,
            num_changed=num_changed,
        )
        return segments, counts

    def _segments(
        self, texts: Sequence[str], documents: list[numpy.ndarray], sizes: numpy.ndarray
    ) -> tuple[Segments, int, int]:
        """Segments of documents that all have tokens; sentences and documents that were cut."""
        limit = self.rules.seq_length - self._num_first - self._num_last
        too_long = numpy.flatnonzero(sizes > limit)
        cuts = self._cut([(texts[place], documents[place]) for place in too_long.tolist()])
        num_pieces = numpy.ones(len(sizes), dtype=numpy.int64)
        num_pieces[too_long] = [len(cut.lengths) for cut in cuts]
        lasts = numpy.cumsum(num_pieces) - 1
        firsts = lasts - num_pieces + 1
        lengths = numpy.empty(int(num_pieces.sum()), dtype=numpy.int64)
        lengths[firsts] = sizes
        for place, cut in zip(too_long.tolist(), cuts, strict=True):
            lengths[firsts[place] : lasts[place] + 1] = cut.lengths
        lengths[firsts] += self._num_first
        lengths[lasts] += self._num_last
        segments = Segments(self._tokens(documents, sizes), lengths, self._flags(firsts, lasts))
        return segments, sum(cut.num_cut_sentences for cut in cuts), len(too_long)

    def _flags(self, firsts: numpy.ndarray, lasts: numpy.ndarray) -> numpy.ndarray:
        num_segments = int(lasts[-1]) + 1 if len(lasts) else 0
        flags = numpy.zeros(num_segments, dtype=numpy.uint8)
        flags[firsts] += BEGINS + HAS_BOS * self._num_first
        flags[lasts] += ENDS + HAS_EOS * self._num_last
        return flags

    def _tokens(self, documents: list[numpy.ndarray], sizes: numpy.ndarray) -> numpy.ndarray:
        """All tokens in order, with BOS and EOS around each document."""
        bos = self.encoder.info.bos_id if self._num_first else None
        eos = self.encoder.info.eos_id if self._num_last else None
        before = [numpy.array([bos], dtype=numpy.uint32)] if bos is not None else []
        after = [numpy.array([eos], dtype=numpy.uint32)] if eos is not None else []
        parts = [part for ids in documents for part in (*before, ids, *after)]
        return numpy.concatenate(parts) if parts else numpy.zeros(0, dtype=numpy.uint32)

    def _cut(self, documents: list[tuple[str, numpy.ndarray]]) -> list[DocumentCut]:
        """The pieces of documents that do not fit: texts and their ids."""
        return cut_documents(
            [text for text, _ in documents],
            [self.encoder.byte_ends(text, ids) for text, ids in documents],
            splitter=self.splitter,
            rules=self.rules,
            num_first=self._num_first,
            num_last=self._num_last,
        )


def join_lines(text: str) -> str:
    """The text with each run of white space that has a newline (LF or CR) as one space."""
    if "\r" in text:
        text = text.replace("\r", "\n")
    if "\n" not in text:
        return text
    first, *middle, last = text.split("\n")
    kept = [line for line in map(str.strip, middle) if line]
    return " ".join([first.rstrip(), *kept, last.lstrip()])


def _check_rules(encoder: Encoder, splitter: Any | None, rules: CutRules) -> None:
    info = encoder.info
    for wanted, found, name in (
        (rules.adds_bos, info.bos_id, "BOS"),
        (rules.adds_eos, info.eos_id, "EOS"),
    ):
        if wanted and found is None:
            raise UserError(
                f"The tokenizer {info.name} has no {name} token, but documents are to get one: "
                f"switch {name} off for this corpus, or give the tokenizer one."
            )
    room = rules.seq_length - int(rules.adds_bos) - int(rules.adds_eos)
    if room < 1:
        raise UserError(
            f"Segments of {rules.seq_length} tokens have no room for text beside BOS and EOS: "
            "raise `seq_length`."
        )
    if rules.splits_sentences and splitter is None:
        raise UserError(
            "Documents are to be cut between sentences, but there is no splitter: choose a "
            "language, or switch the splitting into sentences off."
        )
