"""The rows of one group on one stage: their cache, and where each of them stands."""

from dataclasses import dataclass, field

import torch

from stageline.inference.decoding.cache import GroupCache, take_out

Tensors = dict[str, torch.Tensor]


@dataclass
class Group:
    """The rows of a group on this stage.

    Attributes:
        positions: of each row, the position of its next token.
        kept: of each row, what its steps read of its prompt.
        read: ids [B, T] of the pieces of a prompt that is not read to its end.
    """

    cache: GroupCache
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    kept: list[Tensors] = field(default_factory=list)
    read: list[torch.Tensor] = field(default_factory=list)

    def join(self, new: "Group") -> None:
        """Takes the rows of another group."""
        self.cache.join(new.cache)
        self.rows += new.rows
        self.positions += new.positions
        self.kept += new.kept

    def remove(self, row: int) -> None:
        """Forgets a row; the last one takes its place."""
        index = self.rows.index(row)
        self.cache.remove(index)
        for values in (self.rows, self.positions, self.kept):
            take_out(values, index)

    def arrange(self, rows: list[int]) -> None:
        """Puts the rows into an order; after a pass that failed stages may differ in it."""
        assert sorted(self.rows) == sorted(rows), f"rows {self.rows} here, {rows} ordered"
        for place, row in enumerate(rows):
            other = self.rows.index(row)
            if other != place:
                self.cache.swap(place, other)
                for values in (self.rows, self.positions, self.kept):
                    values[place], values[other] = values[other], values[place]

    def lose(self, new: "Group") -> None:
        """Has the rows of another group too, and nothing to read for any: their passes fail."""
        self.cache.lose(len(new.rows))
        self.rows += new.rows
        self.positions += new.positions
        self.kept += new.kept
