"""Interface of a stage model for the engine; its code is in `stages`.

Shapes: B rows of a group or of a micro-batch, T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

Tensors = tuple[torch.Tensor, ...]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loader:
    """Functions that read and write the folders of a model; stages and checkpoints know tensors."""

    start: Callable[[dict[str, Any]], Any]  # takes its options -> adapters that a stage begins with
    num_rows: Callable[..., int]  # folder -> rows of the vocabulary
    fill: Callable[..., None]  # stage, its checkpoint or None: the weights that it owns
    processor: Callable[..., Any]  # folder -> tokenizer or processor
    processor_of_weights: Callable[..., Any | None]  # the same; None: the folder has none
    pad_token_id: Callable[[Any], int]  # processor -> id
    save_processor: Callable[[Any, Path], None]
    stop_ids: Callable[..., list[int]]  # ids of the model, processor -> all that end an answer


def default_loader() -> Loader:
    """Return the loader for callers that give none; the front of the package names it."""
    import stageline

    return stageline.folder_loader()


class Stage(nn.Module):
    """Contract of a stage model; `StageModel` documents and fulfils it."""

    config: PretrainedConfig
    whole: PreTrainedModel | None
    stage: int
    num_stages: int
    layers: range
    parameter_order: list[str]
    vocabulary: tuple[str, ...]
    # loading sets these; they do not exist before
    loaded_from: str | None
    keys_read: set[str]
    keys_fresh: set[str]
    cast_note: str | None
    token_ids: tuple[int, ...]
    carried: frozenset[str]
    only_answers = False  # nothing trains any more
    methods: Any  # modules.methods.Methods

    if TYPE_CHECKING:  # each stage model defines these

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
        def frozen(self) -> None: ...

    @property
    def can_decode(self) -> bool:
        """Return whether the forward hands `past_key_values` and `position_ids` to the layers."""
        return False

    @property
    def reads_in_pieces(self) -> bool:
        """Return whether a prompt read in several passes, each on the cache so far, equals one."""
        return False

    def num_cache_layers(self) -> int:
        """Return the cache layers in the model's count: LongCat attends twice in each layer."""
        text = self.config.get_text_config(decoder=True)
        return max(self.num_layers(), getattr(text, "num_hidden_layers", 0))

    @property
    def short_length(self) -> int | None:
        """Return the longest row, in tokens, with LongRoPE's short frequencies; None: one set.

        The longest row of a pass decides, so rows of both kinds must not share a pass.
        """
        return None

    def answer_only(self) -> None:
        """Drop the work that a forward does only for training."""
        self.only_answers = True

    def decode_positions(self, batch: Batch) -> torch.Tensor:
        """Return the positions of left-padded prompts, [B, T] or [axes, B, T]."""
        return (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)

    def fixed_layers(self) -> frozenset[int]:
        """Return the layers with keys and values only of a prompt's images; no step adds any."""
        return frozenset()

    def kept_inputs(self, batch: Batch) -> Batch:
        """Return the prompt tensors that steps of an answer read with the cache; dim 0 = row."""
        return {}

    def decode_inputs(self, kept: Sequence[Batch], num_columns: int) -> Batch:
        """Return the arguments of a step for each row's `kept_inputs` and the columns so far."""
        return {}

    def fixed_cells(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the memory of a prompt's fixed keys and values, as a number of tokens."""
        return 0
