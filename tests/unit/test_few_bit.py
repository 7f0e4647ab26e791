"""Few-bit checkpoints: stages equal transformers' dequantized model, and save full weights."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig

from pp_models import CausalLMStage
from stageline.checkpoint.few_bit import dequantizing_settings, released
from stageline.checkpoint.plain_folder import export_folder
from stageline.checkpoint.plain_model import load_plain, load_whole
from stageline.checkpoint.save import save_split_model
from stageline.errors import CheckpointError, NonFiniteError, UserError
from stageline.model_folder import load_config
from stageline.modules.lora import is_lora_name, strip_lora
from stageline.modules.lora_layer import name_seed
from stageline.modules.methods import Methods
from stageline.modules.quantised import base_bytes
from stageline.verify.batches import loss_of, run_chain, with_facts
from tests.helpers.chain import chained_logits
from tests.helpers.few_bit import write_compressed, write_fp8, write_mxfp4, write_packed
from tests.helpers.tiny_checkpoints import load_stages, tiny_whole
from tests.helpers.tiny_models import TEXT

IDS = torch.arange(24).view(2, 12) % 40 + 3
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def few_bit_folder(kind, folder):
    """Write a folder with a few-bit model of 2 layers; the settings are in its config.json."""
    if kind == "fp8":
        fields = {"moe_intermediate_size": 16, "num_hidden_layers": 2, "attention_bias": True}
        tiny_whole("qwen3_moe", folder, dtype=torch.bfloat16, **fields)
        write_fp8(folder)
        return
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 4}
    config = GptOssConfig(**TEXT | sizes | {"num_hidden_layers": 2, "num_experts_per_tok": 2})
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole.save_pretrained(folder)
    write_mxfp4(folder)


def dequantized(folder, dtype=torch.bfloat16):
    """Load what transformers itself makes of a few-bit folder."""
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["dequantize"] = True
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_stages_are_the_dequantized_model(kind, tmp_path):
    few_bit_folder(kind, tmp_path / "base")
    whole = dequantized(tmp_path / "base")
    expected = whole.state_dict()
    with torch.no_grad():
        logits = whole(**BATCH).logits
    for num_stages in (1, 2):
        stages = load_stages(tmp_path / "base", num_stages=num_stages, dtype=torch.bfloat16)
        held = held_by(stages)
        assert held.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in held.items())
        with torch.no_grad():
            assert torch.equal(chained_logits([one.eval() for one in stages], BATCH), logits)
    first, last = (stage.keys_read for stage in stages)
    assert not first & last
    assert any("scale" in name for name in first)
    assert not any(".layers.1." in name for name in first)
    assert f"saved as {kind}, dequantized to bfloat16" in stages[0].cast_note

    # checkpoints and exports have full weights under the names of the base
    save_split_model(stages, None, tmp_path / "saved")
    export_folder(tmp_path / "base", tmp_path / "exported")
    for folder in (tmp_path / "saved", tmp_path / "exported"):
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert all(torch.equal(one, expected[name]) for name, one in plain.state_dict().items())
        written = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
        assert not any("scale" in name or "blocks" in name for name in written)


def test_full_weights_next_to_fp8_take_the_dtype_of_the_run(tmp_path):
    few_bit_folder("fp8", tmp_path)
    expected = dequantized(tmp_path, torch.float32).state_dict()
    assert {one.dtype for one in expected.values()} == {torch.bfloat16, torch.float32}
    for name, tensor in load_stages(tmp_path, num_stages=1)[0].state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name].float())
    config = load_config(tmp_path, keeps_bits=True)
    options = {"dtype": torch.float32, "keeps_bits": True}  # without a GPU none are kept
    for plain in (
        load_plain(tmp_path, dtype=torch.float32),
        load_whole(AutoModelForCausalLM, tmp_path, config, **options),
    ):
        assert {one.dtype for one in plain.parameters()} == {torch.float32}


def held_by(stages):
    return {name: one for stage in stages for name, one in stage.state_dict().items()}


LORA = {"llm_lora_num": 1, "lora_rank": 2, "frozen_lm_head": True}
LORA["lora_target"] = [r".*experts\.[a-z_]*proj", "q_proj", "o_proj"]


def trained(folder, num_stages, dtype, **options):
    """Return stages with adapters, the loss of a batch, and the adapters' gradients."""
    stages = load_stages(folder, num_stages=num_stages, dtype=dtype, **LORA, **options)
    for stage in stages:
        stage.frozen()
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:  # B starts at zero, and A would get no gradient
                generator = torch.Generator().manual_seed(name_seed(0, name))
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    batches = with_facts(stages, [{**BATCH, "labels": IDS}])
    (loss,) = run_chain(stages, batches, loss_fn=loss_of)
    named = [one for stage in stages for one in stage.named_parameters()]
    return stages, loss, {n: p.grad for n, p in named if p.requires_grad}


@pytest.mark.parametrize(("kind", "dtype"), [("fp8", torch.bfloat16), ("mxfp4", torch.float32)])
def test_kept_bits_train_adapters_to_the_same_bits(kind, dtype, tmp_path):
    few_bit_folder(kind, tmp_path)
    methods = Methods(quantization=released(tmp_path))
    _, loss, grads = trained(tmp_path, 1, dtype)
    assert all(grad.abs().max() > 0 for grad in grads.values())
    for num_stages in (1, 2):
        stages, kept_loss, kept_grads = trained(tmp_path, num_stages, dtype, methods=methods)
        assert torch.equal(kept_loss, loss)
        assert kept_grads.keys() == grads.keys()
        assert all(torch.equal(grad, grads[name]) for name, grad in kept_grads.items())
        held = {name: one for stage in stages for name, one in stage.named_parameters()}
        bits = {strip_lora(name) for name, one in held.items() if one.element_size() == 1}
        ends = ("experts.gate_up_proj", "experts.down_proj")
        ends = ends if kind == "mxfp4" else (*ends, "proj.weight")
        full = {strip_lora(name) for name in held if not is_lora_name(name)}
        assert bits == {name for name in full if name.endswith(ends)}
        assert f"saved as {kind}, kept" in stages[0].cast_note
    save_split_model(stages, None, tmp_path / "saved")
    written = {n for file in (tmp_path / "saved").glob("*.safetensors") for n in load_file(file)}
    assert written and all("lora_" in name for name in written)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_kept_bits_take_what_is_planned(kind, tmp_path):
    few_bit_folder(kind, tmp_path)
    options = {**LORA, "methods": {"quantization": {"kind": "released"}}, "dtype": torch.bfloat16}
    paths = {"config_path": str(tmp_path), "processor_path": None, "is_piece": True}
    taken = []
    for device, checkpoint in (("meta", None), ("cpu", None), ("cpu", str(tmp_path))):
        paths |= {"checkpoint_path": checkpoint, "device": device}
        stage = CausalLMStage.build(**paths, **options, stage=0, num_stages=1)[0]
        taken.append(base_bytes([layer for _, layer in stage.layer_list()]))
    assert taken[0] == pytest.approx(taken[2], rel=0.05)
    assert taken[0] == taken[1]
    plain = load_stages(tmp_path, num_stages=1, dtype=torch.bfloat16, **LORA)[0]
    full = base_bytes([layer for _, layer in plain.layer_list()])
    assert taken[2] < (0.6 if kind == "fp8" else 0.7) * full


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (None, "not quantized"),
        ({"quant_method": "gptq", "bits": 4}, "quantized by gptq"),
        ({"quant_method": "fp8", "weight_block_size": None}, "quantized by fp8"),
    ],
)
def test_what_cannot_be_kept_is_refused(settings, told, tmp_path):
    config = {"quantization_config": settings} if settings else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{told}. Drop"):
        released(tmp_path)


def test_a_scale_that_is_not_finite_is_refused(tmp_path):
    few_bit_folder("fp8", tmp_path)
    file, name = next(
        (file, name)
        for file in tmp_path.glob("*.safetensors")
        for name in load_file(file)
        if name.endswith("down_proj.weight_scale_inv")
    )
    tensors = load_file(file)
    tensors[name][0, 0] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"experts\..*down_proj \("):
        load_stages(tmp_path, methods=Methods(quantization=released(tmp_path)), **LORA)


def test_scales_that_nobody_reads_are_refused(tmp_path):
    """Without its settings the bits of a folder would be taken for weights."""
    few_bit_folder("fp8", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="weight_scale_inv"):
        load_stages(tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize(("method", "bits"), [("gptq", 8), ("awq", 4)])
def test_packed_integers_are_the_weights_that_they_stand_for(method, bits, tmp_path):
    """transformers cannot dequantize these: weights are compared with the definition."""
    fields = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    full = tiny_whole("qwen3_moe", tmp_path, dtype=torch.bfloat16, **fields).state_dict()
    written = write_packed(tmp_path, method, bits=bits)
    held = held_by(load_stages(tmp_path, dtype=torch.bfloat16))
    assert held.keys() == full.keys()
    for name, tensor in held.items():
        path, _, leaf = name.rpartition(".")
        expected = written.get(name, full[name])
        if "experts" in path:
            leaves = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
            parts = [
                [written[f"{path}.{index}.{one}.weight"] for one in leaves] for index in range(4)
            ]
            expected = torch.stack([torch.cat(some) for some in parts])
        assert torch.equal(tensor, expected.bfloat16()), name
        assert (tensor - full[name]).abs().max() < 2**-bits
    plain = load_plain(tmp_path)
    assert all(torch.equal(one, held[name]) for name, one in plain.state_dict().items())
    assert plain.dtype == torch.bfloat16 and not hasattr(plain.config, "quantization_config")


def test_bitsandbytes_folders_are_dequantized_once_they_are_read(tmp_path):
    bits = 4
    pytest.importorskip("bitsandbytes")
    fields = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    tiny_whole("llama", tmp_path / "full", dtype=torch.bfloat16, **fields)
    settings = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    options = {"dtype": torch.bfloat16, "quantization_config": settings}
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "full", **options)
    made.save_pretrained(tmp_path / "base")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    expected = whole.dequantize(torch.bfloat16).state_dict()
    held = held_by(load_stages(tmp_path / "base", dtype=torch.bfloat16))
    assert held.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in held.items())


@pytest.mark.parametrize("kind", ["int4", "fp8", "nvfp4"])
def test_compressed_tensors(kind, tmp_path):
    pytest.importorskip("compressed_tensors")
    fields = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    full = tiny_whole("llama", tmp_path, dtype=torch.bfloat16, **fields).state_dict()
    write_compressed(tmp_path, kind)
    expected = dequantized(tmp_path).state_dict()
    held = held_by(load_stages(tmp_path, dtype=torch.bfloat16))
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name])
        assert (tensor - full[name]).abs().max() < 0.1


def test_what_transformers_cannot_dequantize_is_refused_by_name(tmp_path):
    method = "hqq"
    settings = {"quantization_config": {"quant_method": method, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f"quantized by {method}.*fp8.*mxfp4"):
        dequantizing_settings(tmp_path, [])


def test_scales_of_experts_that_transformers_ignores_are_refused(tmp_path):
    leaf = "weight_global_scale"
    settings = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert dequantizing_settings(tmp_path, [f"model.layers.0.mlp.up_proj.{leaf}"])
    with pytest.raises(UserError, match=f"experts.0.up_proj.{leaf}.*ignores"):
        dequantizing_settings(tmp_path, [f"model.layers.0.mlp.experts.0.up_proj.{leaf}"])
