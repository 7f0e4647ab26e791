"""LoRA against `peft`, and the names that files and other subpackages rely on."""

import copy

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from stageline.errors import UserError
from stageline.modules.lora import (
    LoRAWrapper,
    key_map_without_last_lora,
    linear_names,
    lora_stacks,
    merge_lora,
    unwrapped,
    wrap_linear,
)
from stageline.modules.lora_layer import restored_weight
from stageline.shrink import shrink_config
from tests.helpers.family_configs import family_config


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(6, 8)
        self.c_fc = Conv1D(5, 8)
        self.norm = nn.LayerNorm(5)

    def forward(self, x):
        return self.norm(self.c_fc(torch.tanh(self.q_proj(x))))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.join = nn.Linear(5, 6)

    def forward(self, x):
        return self.layers[1](self.join(self.layers[0](x)))


def fill_adapters(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for wrappers in lora_stacks(model).values():
            for wrapper in wrappers:
                for linear in (wrapper.lora.lora_A, wrapper.lora.lora_B):
                    linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator))


def test_names_and_untouched_output():
    plain = Tower()
    x = torch.randn(3, 6)
    expected = plain(x)
    wrapped = wrap_linear(plain, rank=2, alpha=4.0)
    names = {name for name, _ in wrapped.named_parameters()}
    assert "layers.0.q_proj.lora_module.weight" in names
    assert "layers.0.q_proj.lora.lora_A.weight" in names
    assert "layers.1.c_fc.lora.lora_B.weight" in names
    assert "layers.0.norm.weight" in names
    assert len(lora_stacks(wrapped)) == 5
    assert torch.equal(wrapped(x), expected)  # B is zero


def test_outputs_and_gradients_are_those_of_peft():
    torch.manual_seed(0)
    ours = Tower()
    config = peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=["q_proj", "c_fc", "join"])
    theirs = peft.get_peft_model(copy.deepcopy(ours), config)
    wrap_linear(ours, rank=3, alpha=6.0)
    fill_adapters(ours)
    modules = dict(theirs.base_model.model.named_modules())
    with torch.no_grad():
        for name, (wrapper,) in lora_stacks(ours).items():
            modules[name].lora_A["default"].weight.copy_(wrapper.lora.lora_A.weight)
            modules[name].lora_B["default"].weight.copy_(wrapper.lora.lora_B.weight)
    x = torch.randn(4, 6)
    assert torch.equal(ours(x), theirs(x))
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    for name, (wrapper,) in lora_stacks(ours).items():
        for part in ("lora_A", "lora_B"):
            expected = getattr(modules[name], part)["default"].weight.grad
            assert expected.abs().sum() > 0
            assert torch.equal(getattr(wrapper.lora, part).weight.grad, expected)


@pytest.mark.parametrize("start", ["default", "gaussian", "orthogonal"])
def test_starts_are_as_wide_as_those_of_peft(start):
    torch.manual_seed(0)
    ours = wrap_linear(nn.Linear(400, 300), rank=50, alpha=1.0, start=start).lora
    config = peft.LoraConfig(
        r=50, target_modules=["0"], init_lora_weights=True if start == "default" else start
    )
    theirs = peft.get_peft_model(nn.Sequential(nn.Linear(400, 300)), config).base_model.model[0]
    for half in ("lora_A", "lora_B"):
        wanted = getattr(theirs, half)["default"].weight.std().item()
        assert getattr(ours, half).weight.std().item() == pytest.approx(wanted, rel=0.03), half


@pytest.mark.parametrize("use_rslora", [False, True])
def test_what_pissa_took_can_be_given_back(use_rslora):
    linear = nn.Linear(6, 5)
    before = linear.weight.detach().clone()
    wrapper = wrap_linear(linear, rank=2, alpha=7.0, start="pissa", use_rslora=use_rslora)
    assert (linear.weight - before).abs().max() > 0.1
    torch.testing.assert_close(restored_weight(wrapper.lora, linear), before)


def test_merge_keeps_the_outputs():
    model = Tower()
    for _ in range(2):
        wrap_linear(model, rank=2, alpha=4.0)
    fill_adapters(model)
    x = torch.randn(4, 6)
    expected = model(x)
    plain_names = set(Tower().state_dict())
    merged = merge_lora(model)
    assert set(merged.state_dict()) == plain_names
    torch.testing.assert_close(merged(x), expected, rtol=1e-4, atol=1e-5)


def test_a_merge_into_half_precision_is_rounded_once():
    """Merge an adapter so small that a sum in bfloat16 would lose it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64)).to(torch.bfloat16)
    base = model[0].weight.detach().float()
    wrap_linear(model, rank=4, alpha=4.0)
    (stack,) = lora_stacks(model).values()
    with torch.no_grad():
        down, up = stack[-1].lora.lora_A.weight.normal_(std=0.02), stack[-1].lora.lora_B.weight
        up.normal_(std=0.02)
        expected = (base + up.float() @ down.float()).to(torch.bfloat16)
    assert torch.equal(merge_lora(model)[0].weight, expected)


def test_root_linear_is_wrapped_and_merged():
    linear = nn.Linear(3, 2)
    wrapped = wrap_linear(wrap_linear(linear, rank=1, alpha=1.0), rank=1, alpha=1.0)
    assert isinstance(wrapped, LoRAWrapper)
    assert wrapped.lora_module.lora_module is linear
    assert (wrapped.in_features, wrapped.out_features) == (3, 2)
    assert merge_lora(wrapped) is linear


def test_what_is_not_a_linear_layer_is_refused_by_name():
    with pytest.raises(UserError, match=r"Embedding is not one.*--lora.modules_to_save"):
        LoRAWrapper(nn.Embedding(4, 3), rank=2, alpha=4.0)


def test_stacked_names_and_key_map():
    model = Tower()
    for _ in range(2):
        wrap_linear(model, rank=2, alpha=4.0, target=["q_proj"])
    key_map = {here: there for there, here in key_map_without_last_lora(model.state_dict()).items()}
    name = "layers.1.q_proj"
    assert key_map[f"{name}.lora_module.lora_module.weight"] == f"{name}.lora_module.weight"
    assert key_map[f"{name}.lora_module.lora_module.bias"] == f"{name}.lora_module.bias"
    assert key_map[f"{name}.lora_module.lora.lora_A.weight"] == f"{name}.lora.lora_A.weight"
    assert f"{name}.lora.lora_A.weight" not in key_map
    assert key_map["join.weight"] == "join.weight"
    # the map leads to exactly the names of a model that was wrapped once
    once = wrap_linear(Tower(), rank=2, alpha=4.0, target=["q_proj"])
    assert set(key_map.values()) == set(once.state_dict())
    plain = list(Tower().state_dict())
    assert key_map_without_last_lora(plain) == {n: n for n in plain}
    assert key_map_without_last_lora(["lora_module.weight", "lora.lora_B.weight"]) == {
        "weight": "lora_module.weight"
    }


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (["q_proj"], {"t.layers.0.q_proj", "t.layers.1.q_proj"}),
        (["layers.1.q_proj", "join"], {"t.layers.1.q_proj", "t.join"}),
        (["proj", "join"], {"t.join"}),  # endings are of whole words
        ([r".*\.1\.(q_proj|c_fc)"], {"t.layers.1.q_proj", "t.layers.1.c_fc"}),
        (r".*\.0\..*", {"t.layers.0.q_proj", "t.layers.0.c_fc"}),
        (r"t\.(layers\.0\.q|join)", {"t.join"}),  # an expression is for a full name
        ("all-linear", {f"t.layers.{i}.{n}" for i in (0, 1) for n in ("q_proj", "c_fc")}
         | {"t.join"}),
    ],
)  # fmt: skip
def test_targets(target, expected):
    holder = nn.Module()
    holder.t = wrap_linear(Tower(), rank=1, alpha=1.0, target=target, prefix="t")
    assert set(lora_stacks(holder)) == expected


def test_target_of_another_stages_layer_is_no_error():
    model = wrap_linear(Tower(), rank=1, alpha=1.0, target=["layers.7.q_proj"])
    assert lora_stacks(model) == {}


def test_part_of_another_stage_and_skipped_paths():
    empty = nn.Identity()
    assert wrap_linear(empty, rank=1, alpha=1.0, target=["q_proj"]) is empty
    model = wrap_linear(Tower(), rank=1, alpha=1.0, prefix="m", skip=["m.layers"])
    assert set(lora_stacks(model)) == {"join"}
    model = wrap_linear(Tower(), rank=1, alpha=1.0, prefix="m", skip=["m.layers.1", "m.layers.0.q"])
    assert set(lora_stacks(model)) == {"layers.0.q_proj", "layers.0.c_fc", "join"}


def test_attention_that_reads_its_weight_is_left_alone():
    attention = nn.MultiheadAttention(4, 2)
    model = nn.Sequential(attention, nn.Linear(4, 4))
    wrap_linear(model, rank=1, alpha=1.0)
    assert set(lora_stacks(model)) == {"1"}


def test_start_depends_on_seed_and_name_alone():
    def drawn(seed, skip=()):
        torch.manual_seed(torch.randint(1000, ()).item())
        model = wrap_linear(Tower(), rank=2, alpha=1.0, seed=seed, prefix="m", skip=skip)
        return {n: w[0].lora.lora_A.weight for n, w in lora_stacks(model).items()}

    first, second, other = drawn(1), drawn(1, skip=["m.layers.0"]), drawn(2)
    assert set(second) < set(first)
    for name, weight in second.items():
        assert torch.equal(weight, first[name])
        assert not torch.equal(weight, other[name])
    assert not torch.equal(first["layers.0.q_proj"], first["layers.1.q_proj"])


def test_meta_and_dtype_follow_the_layer():
    with torch.device("meta"):
        model = Tower().to(torch.bfloat16)
    wrap_linear(model, rank=2, alpha=1.0)
    for (wrapper,) in lora_stacks(model).values():
        assert wrapper.lora.lora_A.weight.is_meta
        assert wrapper.lora.lora_A.weight.dtype == torch.bfloat16


def test_dropout_acts_in_training_only():
    model = wrap_linear(nn.Linear(64, 4), rank=2, alpha=1.0, dropout=0.5)
    fill_adapters(model)
    x = torch.randn(1, 64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_unwrapped_gives_plain_names_and_puts_back():
    model = wrap_linear(wrap_linear(Tower(), rank=1, alpha=1.0), rank=1, alpha=1.0)
    names = list(model.state_dict())
    with pytest.raises(KeyError), unwrapped(model):
        assert set(model.state_dict()) == set(Tower().state_dict())
        raise KeyError
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("family", "left_out"),  # routers give tuples; a product in groups has another shape
    [("llama4_text", "router"), ("deepseek_v4", "o_a_proj")],
)
def test_linear_layers_that_give_no_rows_get_no_adapter(family, left_out):
    config = shrink_config(family_config(family), num_layers=2)
    whole = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(3, 9)[None]
    expected = whole.eval()(ids, use_cache=False).logits
    names = linear_names(wrap_linear(whole, rank=2))
    assert not any(name.endswith(left_out) for name in names) and len(names) > 4
    assert torch.equal(whole.eval()(ids, use_cache=False).logits, expected)
