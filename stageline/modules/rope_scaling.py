"""Rotary positions for texts longer than a model was trained for, written into its configuration.

transformers reads all of it from `config.rope_parameters`: the model code is as it was, every stage
computes the same frequencies, and a saved folder computes them again.
"""

import math
from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig

from stageline.errors import UserError

RopeKind = Literal["linear", "dynamic", "yarn", "llama3"]
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0
PLAIN = "default"
# layers of these kinds see no further than their window, which does not grow
_WINDOWED = ("sliding", "chunked")


@dataclass(frozen=True)
class RopeScaling:
    """How positions are scaled, and for which length."""

    kind: RopeKind
    max_token_num: int


def scale_rope(config: PretrainedConfig, scaling: RopeScaling) -> str:
    """Writes the scaling into a configuration, in place, if the length asks for it.

    The factor is the length over the longest one of the model, rounded up.

    Returns:
        A line to print: what was done.

    Raises:
        UserError: the model has no rotary positions, or they are scaled already.
    """
    text = config.get_text_config(decoder=True)
    old = getattr(text, "max_position_embeddings", None)
    parameters = getattr(text, "rope_parameters", None)
    if not parameters or not old:
        raise UserError(
            f"--rope-scaling {scaling.kind} came with a {config.model_type} model, whose "
            "configuration has no rotary positions (rope_parameters): nothing else can be scaled. "
            "Leave it out, and keep --max-token-num within what the model has."
        )
    if scaling.max_token_num <= old:
        return (
            f"--rope-scaling {scaling.kind} does nothing: --max-token-num "
            f"{scaling.max_token_num} is within the {old} positions of the model"
        )
    factor = math.ceil(scaling.max_token_num / old)
    if _is_nested(parameters):
        text.rope_parameters = {
            kind: one if kind.startswith(_WINDOWED) else _scaled(one, scaling, factor, old)
            for kind, one in parameters.items()
        }
    else:
        text.rope_parameters = _scaled(parameters, scaling, factor, old)
    note = f"--rope-scaling {scaling.kind}: positions are scaled by {factor}"
    if scaling.kind == "dynamic":
        # the library begins to scale beyond max_position_embeddings
        return (
            f"{note} beyond {old} tokens. Warning: frequencies depend on the length of each "
            "micro-batch, so that training sees others than generation; linear, yarn and llama3 "
            "do not"
        )
    text.max_position_embeddings = old * factor
    return f"{note}, for up to {old * factor} tokens instead of {old}"


def _is_nested(parameters: dict[str, object]) -> bool:
    """Whether there is an entry for each kind of layer."""
    return all(isinstance(one, dict) for one in parameters.values())


def _scaled(
    parameters: dict[str, object], scaling: RopeScaling, factor: int, old: int
) -> dict[str, object]:
    kind = parameters.get("rope_type", PLAIN)
    if kind not in (PLAIN, "mrope") and not kind == scaling.kind == "dynamic":
        raise UserError(
            f"--rope-scaling {scaling.kind} came with a model whose positions are scaled already "
            f"(rope_type {kind!r}, for {old} tokens); plain ones were expected: two scalings on "
            "top of each other are neither. Leave it out and keep --max-token-num within "
            f"{old}, or start from the model before it was scaled."
        )
    # what else is there stays: rope_theta, mrope_section, partial_rotary_factor
    scaled = {**parameters, "rope_type": scaling.kind, "factor": float(factor)}
    if scaling.kind in ("yarn", "llama3"):
        scaled["original_max_position_embeddings"] = old
    if scaling.kind == "llama3":
        scaled |= {"low_freq_factor": LOW_FREQ_FACTOR, "high_freq_factor": HIGH_FREQ_FACTOR}
    return scaled
