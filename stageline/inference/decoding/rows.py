"""What the scheduler keeps of sequences and their groups: plain values, no decisions."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Sequence:
    """One request on its way, as the scheduler sees it.

    Attributes:
        length: tokens of its prompt.
        longest: tokens that it may come to.
        is_alone: its prompt can't be read together with others': it has images.
        may_be_cut: its prompt may be read in pieces.
        owner: what belongs to it; of no concern here.
    """

    row: int
    length: int
    longest: int
    is_alone: bool
    owner: Any
    may_be_cut: bool = False
    group: int | None = None


@dataclass
class RunningGroup:
    """Sequences that step together, in the order in which every stage has them.

    Attributes:
        coming: have their place, but no token yet: their prompts are read in pieces.
        on_way: of each pass on its way, oldest first: how many pieces had been handed out then.
            Pieces before the last one of a prompt concern no other row and are none of these.
        since: the turn in which its last pass came back.
    """

    number: int
    members: list[Sequence] = field(default_factory=list)
    coming: list[Sequence] = field(default_factory=list)
    on_way: list[int] = field(default_factory=list)
    since: int = 0

    @property
    def is_home(self) -> bool:
        return not self.on_way

    @property
    def cells(self) -> int:
        """Upper limit of rows times columns."""
        rows = [*self.members, *self.coming]
        return len(rows) * max((one.longest for one in rows), default=0)

    @property
    def num_rows(self) -> int:
        return len(self.members) + len(self.coming)


@dataclass(frozen=True)
class Reading:
    """A prompt of which pieces are still to be read.

    Attributes:
        size: tokens of a piece; the last one may have fewer.
        end: tokens that were handed out.
    """

    sequence: Sequence
    size: int
    end: int = 0

    def next_piece(self) -> range:
        """Places of the tokens that follow."""
        return range(self.end, min(self.end + self.size, self.sequence.length))


@dataclass(frozen=True)
class Prefill:
    """Prompts that are read in one pass.

    Attributes:
        piece: places of the tokens of the only prompt; None: all prompts whole.
    """

    group: RunningGroup
    chosen: list[Sequence]
    piece: range | None = None
