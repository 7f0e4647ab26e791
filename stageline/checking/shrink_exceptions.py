"""What no rule by the name of a field can know about a family, by model type, with the reason."""

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any], Any], None]

# rotary positions of three axes: the shares that the model's code takes where the configuration
# tells none, in numbers of the head of the real model
SECTIONS: dict[str, list[int]] = {
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"), [16, 24, 24]
    ),
    **dict.fromkeys(
        (
            *("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "cohere_compass_text"),
            *("cosmos3_edge_text", "cosmos3_omni_text"),
        ),
        [24, 20, 20],
    ),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "glm46v_text"), [8, 12, 12]),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), [11, 11, 10]),
    "ernie4_5_vl_moe_text": [22, 22, 20],
}

# the class of the configuration divides a width by 64 for its number of heads
LEAST_HEAD_DIM = {"granite4_vision": 16}


def _absolute_positions(small: dict[str, Any], sizes: Any) -> None:
    """Reformer's axial positions take rows of one length alone."""
    small["axial_pos_embds"] = False


def _soft_tokens(small: dict[str, Any], sizes: Any) -> None:
    """Gemma3n knows pictures and sounds by ids above those of text."""
    for name, start, token in (("vision", 112, "image"), ("audio", 120, "audio")):
        small[f"{name}_config"] |= {"vocab_offset": start, "vocab_size": 8}
        small[f"{token}_token_id"] = start + 1
    small["text_config"]["vocab_size_per_layer_input"] = 112


def _merged_patches(small: dict[str, Any], sizes: Any) -> None:
    """Muse hands out as many times the tower's width as patches become one token."""
    small["out_hidden_size"] = sizes.width * small["vision_config"]["merge_size"] ** 2


def _queries_of_patches(small: dict[str, Any], sizes: Any) -> None:
    """Aria's projector has so many tokens for so many patches."""
    small["projector_patch_to_query_dict"] = {16: 4}


def _states_for_layers(small: dict[str, Any], sizes: Any) -> None:
    """Granite 4 Vision adds states of the tower to the inputs of deeper layers."""
    last = sizes.num_layers - 1
    small["deepstack_layer_map"] = [(-3, min(1, last)), (-2, min(2, last))]
    places = range(len(small["spatial_target_layers"]))
    small["spatial_target_layers"] = [min(place + 1, last) for place in places]


def _shuffled_patches(small: dict[str, Any], sizes: Any) -> None:
    """Llama 4's projector takes what of the tower's width the shuffle of pixels makes."""
    vision = small["vision_config"]
    times = round(1 / vision["pixel_shuffle_ratio"]) ** 2
    vision["intermediate_size"] = sizes.width * times


EXCEPTIONS: dict[str, tuple[Change, ...]] = {
    "aria": (_queries_of_patches,),
    "granite4_vision": (_states_for_layers,),
    "llama4": (_shuffled_patches,),
    "muse_glimmer": (_merged_patches,),
    "muse_spark": (_merged_patches,),
    "gemma3n": (_soft_tokens,),
    "reformer": (_absolute_positions,),
}
