"""Stages of pipelined decoding by the bytes of a step; splits by trial are in test_partition_dp."""

import pytest
import torch
import transformers

from stageline.planner.estimate import decode_bytes, model_on_meta
from stageline.planner.partition import decode_partition
from tests.helpers.tiny_models import tiny_config
from tools.tiny_model import make


def test_a_tied_head_of_smollm2_weighs_eight_layers():
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    assert decode_partition(config, 2, dtype=torch.bfloat16) == [19, 11]
    assert decode_partition(config, 1, dtype=torch.bfloat16) == [30]


def test_a_model_whose_layers_lie_elsewhere_is_divided_evenly():
    config, _ = make("longcat_flash")
    assert config.num_hidden_layers == 8, "it has four, of two attentions each"
    assert decode_partition(config, 2, dtype=torch.bfloat16) is None


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("gpt2", False), ("gemma3", False), ("internvl", True)]
)
def test_what_a_step_reads_is_all_but_lookups_and_tower(family, tied):
    config = tiny_config(family, tied=tied)
    model = model_on_meta(config, dtype=torch.bfloat16)
    layers, back = decode_bytes(model)
    text = [
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not any(part in name for part in ("visual", "vision", "projector"))
    ]
    looked_up = ("embed_tokens.weight", "wte.weight", "wpe.weight")
    read = sum(2 * p.numel() for name, p in text if not name.endswith(looked_up))
    assert len(layers) == 4 and sum(layers) + back == read
    head = model.get_output_embeddings().weight
    assert back > 2 * head.numel() > 0
