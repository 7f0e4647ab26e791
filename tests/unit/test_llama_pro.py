"""Blocks that are added change nothing at first, and only they train."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from stageline.errors import UserError
from stageline.modules.methods import FreezeRule
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class, tiny_whole
from tools.expand_blocks import expand_blocks, places_of

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (*("llama", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "mixtral", "internvl"),)


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
    added = [index for index, (_, is_new) in enumerate(places_of(4, 2)) if is_new]
    assert list(FreezeRule(2, spreads=True).layers(6)) == added, "and these alone train"


def test_groups_of_layers_are_equal():
    halves = [(0, False), (1, False), (1, True)], [(2, False), (3, False), (3, True)]
    assert places_of(4, 2) == [*halves[0], *halves[1]]
    for wrong in (0, 3, 8):
        with pytest.raises(UserError, match=f"--num-expand {wrong} "):
            places_of(4, wrong)


def test_a_target_that_exists_stays(tmp_path):
    tiny_whole("llama", tmp_path / "old")
    with pytest.raises(UserError, match="exist"):
        expand_blocks(tmp_path / "old", tmp_path / "old", num_expand=2)
