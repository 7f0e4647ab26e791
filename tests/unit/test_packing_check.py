"""Models that keep packed samples apart pass, all others are refused before training."""

import functools

import pytest
import torch
import transformers

from pp_models import CausalLMStage, VisionLanguageStage, class_of_key
from register import train_model_register
from stageline.checkpoint.init import init_split_model
from stageline.distributed.ranks import Ranks
from stageline.errors import UserError
from stageline.shrink import layer_period, shrink_config
from stageline.stages.packing import check_packing
from stageline.verify.scaled_copy import ScaledCopy, packed_rows, verify
from tests.helpers.family_configs import family_config
from tests.helpers.tiny_models import TYPICAL, tiny_config

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def stage(config, number=0, *, stage_class=CausalLMStage, dtype=torch.float32, **options):
    model = stage_class(config, stage=number, num_stages=2, dtype=dtype, **options)
    init_split_model(model, seed=0, device="cpu", dtype=dtype)
    return model.train()


@pytest.mark.parametrize("family", TYPICAL)
def test_the_shipped_families_pass_on_every_stage(family):
    stage_class = class_of_key(family)
    for number in (0, 1):
        model = stage(tiny_config(family), number, stage_class=stage_class)
        check_packing(model, rows=2)
        assert model.training
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("options", [{"llm_lora_num": 1}, {"dtype": torch.bfloat16}])
def test_lora_and_half_precision_pass(options):
    for number in (0, 1):
        model = stage(tiny_config("llama"), number, **options)
        model.enable_gradient_checkpointing()
        check_packing(model, rows=1)


@pytest.mark.parametrize(
    ("config", "number"),
    [
        # recurrence; short convolutions; no positions in the mask
        (transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2), 1),
        (transformers.Lfm2Config(**SMALL, intermediate_size=24, num_key_value_heads=1), 0),
        (transformers.OPTConfig(**SMALL, ffn_dim=24, word_embed_proj_dim=16), 1),
    ],
)
def test_models_that_mix_samples_are_refused(config, number):
    if config.model_type == "lfm2":
        config.layer_types = ["conv", "full_attention"]
    model = stage(config, number)
    with pytest.raises(UserError, match="a token sees tokens of another sample.*Leave --packing"):
        check_packing(model, rows=1)
    assert model.training


def test_positions_of_three_axes_that_know_no_samples_are_noticed(monkeypatch):
    monkeypatch.setattr(VisionLanguageStage, "has_axes", False)
    model = stage(tiny_config("qwen2_5_vl"), stage_class=VisionLanguageStage)
    with pytest.raises(UserError, match="Qwen2_5_VL.*a token sees"):
        check_packing(model, rows=1)


class Positions(torch.nn.Module):
    """A stage of one layer that attends to nothing but uses the place in the row."""

    is_first, is_last, stage = False, False, 1

    def __init__(self, *, takes_positions=True, leaks=False):
        super().__init__()
        self.takes_positions = takes_positions
        self.leaks = leaks

    def get_example_input(self, rows, tokens):
        return (torch.empty(rows, tokens, 4, device="meta"),)

    def forward(self, hidden, **batch):
        if not self.takes_positions:
            return self.strict(hidden, **batch)
        places = torch.arange(hidden.shape[1])[None, :, None]
        if self.leaks and len(hidden) > 1:
            return hidden.cumsum(dim=1)
        return hidden + (places if not self.leaks else 0)

    def strict(self, hidden, attention_mask, input_ids):
        return hidden


def test_positions_that_do_not_restart_are_refused():
    with pytest.raises(UserError, match="comes out differently than alone"):
        check_packing(Positions(), rows=1)


def test_a_forward_without_position_ids_is_refused():
    with pytest.raises(UserError, match="does not take position ids"):
        check_packing(Positions(takes_positions=False), rows=1)


def test_a_first_stage_that_cannot_be_tried_is_refused():
    model = Positions()
    model.is_first = True
    with pytest.raises(UserError, match="no get_input_embeddings"):
        check_packing(model, rows=1)


def test_kernels_that_see_one_row_only_are_found():
    """Flash attention reads borders off the positions of a single row."""
    check_packing(Positions(leaks=True), rows=1)
    with pytest.raises(UserError, match="sees tokens of another sample with 2 rows"):
        check_packing(Positions(leaks=True), rows=2)


def small_config(name, **fields):
    config = family_config(name)
    small = shrink_config(config, num_layers=2 * layer_period(config))
    for field, value in fields.items():
        setattr(small, field, value)
    return small


@pytest.mark.parametrize("name", ["ctrl", "gemma3n_text"])  # scales in place; several streams
def test_unusual_hidden_states_are_tried(name):
    for number in (0, 1):
        check_packing(stage(small_config(name), number), rows=2)


class Turned(Positions):
    def forward(self, hidden, **batch):
        return hidden.transpose(0, 1)


def test_rows_behind_tokens_are_refused():
    with pytest.raises(UserError, match=r"not \[rows, tokens, width\]"):
        check_packing(Turned(), rows=2)


@pytest.mark.parametrize(
    ("name", "fields", "passes"),
    [
        ("deepseek_v32", {"index_topk": 2048}, False),  # the tokens to attend to are chosen
        ("llama4_text", {"floor_scale": 8192}, False),  # attention is scaled by the place in a row
        ("qwen3", {"sliding_window": 4096, "use_sliding_window": True}, True),
    ],
)
def test_what_only_long_rows_show_is_found_on_a_copy(name, fields, passes, tmp_path):
    config = small_config(name, **fields)
    try:
        for number in (0, 1):
            check_packing(stage(config, number), rows=2)  # so few tokens show nothing
    except UserError as error:  # transformers 5.17 scales llama4's attention in short rows too
        assert name == "llama4_text" and "comes out differently than alone" in str(error)
        return
    config.save_pretrained(tmp_path)
    copy, said = ScaledCopy(train_model_register["causal_lm"], str(tmp_path), 2), []
    rows_of_two = functools.partial(packed_rows, rows=2)
    checked = functools.partial(verify, copy, {"packed": rows_of_two}, mode="always")
    if passes:
        checked(ranks=Ranks.of(None), say=said.append)
    else:
        with pytest.raises(UserError, match="comes out differently than alone"):
            checked(ranks=Ranks.of(None), say=said.append)
    assert said == []
