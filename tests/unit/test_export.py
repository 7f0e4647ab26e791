"""Export: one plain folder, checked by what it computes."""

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from pp_models import CausalLMStage
from stageline.checkpoint import plain_folder
from stageline.checkpoint.init import init_split_model
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from stageline.shrink import shrink_config
from stageline.verify.export import ExportError
from tests.helpers.exports import export_alone, export_folder
from tests.helpers.family_configs import family_config
from tests.helpers.tiny_checkpoints import tiny_whole


def saved_run(tmp_path, *, num_loras=0):
    """Save a run of two stages."""
    tiny_whole("llama", tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text('{"of": "base"}')
    stages = []
    for stage in range(2):
        config = AutoConfig.from_pretrained(tmp_path / "base")
        model = CausalLMStage(config, stage=stage, num_stages=2, llm_lora_num=num_loras)
        load_split_model(model, tmp_path / "base", device="cpu", dtype=torch.float32)
        model.frozen()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.full_like(parameter, 0.1 + len(name) / 500))
        stages.append(model)
    return save_split_model(stages, None, tmp_path / "run")


def test_an_adapter_stays_one_or_is_merged(tmp_path):
    run = saved_run(tmp_path, num_loras=1)
    report = export_folder(run, tmp_path / "out", dtype=torch.bfloat16)
    assert report.is_adapter
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert 0.0 < report.verdict.difference < 5e-2
    merged = export_folder(run, tmp_path / "merged", merge=True)
    assert 0.0 < merged.verdict.difference < 1e-5
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    # files that the adapter's folder lacks come from the base
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == '{"of": "base"}'


def test_what_a_family_keeps_in_float32_is_not_rounded(tmp_path):
    """Values and types are those of `from_pretrained` in bfloat16, the biases of routers too."""
    config = shrink_config(family_config("deepseek_v3"), num_layers=2)
    base = AutoModelForCausalLM.from_config(config)
    for name, buffer in base.named_buffers():
        if "bias" in name:
            buffer.normal_()
    base.save_pretrained(tmp_path / "base")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    expected = load_file(tmp_path / "half" / "model.safetensors")
    wide = {name for name, tensor in expected.items() if tensor.dtype == torch.float32}
    assert any("e_score_correction_bias" in name for name in wide) and len(wide) < len(expected)

    def compare(folder):
        found = load_file(folder / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), (
                name
            )

    export_alone(tmp_path / "base", tmp_path / "whole", dtype=torch.bfloat16)
    compare(tmp_path / "whole")
    for num_loras in (0, 1):  # an adapter that adds nothing yet: the sum is the base
        made = CausalLMStage(config, stage=0, num_stages=1, llm_lora_num=num_loras)
        load_split_model(made, tmp_path / "base", device="cpu", dtype=torch.bfloat16)
        made.frozen()
        run = save_split_model([made], None, tmp_path / f"run{num_loras}")
    compare(tmp_path / "run0")
    export_alone(run, tmp_path / "sum", merge=True, dtype=torch.bfloat16)
    compare(tmp_path / "sum")
    base.name_or_path = str(tmp_path / "base")
    targets = peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["mlp.gate", "lm_head"])
    peft.get_peft_model(base, targets).save_pretrained(tmp_path / "peft")
    export_alone(tmp_path / "peft", tmp_path / "adapter", dtype=torch.bfloat16)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    plain = {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}
    assert {tensor.dtype for tensor in plain.values()} == {torch.float32, torch.bfloat16}
    for name, tensor in plain.items():
        own = half.state_dict().get(name, tensor.bfloat16())  # no weight of LoRA is in the base
        assert tensor.dtype == own.dtype and torch.equal(tensor, own), name
    made = CausalLMStage(config, stage=0, num_stages=1, dtype=torch.bfloat16)
    init_split_model(made, seed=0, device="cpu", dtype=torch.bfloat16)
    for name, tensor in made.state_dict().items():
        assert tensor.dtype == half.state_dict()[name].dtype, name


def test_an_export_that_computes_something_else_is_found(tmp_path, monkeypatch):
    run = saved_run(tmp_path, num_loras=1)
    write = plain_folder.write_model

    def write_wrong(model, *args, **kwargs):
        model.model.layers[2].mlp.up_proj.weight.data.mul_(1.5)
        write(model, *args, **kwargs)

    monkeypatch.setattr(plain_folder, "write_model", write_wrong)
    with pytest.raises(ExportError, match="differ from the checkpoint's by"):
        export_folder(run, tmp_path / "out", merge=True)


def test_what_is_refused(tmp_path):
    run = saved_run(tmp_path)
    with pytest.raises(UserError, match="nothing to merge"):
        export_alone(run, tmp_path / "out", merge=True)
    with pytest.raises(UserError, match="exists, and a checkpoint is never"):
        export_folder(run, tmp_path / "base")
    shard = sorted(run.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-3] ^= 4
    shard.write_bytes(content)
    with pytest.raises(UserError, match=shard.name):
        export_folder(run, tmp_path / "out")
