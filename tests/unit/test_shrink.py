"""A scaled-down copy of a configuration: what stays, what goes, and that its model runs."""

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from stageline.errors import UserError
from stageline.model_folder import special_tokens
from stageline.shrink import layer_period, shrink_config
from tests.helpers.family_configs import family_config


def test_multipliers_and_caps_stay() -> None:
    config = transformers.GraniteConfig(
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0
    )
    small = shrink_config(config, num_layers=2)
    assert (small.embedding_multiplier, small.residual_multiplier) == (12.0, 0.22)
    assert (small.logits_scaling, small.num_hidden_layers) == (8.0, 2)
    assert small.hidden_size < 100 < config.hidden_size
    gemma = shrink_config(transformers.Gemma2Config(), num_layers=2)
    assert (gemma.final_logit_softcapping, gemma.tie_word_embeddings) == (30.0, True)


def test_kinds_of_layers_take_turns_and_fit_each_other() -> None:
    kinds = ["conv", "conv", "full_attention"] * 4
    config = transformers.Lfm2Config(num_hidden_layers=12, layer_types=kinds)
    assert layer_period(config) == 2
    assert shrink_config(config, num_layers=4).layer_types == ["conv", "full_attention"] * 2
    llama4 = family_config("llama4_text")
    small = shrink_config(llama4, num_layers=4)
    for old, new in zip((0, 3, 0, 3), range(4)):  # each copied layer is one of the real ones
        assert small.layer_types[new] == llama4.layer_types[old]
        assert small.no_rope_layers[new] == llama4.no_rope_layers[old]
    assert small.moe_layers == [0, 1, 2, 3]


def test_a_list_of_indices_names_layers_of_the_same_kind() -> None:
    config = transformers.BambaConfig(num_hidden_layers=12, attn_layer_indices=[5, 11])
    small = shrink_config(config, num_layers=4)
    assert (layer_period(config), small.attn_layer_indices) == (2, [1, 3])


def test_special_tokens_stay_different_and_inside() -> None:
    small = shrink_config(family_config("qwen2_5_vl"), num_layers=2)
    ids = [small.image_token_id, small.video_token_id, small.vision_start_token_id]
    assert len(set(ids)) == 3
    assert max(special_tokens(small)) < small.text_config.vocab_size


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3n_text", "nemotron_h", "qwen3_5"])
def test_the_copy_learns(name: str) -> None:
    config = shrink_config(family_config(name), num_layers=4)
    assert runs(config)


def runs(config: PretrainedConfig) -> bool:
    """Whether every layer gets a gradient."""
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in classes or "text_config" in config.sub_configs:
        classes = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model = classes[type(config)](config)
    ids = torch.arange(40, 56).view(2, 8)
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    reached = {name for name, weight in model.named_parameters() if weight.grad is not None}
    return all(any(f".{index}." in name for name in reached) for index in range(4))


def test_a_class_that_refuses_the_copy_is_named() -> None:
    config = transformers.LlamaConfig()
    config.layer_types = "nonsense"
    with pytest.raises(UserError, match=r"llama could not be cut down .*shrink\.py"):
        shrink_config(config, num_layers=2)


def test_the_last_layer_is_of_the_kind_of_the_last() -> None:
    """Mllama ends in a layer that reads text: layers that read pictures are passed over."""
    small = shrink_config(family_config("mllama"), num_layers=4).text_config
    assert small.cross_attention_layers == [1]
