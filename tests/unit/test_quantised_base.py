"""A quantized base for inference: the estimate equals its bytes in memory, and it answers."""

import sys

import pytest
import torch
import transformers
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.base import get_keys_to_not_convert

from models import builders, devices
from stageline.errors import UserError
from stageline.inference.model_cutter import Wanted, quantization_settings
from stageline.modules.quantised import (
    Quantization,
    _stored,
    base_bytes,
    plain_shape,
    quantise_layers,
)
from stageline.planner.estimate import Load, Stored, measure_model, model_on_meta, stored_of
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

KINDS = ("nf4", "int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=320,
    )  # fmt: skip
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def lying_bytes(module):
    """Return the bytes that a loaded module holds, with the scales of quantized layers."""
    held = {}
    for child in module.modules():
        own = [*_stored(child), *child._buffers.values()]
        state = getattr(child._parameters.get("weight"), "quant_state", None)
        own += [] if state is None else [state.code]
        held |= {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in own}
    return sum(held.values())


def load(path, **options):
    return builders.auto(str(path), device="cpu", dtype=torch.bfloat16, **options)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_stated_bytes_are_those_of_a_loaded_base(folder, kind):
    pytest.importorskip("bitsandbytes")
    meta = model_on_meta(transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    plain = measure_model(meta, Load(1, 8)).layers[0].weights
    meta.config.quantization_config = quantization_settings(kind)
    stated = measure_model(meta, Load(1, 8))
    model = load(folder, quantization=kind)
    real = [lying_bytes(layer) for layer in model.model.layers]
    assert [layer.weights for layer in stated.layers] == real
    assert max(real) < 0.6 * plain
    assert model.lm_head.weight.dtype == torch.bfloat16, "the head stays as it is"
    assert stated.ends.weights >= lying_bytes(model.lm_head) + lying_bytes(model.model.embed_tokens)


@pytest.mark.parametrize(("kind", "double"), [("nf4", False), ("nf4", True), ("int8", False)])
def test_a_plan_counts_scales_as_the_library_keeps_them(kind, double):
    pytest.importorskip("bitsandbytes")
    quantization = Quantization(kind, double=double)
    held = []
    for device in ("meta", "cpu"):
        layer = torch.nn.Sequential(torch.nn.Linear(256, 320, bias=False, device=device))
        quantise_layers([layer], quantization, dtype=torch.float32, device=device)
        held.append(base_bytes([layer]))
        assert sum(plain_shape(p).numel() for p in layer.parameters()) == 256 * 320, (
            "no bytes, and no scales"
        )
    assert held[0] == held[1] > 256 * 320 * (4 if kind == "nf4" else 8) / 8


def test_a_folder_that_was_saved_in_few_bits_is_taken_as_such(folder, tmp_path):
    kind = "nf4"
    pytest.importorskip("bitsandbytes")
    model = load(folder, quantization=kind)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    again = load(tmp_path)
    assert type(again.model.layers[0].mlp.up_proj) is type(model.model.layers[0].mlp.up_proj)
    assert type(again.model.layers[0].mlp.up_proj) is not torch.nn.Linear
    found = stored_of(again.config)
    assert found.bits == (4 if kind == "nf4" else 8)
    ids = torch.tensor([[9, 10, 11, 12]])
    answers = [
        one.generate(ids, max_new_tokens=5, do_sample=False)[0, 4:] for one in (model, again)
    ]
    assert answers[0].tolist() == answers[1].tolist()
    plan = devices.plan
    wanted = {"visual_gpu_ratio": None, "num_devices": None, "device": "auto"}
    placement = Wanted(memory=(2**30,) * 2, load=Load(1, 8))
    assert "0,2" in plan(str(tmp_path), dtype=torch.bfloat16, placement=placement, **wanted)


def test_what_cannot_take_adapters_up_is_told(folder, monkeypatch):
    with pytest.raises(UserError, match="merged"):
        builders.auto(str(folder), quantization="nf4", adapter_weights=[0.5])
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match="setup.sh quantization, or pip install bitsandbytes"):
        builders.auto(str(folder), device="cpu", quantization="nf4")


@pytest.mark.parametrize(
    ("settings", "stated"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Stored(4, 128, 2.5)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, Stored(4, 64, 2.5)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Stored(8, 16384, experts=True)),
        ({"quant_method": "one that comes later"}, None),
    ],
)
def test_other_kinds_are_read_from_the_config(settings, stated):
    assert stored_of(transformers.LlamaConfig(quantization_config=settings)) == stated


def test_bytes_of_experts_in_few_bits():
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    meta = model_on_meta(tiny_config("qwen3_moe", moe_intermediate_size=16), dtype=torch.bfloat16)
    plain = measure_model(meta, Load(1, 8)).layers[0].weights
    meta.config.quantization_config = settings
    stated = [layer.weights for layer in measure_model(meta, Load(1, 8)).layers]
    told = transformers.FineGrainedFP8Config(weight_block_size=(8, 8))
    kept = get_keys_to_not_convert(meta)
    replace_with_fp8_linear(meta, kept, quantization_config=told, pre_quantized=True)
    assert stated == [
        sum(t.nbytes for t in layer.state_dict().values()) for layer in meta.model.layers
    ]
    assert stated[0] < 0.7 * plain


def test_bytes_of_a_matrix():
    # 16 x 128 weights: 1024 bytes, 16 groups with a scale of 2 bytes and a zero point of 4 bits
    assert Stored(4, 128, 2.5).weight_bytes((16, 128)) == 1024 + 40
    assert Stored(8).weight_bytes((16, 128)) == 2048 + 16 * 4
    assert Stored(4, 64, table_bytes=64).weight_bytes((16, 128)) == 1024 + 32 * 4 + 64
