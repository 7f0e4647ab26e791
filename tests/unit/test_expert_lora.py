"""LoRA on fused experts, against `peft`'s `target_parameters` on the unsplit model in float64."""

import copy
import json

import peft
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from transformers import AutoConfig, AutoModelForCausalLM

from commands.stages import stage_key
from pp_models import class_of_key
from stageline.checkpoint.adapter import attach_adapter
from stageline.checkpoint.load import fill_stage
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from stageline.modules import expert_weight
from stageline.modules.expert_weight import ExpertWeight, expert_parameters
from stageline.modules.lora import lora_stacks, merge_lora, strip_lora
from stageline.modules.quantised import Quantization, base_bytes, quantise_layers
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.shrink import shrink_config
from stageline.verify.batches import loss_of, run_chain, with_facts
from tests.helpers.family_configs import config_with_experts
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_checkpoints import shake

# layouts [E, out, in] and [E, in, out], with biases, without a gate, with other modules' names
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "gemma4_text")
TARGET = [r".*experts\.[a-z_]*proj", "q_proj", "o_proj", "q_b_proj"]
LORA = {"llm_lora_num": 1, "lora_rank": 3, "lora_alpha": 7.0, "lora_target": TARGET}
LORA |= {"frozen_lm_head": True}


def make_whole(family, folder, *, num_layers=2):
    torch.manual_seed(3)
    config = config_with_experts(family)
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
        fill_stage(model, str(checkpoint or folder), dtype=dtype)
        model.frozen()
        stages.append(model.eval())
    return stages


def batches_of(folder):
    generator = torch.Generator().manual_seed(5)
    size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    ids = torch.randint(5, size, (2, 9), generator=generator)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}]


def chain(stages, folder, **options):
    """Return loss and gradients of the trained parameters, by peft's structure."""
    batches = with_facts(stages, batches_of(folder))
    (loss,) = run_chain(stages, batches, loss_fn=loss_of, **options)
    return loss.item(), by_peft(stages)


def by_peft(stages):
    named = [one for stage in stages for one in stage.named_parameters()]
    grads = {}
    for name, parameter in named:
        if parameter.requires_grad:
            path, _, leaf = strip_lora(name).partition(".lora.")
            weight, _, half = leaf.rpartition("lora_")
            grads[f"{path} {weight.strip('.')} {half[0]}"] = parameter.grad
    return grads


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
            grads[f"{path} {'' if weight == 'weight' else weight} {half}"] = getattr(
                module, f"lora_{half}"
            )["default"].weight.grad
    return loss.item(), grads


def gap(ours, expected):
    assert ours[1].keys() == expected[1].keys()
    assert all(value.abs().max() > 0 for value in expected[1].values())
    largest = max(value.abs().max() for value in expected[1].values())
    pairs = [(ours[1][name], value) for name, value in expected[1].items()]
    gaps = [(one - other).abs().max() / largest for one, other in pairs]
    return max(float(max(gaps)), abs(ours[0] / expected[0] - 1))


def saved_adapter(family, tmp_path, num_stages=1, **options):
    """Return stages with a trained adapter, the folder of their base and that of the adapter."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    make_whole(family, base, num_layers=max(2, num_stages))
    stages = shake(make_stages(base, num_stages, **options))
    save_split_model(stages, None, folder, base_path=str(base))
    return stages, base, folder


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_peft(family, tmp_path):
    stages, base, folder = saved_adapter(family, tmp_path, use_rslora=family == "mixtral")
    named = json.loads((folder / "adapter_config.json").read_text())["target_parameters"]
    assert len([name for name in named if ".experts." in name]) in (2, 4)
    reference = peft.PeftModel.from_pretrained(read_whole(base), folder, is_trainable=True)
    assert gap(chain(stages, base), theirs(reference, base)) < 1e-10
    # the file read by us: on a whole model, and on stages, as a run that continues
    inputs = batches_of(base)[0]["input_ids"]
    logits = reference(inputs).logits
    ours = attach_adapter(read_whole(base), folder)
    torch.testing.assert_close(ours(inputs).logits, logits, rtol=0, atol=1e-10)
    again = make_stages(base, 2 if family == "gpt_oss" else 1, folder)
    for name, weight in [one for stage in again for one in stage.named_parameters()]:
        assert torch.equal(weight, stages[0].get_parameter(name)), name
    merged = reference.merge_and_unload().state_dict()
    for name, weight in merge_lora(stages[0]).state_dict().items():
        torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-10)


def run_rank(rank, base, folder):
    schedule = make_schedule("zbv", num_ranks=2)
    stages = [make_stages(base, 4, folder)[stage].train() for stage in schedule.stages_of(rank)]
    runner = PipelineRunner(stages, device=torch.device("cpu"), schedule=schedule)
    loss = runner.step(
        with_facts(stages, batches_of(base) * 4), loss_fn=lambda *made: loss_of(*made) / 4
    )
    return loss, by_peft(stages)


def test_two_ranks_of_zero_bubble_are_the_whole_model(tmp_path):
    _, base, folder = saved_adapter("gpt_oss", tmp_path, num_stages=4)
    reference = peft.PeftModel.from_pretrained(read_whole(base), folder, is_trainable=True)
    results = run_ranks(run_rank, 2, base, folder)
    grads = results[0][1] | results[1][1]
    loss = sum(loss for loss, _ in results).item()  # kept in float32
    expected = theirs(reference, base)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert gap((expected[0], grads), expected) < 1e-10
    # the two walks of the backward pass in this process, on another number of stages
    stages = make_stages(base, 2, folder)
    assert gap(chain(stages, base, splits_backward=True), expected) < 1e-10


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_grouped_products_of_float32(family, tmp_path):
    """In float32 transformers groups products; their rows take multiples of 16 bytes."""
    _, base, folder = saved_adapter(family, tmp_path)
    whole = read_whole(base, torch.float32)
    assert whole.config._experts_implementation == "grouped_mm"
    reference = peft.PeftModel.from_pretrained(whole, folder, is_trainable=True)
    stages = make_stages(base, 1, folder, dtype=torch.float32)
    assert gap(chain(stages, base), theirs(reference, base)) < 1e-6


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4_text"])
def test_no_pass_sums_a_weight_and_its_adapter(family, tmp_path, monkeypatch):
    """The sum of each expert's weight and adapter would cost more than the pass itself."""
    base = tmp_path / "base"
    make_whole(family, base)
    # rows of 4 numbers are what grouped products take as they are
    (stage,) = make_stages(base, 1, dtype=torch.float32, lora_rank=4)
    monkeypatch.setattr(ExpertWeight, "dense", lambda self: pytest.fail("summed"))
    for way in ("eager", "grouped_mm", "batched_mm"):
        stage.config.get_text_config()._experts_implementation = way
        stage.zero_grad()
        _, grads = chain([stage], base)
        assert sum("expert" in name for name in grads) >= 8


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("int8", False)])
def test_some_matrices_at_once_are_as_one_by_one(kind, double, monkeypatch):
    """On an accelerator a grouped product takes some dequantized matrices, in both passes."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    experts = type("Experts", (torch.nn.Module,), {})()
    experts.up = torch.nn.Parameter(torch.randn(5, 64, 128))
    quantization = Quantization(kind, double=double)
    quantise_layers([experts], quantization, dtype=torch.bfloat16, device="cpu")
    packed = experts.up.base
    assert torch.equal(packed[[3, 1]].dense(), packed.dense()[[3, 1]])
    rows = torch.randn(40, 128, dtype=torch.bfloat16)
    ends = torch.tensor([7, 7, 30, 31, 40], dtype=torch.int32)
    found = []
    for is_accelerator, num_bytes in ((False, 0), (True, 1 << 20), (True, 2 * 64 * 128 * 2)):
        monkeypatch.setattr(expert_weight, "is_accelerator", lambda _, known=is_accelerator: known)
        monkeypatch.setattr(expert_weight, "DENSE_BYTES", num_bytes)
        x = rows.clone().requires_grad_()
        made = torch.nn.functional.grouped_mm(x, experts.up.mT, offs=ends)
        made.sin().sum().backward()
        found.append((made.detach(), x.grad))
    for made, grad in found[1:]:
        torch.testing.assert_close(made, found[0][0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(grad, found[0][1], rtol=2e-2, atol=2e-2)


def test_what_is_said_and_refused(tmp_path):
    base = tmp_path / "base"
    make_whole("qwen3_moe", base)
    for target in (None, ["q_proj", "down_proj"]):
        (stage,) = make_stages(base, 1, lora_target=target)
        assert not any(".experts." in name for name in lora_stacks(stage))
        (note,) = [note for note in stage.start.notes if "get no LoRA" in note]
        assert "experts.down_proj, experts.gate_up_proj" in note
    (stage,) = make_stages(base, 1, lora_target=["all-linear", "experts.down_proj"])
    stacks = lora_stacks(stage)
    assert "model.layers.1.mlp.experts.down_proj" in stacks
    assert "model.layers.1.self_attn.k_proj" in stacks
    (note,) = [note for note in stage.start.notes if "get no LoRA" in note]
    assert "gate_up" in note and "down_proj" not in note
    excluded = {"lora_target": ["q_proj"], "lora_exclude": [r".*\.experts\..*"]}
    (stage,) = make_stages(base, 1, **excluded)
    assert stage.start.notes == []
    for refused in ({"lora_dropout": 0.1}, {"use_dora": True}, {"lora_init": "pissa"}):
        with pytest.raises(UserError, match="does not work with LoRA on experts"):
            make_stages(base, 1, **refused)
    with pytest.raises(UserError, match="experts.gate_up_proj"):
        make_stages(base, 1, lora_target=["gate_up_proj"])


@pytest.mark.parametrize(
    ("family", "kind", "double"),
    [("qwen3_moe", "nf4", True), ("gpt_oss", "nf4", False), ("gpt_oss", "int8", False)],
)
def test_experts_in_few_bits(family, kind, double, tmp_path):
    """A loss and gradients as on the same weights dequantized; bytes as the plan counts them."""
    pytest.importorskip("bitsandbytes")
    _, base, folder = saved_adapter(family, tmp_path)
    (stage,) = make_stages(base, 1, folder, dtype=torch.float32)
    experts = [m for m in stage.modules() if expert_parameters(m)]
    plain = [{leaf: m._parameters[leaf] for leaf in expert_parameters(m)} for m in experts]
    outlines = [copy.deepcopy(m).to("meta") for m in experts]
    quantization = Quantization(kind, double=double)
    for where, held in (("cpu", experts), ("meta", outlines)):
        assert quantise_layers(held, quantization, dtype=torch.float32, device=where) == len(held)
    assert base_bytes(experts) == base_bytes(outlines)
    few = chain([stage], base)
    for module, weights in zip(experts, plain, strict=True):
        for leaf, weight in weights.items():
            dense = vars(module).pop(leaf).dense()
            assert 0 < (dense - weight).abs().max() < 0.2 * weight.abs().max()
            module._parameters[leaf] = torch.nn.Parameter(dense, requires_grad=False)
    stage.zero_grad()
    assert gap(few, chain([stage], base)) < 1e-5
