"""The estimated cache equals the real one, to the byte, after generation by transformers."""

import pytest
import torch
import transformers

from stageline.pipeline.live_bytes import PeakBytes
from stageline.planner.estimate import (
    Cost,
    Load,
    layer_tensors,
    measure_model,
    model_on_meta,
    pass_bytes,
)
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class
from tests.helpers.tiny_models import DECODERS, tiny_config

LENGTH, PROMPT = 22, 14


def latent_config():
    return transformers.DeepseekV3Config(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=64, n_routed_experts=8, n_group=2,
        topk_group=1, num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, pad_token_id=0,
    )  # fmt: skip


def linear_config():
    return transformers.Qwen3NextConfig(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64, num_experts=8,
        num_experts_per_tok=2, shared_expert_intermediate_size=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, pad_token_id=0,
    )  # fmt: skip


OTHERS = {"latent": latent_config, "linear": linear_config}


def caches(layers):
    return [layer.cache for layer in layers]


def generated_cache(model, inputs):
    """Return the bytes in transformers' cache when the last token was chosen."""
    prompt = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=LENGTH - prompt,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    assert output.sequences.shape[1] == LENGTH
    return [
        sum(tensor.nbytes for tensor in layer_tensors(layer))
        for layer in output.past_key_values.layers
    ]


@pytest.mark.parametrize("family", [*DECODERS, *OTHERS])
def test_the_cache_of_decoders(family, rows=3):
    config = OTHERS[family]() if family in OTHERS else tiny_config(family)
    stated = caches(pass_bytes(model_on_meta(config, dtype=torch.float32), Load(rows, LENGTH)))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    mask_BT = torch.ones(rows, PROMPT, dtype=torch.long)
    mask_BT[-1, : rows - 1] = 0  # one row is shorter
    ids_BT = torch.randint(9, 64, (rows, PROMPT)) * mask_BT
    found = generated_cache(model, {"input_ids": ids_BT, "attention_mask": mask_BT})
    assert stated == found and sum(found) > 0
    if family in ("gemma2", "gemma3"):
        assert len(set(found)) == 2, "layers with a window keep less"


@pytest.mark.parametrize("family", ["internvl", "qwen2_5_vl", "gemma3_vl"])
def test_the_cache_of_models_that_see(family):
    config = tiny_config(family)
    batch = tiny_micro_batches(family, lengths=(PROMPT,))[0]
    del batch["labels"]
    rows = len(batch["input_ids"])
    stated = caches(pass_bytes(model_on_meta(config, dtype=torch.float32), Load(rows, LENGTH)))
    torch.manual_seed(0)
    model = auto_class(family).from_config(config).eval()
    assert stated == generated_cache(model, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_half_the_size_need_half_the_cache(dtype):
    stated = pass_bytes(model_on_meta(tiny_config("llama"), dtype=dtype), Load(2, 9))
    # two rows of 8 tokens: one head of 8 numbers, keys and values
    assert caches(stated) == [2 * 8 * 8 * 2 * dtype.itemsize] * 4


def test_a_window_holds_the_whole_prompt_until_the_first_step():
    stated = pass_bytes(model_on_meta(tiny_config("gemma2"), dtype=torch.float32), Load(1, 33))
    per_token = 8 * 2 * 4
    assert caches(stated) == [7 * per_token, 32 * per_token] * 2
    assert [layer.beyond for layer in stated] == [25 * per_token, 0] * 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_a_real_prompt_needs_the_workspace_that_is_stated(family):
    """Counted on a CPU, whose attention keeps a few numbers besides."""
    config = tiny_config(family, hidden_size=32, intermediate_size=96)
    load = Load(rows=3, length=49)
    stated = pass_bytes(model_on_meta(config, dtype=torch.float32), load)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids_BT = torch.randint(9, 64, (3, 48))
    watch = PeakBytes(torch.device("cpu"))
    with torch.no_grad(), watch.watch():
        held = model.get_decoder()(ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=True)
    assert held.past_key_values is not None
    expected = sum(stated, Cost()).while_answering
    assert 0.75 * watch.peak < expected < 1.4 * watch.peak


@pytest.mark.parametrize("family", ["internvl", "qwen2_5_vl", "idefics3"])
def test_a_tower_needs_the_workspace_that_is_stated(family):
    """Measured where pixels are all it takes; else estimated, from above."""
    batch = tiny_micro_batches(family, lengths=(PROMPT,))[0]
    config = tiny_config(family)
    pixels = batch["pixel_values"]
    side = getattr(config.vision_config, "image_size", None)
    load = Load(rows=1, length=PROMPT, images=len(pixels.flatten(0, -4)) if side else 1)
    if side is None:  # patches, of 4 x 4 x 3 numbers for instance
        patch = config.vision_config.patch_size
        load = Load(rows=1, length=PROMPT, images=1, image_size=int(len(pixels) ** 0.5 + 1) * patch)
    stated = measure_model(model_on_meta(config, dtype=torch.float32), load).tower.answering
    model = auto_class(family).from_config(config).eval()
    taken = {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}
    watch = PeakBytes(torch.device("cpu"))
    with torch.no_grad(), watch.watch():
        held = (model.get_image_features(**taken), pixels)
    assert held and 0.9 * watch.peak < stated < 3 * watch.peak + 2 * pixels.nbytes
