"""What a stage tells the decoding engine, which answers with it token by token.

Shapes: B rows of a group, T tokens.
"""

from collections.abc import Sequence

import torch

Batch = dict[str, torch.Tensor]


class AnsweringStage:
    """The part of a stage model that answering asks; a decoder of text needs none of its own.

    Attributes:
        can_decode: the forward hands `past_key_values` and `position_ids` to the layers; without it
            each token of an answer reads its whole row anew.
        only_answers: nothing trains any more.
    """

    can_decode = False
    only_answers = False

    @property
    def reads_in_pieces(self) -> bool:
        """Whether a prompt of text can be read in several passes, each on the cache so far.

        Only where that gives the same as one pass: masks and positions of a piece follow from how
        many tokens came before it, and nothing but keys and values is kept.
        """
        return False

    def answer_only(self) -> None:
        """Leaves out what a forward does for training alone."""
        self.only_answers = True

    def decode_positions(self, batch: Batch) -> torch.Tensor:
        """Positions of the tokens of prompts that are padded on the left.

        Returns:
            [B, T], or [axes, B, T]; the token behind a prompt has the largest one's successor.
        """
        return (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)

    def fixed_layers(self) -> frozenset[int]:
        """Layers whose keys and values are those of a prompt's images: no step adds any."""
        return frozenset()

    def kept_inputs(self, batch: Batch) -> Batch:
        """What the steps of an answer read of its prompts, besides the cache; dim 0 is the row."""
        return {}

    def decode_inputs(self, kept: Sequence[Batch], num_columns: int) -> Batch:
        """What the forward of one step takes for this.

        Args:
            kept: of each row of the group: its part of `kept_inputs`.
            num_columns: of the group's cache, the step's own included.
        """
        return {}

    def fixed_cells(self, batch: Batch) -> int:
        """Memory of a prompt's fixed keys and values, in tokens that take as much."""
        return 0
