"""LoRA on fused experts, against `peft`'s `target_parameters` on the unsplit model in float64."""

import json

import peft
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from transformers import AutoConfig, AutoModelForCausalLM

from commands.stages import stage_key
from pp_models import class_of_key
from stageline.checkpoint.adapter import attach_adapter
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from stageline.modules.lora import merge_lora, strip_lora
from stageline.shrink import shrink_config
from stageline.stages.base import WeightSource, fill_stage
from stageline.verify.batches import loss_of, run_chain, with_facts
from tests.helpers.family_configs import family_config
from tests.helpers.tiny_checkpoints import shake

# layouts [E, out, in] and [E, in, out], with biases, without a gate, with other modules' names
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "gemma4_text")
FIELDS = {
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 704,
    }
}
TARGET = [r".*experts\.[a-z_]*proj", "q_proj", "o_proj", "q_b_proj"]
LORA = {"llm_lora_num": 1, "lora_rank": 3, "lora_alpha": 7.0, "lora_target": TARGET}
LORA |= {"frozen_lm_head": True}


def make_whole(family, folder, *, num_layers=2):
    torch.manual_seed(3)
    config = family_config(family)
    for name, value in FIELDS.get(family, {}).items():
        setattr(config, name, value)
    config = shrink_config(config, num_layers=num_layers)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    whole.save_pretrained(folder)


def eager(config, dtype):
    # grouped products of torch have no float64
    config._experts_implementation = "eager" if dtype == torch.float64 else None
    return config


def read_whole(folder, dtype=torch.float64):
    config = eager(AutoConfig.from_pretrained(folder), dtype)
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()


def make_stages(folder, num_stages, checkpoint=None, *, dtype=torch.float64, **options):
    stages = []
    for stage in range(num_stages):
        config = eager(AutoConfig.from_pretrained(folder), dtype)
        stage_class = class_of_key(stage_key(config))
        options = {**LORA, **options}
        model = stage_class(config, stage=stage, num_stages=num_stages, dtype=dtype, **options)
        fill_stage(model, WeightSource(str(checkpoint or folder), 0, "cpu", dtype), new_rows=None)
        model.frozen()
        stages.append(model.eval())
    return stages


def batches_of(folder):
    generator = torch.Generator().manual_seed(5)
    size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    ids = torch.randint(5, size, (2, 9), generator=generator)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}]


def chain(stages, folder):
    """Return loss and gradients of the trained parameters, by peft's structure."""
    batches = batches_of(folder)
    (loss,) = run_chain(stages, with_facts(stages, batches), loss_fn=loss_of)
    named = [one for stage in stages for one in stage.named_parameters()]
    grads = {}
    for name, parameter in named:
        if parameter.requires_grad:
            path, _, leaf = strip_lora(name).partition(".lora.")
            weight, _, half = leaf.rpartition("lora_")
            grads[path, weight.strip("."), half[0]] = parameter.grad
    return loss.item(), grads


def theirs(model, folder):
    """Return the same of a peft model, without a look at the names in its file."""
    (batch,) = batches_of(folder)
    model.zero_grad()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    loss = loss_of(model(**inputs, use_cache=False).logits, batch)
    loss.backward()
    grads = {}
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        path = name.removeprefix("base_model.model.").replace(".base_layer", "")
        weight = module.parameter_name if isinstance(module, ParamWrapper) else ""
        for half in "AB":
            grads[path, weight, half] = getattr(module, f"lora_{half}")["default"].weight.grad
    return loss.item(), grads


def gap(ours, expected):
    assert ours[1].keys() == expected[1].keys()
    assert all(value.abs().max() > 0 for value in expected[1].values())
    largest = max(value.abs().max() for value in expected[1].values())
    pairs = [(ours[1][name], value) for name, value in expected[1].items()]
    gaps = [(one - other).abs().max() / largest for one, other in pairs]
    return max(float(max(gaps)), abs(ours[0] / expected[0] - 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_peft(family, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    make_whole(family, base)
    stages = shake(make_stages(base, 1, use_rslora=family == "mixtral"))
    save_split_model(stages, None, folder, base_path=str(base))
    named = json.loads((folder / "adapter_config.json").read_text())["target_parameters"]
    assert named and all(".experts." in name for name in named)
    reference = peft.PeftModel.from_pretrained(read_whole(base), folder, is_trainable=True)
    assert gap(chain(stages, base), theirs(reference, base)) < 1e-10
    # the file read by us: on a whole model, and on two stages, as a run that continues
    (inputs,) = ([b["input_ids"] for b in batches_of(base)],)
    logits = reference(inputs[0]).logits
    ours = attach_adapter(read_whole(base), folder)
    torch.testing.assert_close(ours(inputs[0]).logits, logits, rtol=0, atol=1e-10)
    again = make_stages(base, 1 if family != "gpt_oss" else 2, folder)
    for name, weight in [one for stage in again for one in stage.named_parameters()]:
        assert torch.equal(weight, stages[0].get_parameter(name)), name
    merged = reference.merge_and_unload().state_dict()
    for name, weight in merge_lora(stages[0]).state_dict().items():
        torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-10)
