"""Pictures made without a processor: every tower takes them, and the model sees them."""

import pytest
import torch
import transformers

from stageline.errors import UserError
from stageline.shrink import shrink_config
from stageline.stages.example_batch import example_pictures, image_token, picture_batch
from tests.helpers.family_configs import family_config

FAMILIES = [
    *("llava", "llava_next", "internvl", "qwen3_vl_moe", "qwen3_5", "gemma4", "paligemma"),
    *("mistral3", "idefics2", "smolvlm", "lfm2_vl", "llama4", "ovis2", "mllama"),
]


def tiny(name: str) -> torch.nn.Module:
    config = shrink_config(family_config(name), num_layers=2)
    torch.manual_seed(0)
    whole = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).train()
    with torch.no_grad():  # gates and projections that start at zero hide the tower
        for weight in whole.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return whole


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tower_takes_the_pictures_and_the_model_sees_them(name: str) -> None:
    whole = tiny(name)
    batch = picture_batch(whole.config, whole, rows=(2, 0, 1))
    counts = (batch["input_ids"] == image_token(whole.config)).sum(1).tolist()
    assert counts[0] > counts[2] > counts[1] == 0
    logits = whole(**batch, use_cache=False).logits
    logits.square().sum().backward()
    tower = [p.grad for n, p in whole.named_parameters() if "vis" in n and p.grad is not None]
    assert any(grad.abs().max() > 0 for grad in tower)
    text = picture_batch(whole.config, whole, rows=(0, 0))
    assert not any(name.startswith("pixel") for name in text)
    assert whole(**text, use_cache=False).logits.isfinite().all()


def test_other_pixels_make_other_logits() -> None:
    whole = tiny("llava").eval()
    first = picture_batch(whole.config, whole, rows=(1,), seed=0)
    second = {**first, "pixel_values": first["pixel_values"] + 1}
    with torch.no_grad():
        assert not torch.equal(whole(**first).logits, whole(**second).logits)


def test_a_blank_picture_needs_no_model() -> None:
    config = shrink_config(family_config("qwen2_5_vl"), num_layers=2)
    blank = example_pictures(config, dtype=torch.bfloat16)
    assert blank["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert (blank["pixel_values"] == 1).all() and blank["pixel_values"].dtype == torch.bfloat16


def test_a_model_that_takes_no_pictures_is_named() -> None:
    config = shrink_config(transformers.LlamaConfig(), num_layers=2)
    whole = transformers.LlamaForCausalLM(config)
    with pytest.raises(UserError, match=r"No pictures could be made for llama.*example_batch\.py"):
        picture_batch(config, whole, rows=(1,))
