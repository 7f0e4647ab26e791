"""Which models answer on a cache, and which may read a prompt of text in pieces.

Pieces are each read on the keys and values of those before.

The list names what the tests compare with the library, piece by piece. Any other decoder reads its
prompts whole: a class may keep more than keys and values between passes, or look ahead, and nothing
in its configuration need say so.
"""

import inspect

from transformers import PretrainedConfig, PreTrainedModel

from stageline.stages.split_plan import SplitPlan

READ_IN_PIECES = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"),
        *("gpt2", "gpt_neox", "mixtral", "qwen3_moe"),
        *("internvl", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        *("idefics3", "smolvlm"),
    }
)
# what a token sees then depends on the tokens before it alone
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def keeps_keys_and_values(whole: PreTrainedModel, plan: SplitPlan) -> bool:
    """Whether keys and values are all that a stage has to remember of the tokens so far.

    Not where layers keep a state (Mamba, convolutions), take no positions, or where stages need
    more of each other than hidden states: a token of an answer then reads its whole row anew.
    """
    takes = inspect.signature(type(whole.base_model).forward).parameters
    kinds = set(getattr(whole.config.get_text_config(decoder=True), "layer_types", None) or ())
    return (
        not getattr(whole, "_is_stateful", False)
        and {"past_key_values", "position_ids"} <= set(takes)
        and kinds <= LAYER_TYPES
        and all(len(slots) == 1 for slots in plan.borders)
    )


def can_be_cut(config: PretrainedConfig) -> bool:
    """Whether a piece is read as it would be in the whole prompt."""
    text = config.get_text_config(decoder=True)
    layer_types = getattr(text, "layer_types", None) or ()
    return (
        config.model_type in READ_IN_PIECES
        and LAYER_TYPES.issuperset(layer_types)
        and not getattr(text, "use_bidirectional_attention", None)
        and not any(_follows_length(kind) for kind in _rope_types(text))
    )


def _follows_length(rope_type: str) -> bool:
    """Whether its frequencies are those of the longest row of a pass: a piece's are others."""
    return "dynamic" in rope_type or rope_type == "longrope"


def _rope_types(text: PretrainedConfig) -> list[str]:
    found = getattr(text, "rope_parameters", None) or {}
    by_layers = [value for value in found.values() if isinstance(value, dict)]
    return [one.get("rope_type", "default") for one in by_layers or [found]]
