"""A cutter of text whose tokens are its bytes: quick, and documents are easy to restore."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from stageline.corpus.cut import CutCounts
from stageline.corpus.header import BEGINS, ENDS, CutRules, Segments, TokenizerInfo
from stageline.errors import UserError

REFUSED = "REFUSED"


@dataclass(frozen=True)
class ByteEncoder:
    """The tokenizer of a cutter: one token per byte."""

    info: TokenizerInfo = TokenizerInfo("bytes", "f", 256, None, None)
    kind: str = "bytes"
    note: str = ""

    def check(self, texts: Sequence[str]) -> bool:
        """Accept any text: there is no other way to encode."""
        return True


class ByteCutter:
    """Cuts after every `seq_length` bytes.

    Args:
        fingerprint: of its tokenizer.
    """

    def __init__(self, seq_length: int = 32, fingerprint: str = "f") -> None:
        self.rules = CutRules(seq_length, adds_bos=False, adds_eos=False)
        self.encoder = ByteEncoder(TokenizerInfo("bytes", fingerprint, 256, None, None))

    def __call__(self, texts: Sequence[str]) -> tuple[Segments, CutCounts]:
        """Return the segments; a text with the word REFUSED is refused."""
        pieces, flags = [], []
        for text in texts:
            if REFUSED in text:
                raise UserError("a text was refused")
            raw = text.encode()
            starts = range(0, len(raw), self.rules.seq_length)
            pieces += [raw[start : start + self.rules.seq_length] for start in starts]
            own = [0] * len(starts)
            own[0] |= BEGINS
            own[-1] |= ENDS
            flags += own
        tokens = numpy.frombuffer(b"".join(pieces), numpy.uint8).astype(numpy.uint32)
        lengths = numpy.array([len(piece) for piece in pieces], numpy.int64)
        segments = Segments(tokens, lengths, numpy.array(flags, numpy.uint8))
        return segments, CutCounts(len(texts), len(pieces), len(tokens))
