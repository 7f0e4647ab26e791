"""Adapters that a run starts with, or that are merged, against `peft`'s own merges one by one."""

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from commands.export import make_stages
from models.builders import auto
from stageline.checkpoint.adapter import merge_adapters, read_adapter
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from stageline.modules.lora import lora_stacks
from tests.helpers.chain import chained_logits
from tests.helpers.exports import export_folder
from tests.helpers.tiny_checkpoints import load_stages, shake
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

IDS = torch.arange(12).reshape(2, 6) + 3
# name -> settings of peft; ranks, alphas, layers and kinds of their own
ADAPTERS = {
    "a": {"r": 2, "lora_alpha": 6.0, "target_modules": ["q_proj", "down_proj"]},
    "b": {"r": 3, "lora_alpha": 4.0, "target_modules": ["q_proj", "k_proj"], "use_dora": True},
    "c": {
        **{"r": 4, "lora_alpha": 9.0, "target_modules": ["v_proj", "q_proj"]},
        **{"use_rslora": True, "modules_to_save": ["lm_head"]},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    tiny_tokenizer().save_pretrained(folder / "base")
    torch.manual_seed(1)
    config = tiny_config("llama", vocab_size=len(tiny_tokenizer()))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        model = peft.get_peft_model(base_of(folder), peft.LoraConfig(**settings))
        shake([model], seed)
        model.save_pretrained(folder / name)
    return folder


def stages_of(folder, names, num_stages=2, **options):
    paths = [folder / name for name in names]
    options = {"adapter_path": paths, "frozen_lm_head": True, **options}
    return load_stages(folder / "base", num_stages=num_stages, **options)


def base_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "base").eval()


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def merged_by_peft(folder, names):
    model = base_of(folder)
    for name in names:
        model = peft.PeftModel.from_pretrained(model, folder / name).merge_and_unload()
    return model


@torch.no_grad()
def chain(stages):
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    return chained_logits([stage.eval() for stage in stages], batch)


@pytest.mark.parametrize("names", ["ba", "abc"])
def test_merged_one_after_the_other_as_peft_does(names, folder, tmp_path):
    expected = logits(merged_by_peft(folder, names))
    paths = [str(folder / name) for name in names]
    model, _, _ = auto(str(folder / "base"), adapter_path=paths, device="cpu")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    options = {"adapter_paths": [folder / name for name in names], "make_stages": make_stages}
    export_folder(folder / "base", tmp_path / "out", **options)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(found), expected, rtol=1e-4, atol=1e-5)


def test_weights_say_how_much_of_each(folder):
    theirs = peft.PeftModel.from_pretrained(base_of(folder), folder / "a")
    for module in theirs.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scaling["default"] *= 0.25
    path = str(folder / "a")
    ours, _, _ = auto(
        str(folder / "base"), adapter_path=[path], adapter_weights=[0.25], device="cpu"
    )
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"--adapter-weights 0.5 is given for .*b, but a DoRA"):
        merge_adapters(base_of(folder), [folder / "b"], [0.5])
    with pytest.raises(UserError, match="has 1 numbers for 2 folders"):
        merge_adapters(base_of(folder), [folder / "a", folder / "b"], [0.5])


def test_all_but_the_last_are_merged_and_that_goes_on(folder, tmp_path):
    stages = stages_of(folder, "abc", lora_rank=16, llm_lora_num=1)
    base = merged_by_peft(folder, "ab")
    expected = logits(peft.PeftModel.from_pretrained(base, folder / "c"))
    torch.testing.assert_close(chain(stages), expected, rtol=1e-4, atol=1e-5)
    told = "\n".join(stages[0].start.notes)
    assert "rank-stabilised LoRA on 8 layers of the language model, rank 4, alpha 9" in told
    assert told.count("merged ") == 2
    trained = [n for s in stages for n, p in s.named_parameters() if p.requires_grad]
    assert {n.rpartition("lora_")[0].split(".")[-3] for n in trained if "lora" in n} == {
        "q_proj",
        "v_proj",
    }
    # it trains as the file says, whatever --parts.lm_head.frozen says
    assert "lm_head.weight" in trained
    saved = save_split_model(stages, None, tmp_path / "saved")
    config = json.loads((saved / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["r"], config["lora_alpha"]) == (True, 4, 9.0)
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    torch.testing.assert_close(
        logits(peft.PeftModel.from_pretrained(base, saved)), expected, rtol=1e-4, atol=1e-5
    )


def test_a_new_adapter_on_all_that_were_merged(folder, tmp_path):
    options = {"create_new_adapter": True, "llm_lora_num": 1, "lora_init": "pissa"}
    stages = stages_of(folder, "ca", **options)
    expected = logits(merged_by_peft(folder, "ca"))
    torch.testing.assert_close(chain(stages), expected, rtol=1e-4, atol=1e-5)
    for index, stage in enumerate(stages):
        shake([stage], index)
    after = chain(stages)
    saved = save_split_model(stages, None, tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(saved / "base")
    model = peft.PeftModel.from_pretrained(base, saved)
    torch.testing.assert_close(logits(model), after, rtol=1e-4, atol=1e-5)
    assert (after - expected).abs().max() > 0.01


def test_what_an_earlier_adapter_trained_whole_is_carried(folder, tmp_path):
    options = {"llm_lora_num": 2, "lora_target": ["q_proj", "v_proj"], "frozen_lm_head": True}
    stages = load_stages(folder / "base", folder / "c", **options)
    assert not dict(stages[1].named_parameters())["lm_head.weight"].requires_grad
    expected = chain(stages)
    saved = save_split_model(stages, None, tmp_path / "second")
    assert read_adapter(saved).extras.keys() == {"lm_head.weight"}
    found = logits(peft.PeftModel.from_pretrained(base_of(folder), saved))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(next(iter(lora_stacks(stages[0]).values()))) == 2


def test_adapters_in_two_ways_are_refused(folder):
    with pytest.raises(UserError, match=r"is an adapter, like"):
        auto(str(folder / "a"), adapter_path=str(folder / "b"), device="cpu")
    with pytest.raises(UserError, match="--adapter-path"):
        load_stages(folder / "base", folder / "a", 1, adapter_path=[folder / "a"])
    with pytest.raises(UserError, match="DoRA"):
        options = {"llm_lora_num": 1, "lora_target": ["q_proj", "k_proj"]}
        load_stages(folder / "base", folder / "b", 1, **options)
