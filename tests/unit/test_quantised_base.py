"""LoRA above a base of few bits; the unsplit model quantised by transformers, with peft, judges."""

import json
import sys
import weakref

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from loss_fn import sft
from pp_models import CausalLMStage, VisionLanguageStage
from pp_models.filling import Source, fill_stage
from stageline.checkpoint.export import export_folder
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from stageline.modules import quantised
from stageline.modules.lora import lora_stacks, merge_lora
from stageline.modules.methods import Methods
from stageline.modules.new_rows import NewRows
from stageline.modules.quantised import Quantization, base_bytes, is_quantised
from stageline.testing.chain import evaluate_chain, run_chain
from stageline.testing.tiny_batches import count_targets, tiny_micro_batches
from stageline.testing.tiny_checkpoints import tiny_whole
from stageline.testing.tiny_models import tiny_config

KINDS = ("nf4", "int8", "torchao_int8", "torchao_int4")
BITS = {"nf4": 4, "int8": 8, "torchao_int8": 8, "torchao_int4": 4}
LORA = {"llm_lora_num": 1, "lora_rank": 4, "lora_target": ["q_proj", "down_proj"]}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    return save_model(path, "llama", **SIZES)


def save_model(path, family, **sizes):
    torch.manual_seed(3)
    config = tiny_config(family, **sizes)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole.save_pretrained(path)
    return path


def need(kind):
    package = "torchao" if kind.startswith("torchao") else "bitsandbytes"
    pytest.importorskip(package)


def library_config(kind):
    if kind == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_use_double_quant=True,
        )
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    if kind == "torchao_int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


def make_stages(folder, kind, num_stages, *, dtype=torch.float32, new_rows=None, **options):
    quantization = Quantization(kind, double=kind == "nf4") if kind else None
    stages = []
    for stage in range(num_stages):
        model = CausalLMStage(
            AutoConfig.from_pretrained(folder),
            stage=stage,
            num_stages=num_stages,
            dtype=dtype,
            methods=Methods(quantization=quantization),
            **{**LORA, **options},
        )
        fill_stage(model, Source(str(folder), 0, "cpu", dtype), new_rows=new_rows)
        stages.append(shake(model))
    return stages


@torch.no_grad()
def shake(model):
    """LoRA's second matrix starts at zero, which hides mistakes."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.dtype) * 0.05)
    return model


def train(stages, batches, **how):
    count = count_targets(batches)
    loss_fn = {"loss_fn": lambda out, b: sft(out, b, num_targets=count)}
    losses = run_chain(stages, batches, **loss_fn, **how)
    named = [item for stage in stages for item in stage.named_parameters()]
    return losses, {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_library(folder, kind, tmp_path):
    need(kind)
    batches = tiny_micro_batches("llama", lengths=(14, 11))
    stages = make_stages(folder, kind, 2)
    losses, grads = train(stages, batches)
    assert all(".lora.lora_" in name for name in grads) and len(grads) == 2 * 2 * 4
    save_split_model(stages, None, tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(folder.resolve())
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert not [name for name in files if name.startswith("model")]  # no base in it

    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=library_config(kind), dtype=torch.float32, device_map="cpu"
    )
    whole = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).train()
    count = torch.tensor(float(count_targets(batches)))
    for batch, own in zip(batches, losses, strict=True):
        loss = whole(**batch, num_items_in_batch=count, use_cache=False).loss
        torch.testing.assert_close(own, loss.detach(), rtol=1e-5, atol=1e-5)
        loss.backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in whole.named_parameters()
        if p.grad is not None
    }
    own = {name.replace(".lora.lora_", ".lora_"): grad for name, grad in grads.items()}
    assert own.keys() == expected.keys()
    for name, grad in own.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_gives_the_same_bits(folder, kind, dtype):
    need(kind)
    batches = tiny_micro_batches("llama", lengths=(14, 11))
    losses, grads = train(make_stages(folder, kind, 1, dtype=dtype), batches)
    assert all(grad.abs().max() > 0 for grad in grads.values())
    for num_stages in (2, 4):  # four with input gradients first, as zero-bubble schedules do
        stages = make_stages(folder, kind, num_stages, dtype=dtype)
        own_losses, own = train(stages, batches, splits_backward=num_stages == 4)
        assert all(map(torch.equal, own_losses, losses))
        assert own.keys() == grads.keys()
        assert not [name for name in own if not torch.equal(own[name], grads[name])]
    # an evaluation between steps leaves the weights as they are
    count = count_targets(batches)
    loss_of = {"loss_fn": lambda out, b: sft(out, b, num_targets=count)}
    for stage in stages:
        stage.eval()
    evaluate_chain(stages, batches, **loss_of)
    for stage in stages:
        stage.train().zero_grad()
    again, _ = train(stages, batches)
    assert all(map(torch.equal, again, losses))


def layers_of(stages):
    return [layer for stage in stages for i, layer in stage.layer_list() if i in stage.layers]


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_takes_as_many_bytes_as_its_bits(folder, kind):
    need(kind)
    plain = base_bytes(layers_of(make_stages(folder, None, 2, dtype=torch.bfloat16)))
    stages = make_stages(folder, kind, 2, dtype=torch.bfloat16)
    ideal = plain * BITS[kind] / 16
    found = base_bytes(layers_of(stages))
    # scales come on top: one for 32 weights at most, in 16 bits
    assert ideal < found <= ideal * (1 + 16 / 32 / BITS[kind]) + 40 * 64
    assert all("MiB instead of" in note for stage in stages for note in stage.notes)
    counted = sum(p.untyped_storage().nbytes() for s in stages for p in layers_parameters(s))
    assert ideal <= counted < plain * 0.75


def layers_parameters(stage):
    return [
        parameter
        for index, layer in stage.layer_list()
        if index in stage.layers
        for module in layer.modules()
        if is_quantised(module)
        for parameter in module.parameters(recurse=False)
    ]


def test_one_layer_at_a_time_exists_twice(folder, monkeypatch):
    """When a layer's turn comes, the float weights of those before it are gone."""
    need("torchao_int8")
    make, alive = quantised._MAKERS["torchao_int8"], []
    stage = make_stages(folder, None, 1)[0]
    layers = layers_of([stage])
    floats = [
        [weakref.ref(one.weight) for one in layer.modules() if hasattr(one, "lora_module")]
        for layer in layers
    ]

    def watched(linear, *args, **kwargs):
        alive.append([any(ref() is not None for ref in refs) for refs in floats])
        return make(linear, *args, **kwargs)

    monkeypatch.setitem(quantised._MAKERS, "torchao_int8", watched)
    quantised.quantise_layers(
        layers, Quantization("torchao_int8"), dtype=torch.float32, device="cpu"
    )
    per_layer = len(alive) // 4
    turns = [alive[index * per_layer] for index in range(4)]
    assert turns == [[later >= own for later in range(4)] for own in range(4)]


def test_what_is_left_as_it_is(tmp_path):
    need("torchao_int8")
    save_model(tmp_path, "qwen3_moe", hidden_size=64)
    stages = make_stages(tmp_path, "torchao_int8", 2, lora_target=["q_proj"])
    names = {
        name.replace(".lora_module", "")
        for stage in stages
        for name, module in stage.named_modules()
        if is_quantised(module)
    }
    leaves = {name.rpartition(".")[2] for name in names}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj"}  # no expert, router, head
    assert len(names) == 4 * 4
    trained = {n for s in stages for n, p in s.named_parameters() if p.requires_grad}
    assert trained and all(".lora.lora_" in name for name in trained)


def test_a_vision_tower_and_its_projector_stay_as_they_are(tmp_path):
    need("torchao_int8")
    tiny_whole("internvl", tmp_path)
    for stage in range(2):
        model = VisionLanguageStage(
            AutoConfig.from_pretrained(tmp_path),
            stage=stage,
            num_stages=2,
            methods=Methods(quantization=Quantization("torchao_int8")),
            llm_lora_num=1,
        )
        fill_stage(model, Source(str(tmp_path), 0, "cpu", torch.float32), new_rows=None)
        names = [name for name, module in model.named_modules() if is_quantised(module)]
        assert len(names) == 2 * 7 and all("language_model.layers." in name for name in names)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert trained and all(".lora.lora_" in name for name in trained)


def test_a_model_without_plain_linear_layers_is_refused(tmp_path):
    tiny_whole("gpt2", tmp_path)
    with pytest.raises(UserError, match="no plain linear layer"):
        make_stages(tmp_path, "torchao_int8", 1, lora_target=None)


def test_a_run_goes_on_above_the_same_base(folder, tmp_path):
    need("nf4")
    batches = tiny_micro_batches("llama", lengths=(14,))
    stages = make_stages(folder, "nf4", 2)
    losses, _ = train(stages, batches)
    save_split_model(stages, None, tmp_path / "adapter")
    again = []
    for stage in range(4):
        model = CausalLMStage(
            AutoConfig.from_pretrained(folder),
            stage=stage,
            num_stages=4,
            methods=Methods(quantization=Quantization("nf4", double=True)),
            **LORA,
        )
        fill_stage(model, Source(str(tmp_path / "adapter"), 0, "cpu", torch.float32), new_rows=None)
        again.append(model)
    found, _ = train(again, batches)
    assert torch.equal(found[0], losses[0])


def test_rows_of_new_tokens_train_above_it(folder):
    need("int8")
    rows = NewRows((40,), ((9, 10),), frozenset({40}), train_alone=True)
    stage = make_stages(folder, "int8", 1, llm_lora_num=0, lora_target=None, new_rows=rows)[0]
    trained = [name for name, p in stage.named_parameters() if p.requires_grad]
    assert trained == ["model.embed_tokens.new_rows.weight", "lm_head.new_rows.weight"]


def test_weights_on_meta_are_counted_by_their_bits(folder):
    """What the planner sees; bitsandbytes is not asked."""
    model = CausalLMStage(
        AutoConfig.from_pretrained(folder),
        stage=0,
        num_stages=1,
        dtype=torch.bfloat16,
        methods=Methods(quantization=Quantization("nf4")),
        **LORA,
    )
    whole = base_bytes(layers_of([model]))
    fill_stage(model, None, new_rows=None)
    assert base_bytes(layers_of([model])) == whole / 4
    assert all(p.is_meta for p in model.parameters())


def test_a_merge_is_refused(folder):
    need("torchao_int4")
    stage = make_stages(folder, "torchao_int4", 1)[0]
    assert lora_stacks(stage)
    with pytest.raises(UserError, match="quantised base"):
        merge_lora(stage)


def test_an_export_adds_the_adapter_to_the_whole_base(folder, tmp_path):
    need("torchao_int8")
    run = tmp_path / "run"
    stages = make_stages(folder, "torchao_int8", 2)
    save_split_model(stages, None, run / "checkpoints" / "step-1")
    (run / "config.yaml").write_text("quantization: torchao_int8\n")
    report = export_folder(run / "checkpoints" / "step-1", tmp_path / "merged", merge=True)
    assert any("kept as torchao_int8" in note for note in report.notes)
    batch = tiny_micro_batches("llama", lengths=(14,))[0]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found = merged(**inputs).logits
        hidden = batch["input_ids"]
        for stage in stages:
            hidden = stage(hidden, **inputs)
    assert 0 < (found - hidden).abs().max() < 0.1 * hidden.abs().max()


def test_a_missing_package_is_named(folder, monkeypatch):
    for name in ("bitsandbytes", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install bitsandbytes"):
        make_stages(folder, "nf4", 1)
    with pytest.raises(UserError, match="pip install torchao"):
        make_stages(folder, "torchao_int8", 1)
