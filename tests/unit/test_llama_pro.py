"""Blocks that are added change nothing at first, and train alone."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from pp_models import CausalLMStage
from stageline.errors import UserError
from stageline.modules.methods import FreezeRule, Methods
from stageline.stages.base import WeightSource, fill_stage
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class, tiny_whole
from tools.expand_blocks import expand_blocks, places_of

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    *("llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox"),
    *("mixtral", "qwen3_moe", "internvl"),
)


def outputs(model, family):
    batch = tiny_micro_batches(family, lengths=(14,))[0]
    with torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_an_expanded_model_answers_as_before(family, tmp_path):
    whole = tiny_whole(family, tmp_path / "old")
    GenerationConfig(eos_token_id=[2, 7]).save_pretrained(tmp_path / "old")
    expand_blocks(tmp_path / "old", tmp_path / "new", num_expand=2)
    new, info = auto_class(family).from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert new.config.get_text_config(decoder=True).num_hidden_layers == 6
    assert torch.equal(outputs(new.eval(), family), outputs(whole, family))
    assert new.generation_config.eos_token_id == [2, 7]
    types = getattr(new.config.get_text_config(decoder=True), "layer_types", None)
    before = getattr(whole.config.get_text_config(decoder=True), "layer_types", None)
    assert types == (before and [before[i] for i in (0, 1, 1, 2, 3, 3)])


def test_new_blocks_alone_train(tmp_path):
    whole = tiny_whole("llama", tmp_path / "old")
    expand_blocks(tmp_path / "old", tmp_path / "new", num_expand=2)
    config = AutoConfig.from_pretrained(tmp_path / "new")
    rule = FreezeRule(2, spreads=True)
    model = CausalLMStage(config, stage=0, num_stages=1, methods=Methods(freeze=rule))
    fill_stage(model, WeightSource(str(tmp_path / "new"), 0, "cpu", torch.float32), new_rows=None)
    trained = {n.split(".")[2] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"2", "5"}
    batch = tiny_micro_batches("llama", lengths=(14,))[0]
    labels = batch.pop("labels")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for _ in range(2):
        logits = model(batch["input_ids"], **batch)[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    old = dict(whole.named_parameters())
    new_index = {"0": "0", "1": "1", "3": "2", "4": "3"}
    for name, value in model.named_parameters():
        path = name.split(".")
        if path[1] == "layers" and path[2] in new_index:
            path[2] = new_index[path[2]]
            assert torch.equal(value, old[".".join(path)]), name


def test_the_script_expands_and_says_how_to_train(tmp_path, monkeypatch, capsys):
    tiny_whole("llama", tmp_path / "old")
    words = [str(tmp_path / "old"), str(tmp_path / "new"), "--num-expand", "4"]
    monkeypatch.setattr(sys, "argv", ["expand_blocks.py", *words])
    runpy.run_path(str(ROOT / "tools" / "expand_blocks.py"))["main"]()
    assert "--freeze.llama_pro --freeze.layers 4" in capsys.readouterr().out
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert made.config.num_hidden_layers == 8


def test_groups_of_layers_are_equal():
    assert places_of(4, 2) == [(0, False), (1, False), (1, True)] + [
        (2, False),
        (3, False),
        (3, True),
    ]
    for wrong in (0, 3, 8):
        with pytest.raises(UserError, match=f"--num-expand {wrong} "):
            places_of(4, wrong)


def test_a_target_that_exists_stays(tmp_path):
    tiny_whole("llama", tmp_path / "old")
    with pytest.raises(UserError, match="exist"):
        expand_blocks(tmp_path / "old", tmp_path / "old", num_expand=2)
