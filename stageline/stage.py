"""What the rooms of the engine know of a stage model, whose code is in `stages`.

Shapes: B rows of a group or of a micro-batch, T tokens.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

Tensors = tuple[torch.Tensor, ...]
Batch = dict[str, torch.Tensor]


class Stage(nn.Module):
    """The contract of a stage model; `StageModel` says what each of these is, and keeps it.

    What answering asks stands last; a decoder of text needs none of it of its own.

    Attributes:
        only_answers: nothing trains any more.
    """

    config: PretrainedConfig
    whole: PreTrainedModel | None
    stage: int
    num_stages: int
    layers: range
    parameter_order: list[str]
    vocabulary: tuple[str, ...]
    # what loading leaves behind; nothing is there before
    loaded_from: str | None
    keys_read: set[str]
    keys_fresh: set[str]
    cast_note: str | None
    token_ids: tuple[int, ...]
    carried: frozenset[str]
    only_answers = False

    if TYPE_CHECKING:  # what each stage model has of its own

        @property
        def is_first(self) -> bool: ...
        @property
        def is_last(self) -> bool: ...
        def num_layers(self) -> int: ...
        def layer_name(self, index: int) -> str: ...
        def layer_kind(self, index: int) -> object: ...
        def layer_list(self) -> list[tuple[int, nn.Module]]: ...
        def modules_to_shard(self) -> list[nn.Module]: ...
        def parts(self) -> dict[str, list[str]]: ...
        def part_of(self, name: str) -> str | None: ...
        def get_example_input(self, rows: int, max_token_num: int | None = None) -> Tensors: ...
        def get_example_output(self, rows: int, max_token_num: int | None = None) -> Tensors: ...
        def get_batch_input(self, batch: Batch) -> Tensors: ...
        def get_batch_output(self, batch: Batch) -> Tensors: ...
        def get_key_map_without_last_lora(self) -> dict[str, str]: ...
        def prune(self, whole: PreTrainedModel) -> None: ...

    @property
    def can_decode(self) -> bool:
        """Whether the forward hands `past_key_values` and `position_ids` to the layers.

        Without it each token of an answer reads its whole row anew. A class may set it to True.
        """
        return False

    @property
    def reads_in_pieces(self) -> bool:
        """Whether a prompt of text can be read in several passes, each on the cache so far.

        Only where that gives the same as one pass: masks and positions of a piece follow from how
        many tokens came before it, and nothing but keys and values is kept.
        """
        return False

    def num_cache_layers(self) -> int:
        """Layers of a cache as the model counts them: LongCat attends twice in each of its own."""
        text = self.config.get_text_config(decoder=True)
        return max(self.num_layers(), getattr(text, "num_hidden_layers", 0))

    @property
    def short_length(self) -> int | None:
        """Up to so many tokens a pass has other rotary frequencies than above, for all its rows.

        LongRoPE chooses by the longest row: rows of both kinds must not share a pass, and keys of
        one kind are of no use to the other. None: frequencies are always the same.
        """
        return None

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

    def fixed_cells(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Memory of a prompt's fixed keys and values, in tokens that take as much."""
        return 0
