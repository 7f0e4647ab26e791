"""Tensors across a stage boundary: hidden states in the compute dtype, no mask, no float32."""

import pytest
import torch
from transformers import PretrainedConfig

from pp_models import CausalLMStage, StageModel
from stageline.checkpoint.init import init_split_model
from stageline.errors import UserError
from stageline.pipeline.live_bytes import tensor_bytes
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

SHAPES = [(2, 14), (1, 64), (3, 7)]


def border_bytes(model, shapes):
    """Return the bytes that a stage reports to send, for each micro-batch of (rows, tokens)."""
    return [tensor_bytes(model.get_example_output(*shape)) for shape in shapes]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_tokens_times_hidden_size(dtype, size):
    hidden_size = tiny_config("llama").hidden_size
    for number in range(3):
        model = CausalLMStage(tiny_config("llama"), stage=number, num_stages=3, dtype=dtype)
        expected = [rows * tokens * hidden_size * size for rows, tokens in SHAPES]
        assert border_bytes(model, SHAPES) == (expected if number < 2 else [0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_it_is_what_a_stage_returns(dtype):
    model = CausalLMStage(tiny_config("gemma2"), stage=0, num_stages=2, dtype=dtype)
    init_split_model(model, seed=0, device="cpu", dtype=dtype)
    for batch in tiny_micro_batches("gemma2"):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        sent = model(batch["input_ids"], **inputs)
        assert border_bytes(model, [tuple(batch["input_ids"].shape)]) == [sent.nbytes]


def test_a_configuration_without_a_length_needs_one():
    model = StageModel(PretrainedConfig(num_hidden_layers=1), stage=0, num_stages=1)
    with pytest.raises(UserError, match="max_position_embeddings.*Pass max_token_num"):
        model.get_example_input(2)
    assert model.get_example_input(2, 3)[0].shape == (2, 3)
