"""What all of this room hands around: segments of documents, and where their tokens are from.

A document is one text of the input. A segment is a stretch of its tokens, at most `seq_length`
long with BOS and EOS counted; the segments of a document follow each other and share no token.
"""

from dataclasses import dataclass

import numpy

# flags of a segment
BEGINS = 1  # the first one of its document
ENDS = 2  # the last one of its document
HAS_BOS = 4  # its first token is BOS, put there by us
HAS_EOS = 8  # its last token is EOS, put there by us


@dataclass(frozen=True)
class Segments:
    """Some segments, in order.

    Attributes:
        tokens: uint32 [sum of lengths], one segment behind the other.
        lengths: int64 [number of segments], all positive.
        flags: uint8 [number of segments], sums of BEGINS, ENDS, HAS_BOS and HAS_EOS.
    """

    tokens: numpy.ndarray
    lengths: numpy.ndarray
    flags: numpy.ndarray

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class TokenizerInfo:
    """What a corpus remembers of its tokenizer.

    Attributes:
        name: the folder's name, for people.
        fingerprint: sha256 of all that decides which ids a text gets.
        vocab_size: ids are below it.
        bos_id, eos_id: None where the tokenizer has none.
    """

    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None


@dataclass(frozen=True)
class CutRules:
    """How documents become segments.

    Attributes:
        seq_length: tokens of a segment at most, with BOS and EOS.
        pieces: `even`: of all cuttings into the fewest segments the one with the least sum of
            squared lengths; `greedy`: each segment takes as many sentences as fit, which leaves
            less padding when segments are packed into rows.
        splits_sentences: cut between sentences; else between any two tokens.
        keeps_newlines: else each run of white space that has a newline becomes one space.
        adds_bos, adds_eos: at the first and at the last segment of a document.
    """

    seq_length: int
    pieces: str = "even"
    splits_sentences: bool = True
    keeps_newlines: bool = True
    adds_bos: bool = True
    adds_eos: bool = True
