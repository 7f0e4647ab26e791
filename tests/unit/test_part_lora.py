"""LoRA with a rank, alpha and targets for each part, against `peft` on the unsplit model."""

import json

import peft
import pytest
import torch

from pp_models import CausalLMStage, VisionLanguageStage
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from stageline.modules.lora import lora_stacks, merge_lora
from stageline.modules.part_lora import lora_of_parts
from tests.helpers.chain import chained_logits
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class, load_stages, shake, tiny_whole
from tests.helpers.tiny_models import tiny_config

PARTS = {
    **{"vit_lora_num": 1, "mlp_lora_num": 1, "llm_lora_num": 1},
    **{"vit_lora_rank": 4, "mlp_lora_rank": 2, "lora_rank": 8},
    **{"vit_lora_alpha": 12.0, "lora_alpha": 8.0},
    **{"lora_target": ["q_proj", "v_proj"], "vit_lora_target": ["all"], "mlp_lora_target": "all"},
    "frozen_lm_head": True,
}


@torch.no_grad()
def logits(model, family):
    batch = tiny_micro_batches(family)[0]
    return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


@torch.no_grad()
def logits_of_stages(stages, family):
    return chained_logits([stage.eval() for stage in stages], tiny_micro_batches(family)[0])


def part_ranks(stages):
    ranks = {}
    for model in stages:
        for name, wrappers in lora_stacks(model).items():
            layers = [wrapper.lora for wrapper in wrappers]
            told = tuple((layer.rank, layer.scale * layer.rank) for layer in layers)
            ranks.setdefault(model.part_of(name), set()).add(told)
    return ranks


FAMILIES = ("internvl", "qwen3_vl", "idefics3", "gemma3_vl")
NO_PROJECTOR = ("gemma3_vl",)  # its projector multiplies by a matrix outside of a layer


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_same(family, tmp_path):
    tiny_whole(family, tmp_path / "base")
    parts = {**PARTS, "mlp_lora_num": 0, "frozen_mlp": True} if family in NO_PROJECTOR else PARTS
    projector = {} if family in NO_PROJECTOR else {"mlp": {((2, 8.0),)}}
    stages = shake(load_stages(tmp_path / "base", tmp_path / "base", **parts))
    assert part_ranks(stages) == {"vit": {((4, 12.0),)}, **projector, "llm": {((8, 8.0),)}}
    expected = logits_of_stages(stages, family)
    folder = save_split_model(stages, None, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    found = {config["r"], *config["rank_pattern"].values()}
    assert found == ({4, 8} if family in NO_PROJECTOR else {2, 4, 8})
    decoder = [n for n in config["target_modules"] if "language_model" in n or "text_model" in n]
    assert {n.rpartition(".")[2] for n in decoder if ".vision" not in n} == {"q_proj", "v_proj"}
    plain = auto_class(family).from_pretrained(tmp_path / "base").eval()
    before = logits(plain, family)
    theirs = peft.PeftModel.from_pretrained(plain, folder).eval()
    torch.testing.assert_close(logits(theirs, family), expected, rtol=1e-5, atol=1e-6)
    assert (before - expected).abs().max() > 0.01

    # a second one on it: the first keeps its ranks, and both merge
    again = {**parts, "llm_lora_num": 2, "vit_lora_num": 2, "vit_lora_rank": 3}
    second = shake(load_stages(tmp_path / "base", folder, **again), seed=5)
    assert part_ranks(second) == {
        "vit": {((4, 12.0), (3, 12.0))},
        **projector,
        "llm": {((8, 8.0), (8, 8.0))},
    }
    expected = logits_of_stages(second, family)
    folder = save_split_model(second, None, tmp_path / "second")
    (whole,) = load_stages(tmp_path / "base", folder, num_stages=1, **again)
    torch.testing.assert_close(logits(whole.whole.eval(), family), expected, rtol=1e-5, atol=1e-6)
    merge_lora(whole)
    torch.testing.assert_close(logits(whole.whole.eval(), family), expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_target_that_is_nowhere_is_told_on_every_stage(stage):
    options = {"stage": stage, "num_stages": 4}
    with pytest.raises(
        UserError, match=r"--parts.vit.lora_target .* nothing matches none .*fc1"
    ) as error:
        VisionLanguageStage(
            tiny_config("llava"), vit_lora_num=1, vit_lora_target=["nothing"], **options
        )
    assert "vision tower" in str(error.value)
    with pytest.raises(UserError, match="--vit-lora-num 1: the model has no linear layer"):
        CausalLMStage(tiny_config("llama"), vit_lora_num=1, **options)


def test_a_target_of_one_layer_is_no_error_elsewhere():
    options = {"llm_lora_num": 1, "llm_lora_target": ["layers.3.mlp.up_proj"]}
    found = [
        list(lora_stacks(CausalLMStage(tiny_config("llama"), stage=s, num_stages=4, **options)))
        for s in range(4)
    ]
    assert found == [[], [], [], ["model.layers.3.mlp.up_proj"]]


def test_a_slip_in_a_name_is_no_option():
    with pytest.raises(TypeError, match="'vit_lora_rang'"):
        lora_of_parts(vit_lora_rang=3)
