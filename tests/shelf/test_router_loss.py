"""The router loss of mixtures of experts over stages in one process, against the unsplit model.

The reference is plain transformers. Equal means to the last bit: sums and casts are those of
transformers, in the same order.
"""

import copy
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from pp_models import CausalLMStage, VisionLanguageStage
from register import train_model_register
from stageline.errors import UserError
from stageline.modules.lora import wrap_linear
from stageline.stages.packing import RouterLoss
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

COEFFICIENT = 0.5  # far above what is usual, so that the loss weighs in every gradient
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
_SHARED = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    **ROUTED,
}
GENERIC = {  # no key of their own, served by causal_lm
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 32}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "logits_scaling": 2.0}),
}


def make_config(family, **overrides):
    if family in GENERIC:
        name, own = GENERIC[family]
        return getattr(transformers, name)(**{**_SHARED, **own, **overrides})
    return tiny_config(family, **{**ROUTED, **overrides})


def build_whole(config, dtype=torch.float32):
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    with torch.no_grad():  # routers that start near zero choose at random
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return whole.train()


def build_stages(config, whole, num_stages, dtype=torch.float32, **options):
    weights = whole.state_dict()
    stages = []
    for stage in range(num_stages):
        model = CausalLMStage(
            copy.deepcopy(config), stage=stage, num_stages=num_stages, dtype=dtype, **options
        )
        model.to_empty(device="cpu")
        model.load_state_dict({name: weights[name].clone() for name in model.state_dict()})
        restore_buffers(model, whole)
        model.frozen()
        stages.append(model.train())
    return stages


def restore_buffers(model, whole):
    values = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def chain(stages, batch, loss_of):
    """Forward and backward with a cut at each border, as between processes."""
    received = (batch["input_ids"],)
    borders = []
    for stage in stages:
        output = stage(*received, **batch)
        if stage.is_last:
            break
        metas = stage.get_example_output(*batch["input_ids"].shape)
        assert [(t.shape, t.dtype) for t in output] == [(t.shape, t.dtype) for t in metas]
        received = tuple(tensor.detach().requires_grad_() for tensor in output)
        borders.append((output, received))
    loss_of(*output).backward()
    for sent, received in reversed(borders):
        # a process sends zeros if no gradient comes back
        grads = [torch.zeros_like(r) if r.grad is None else r.grad for r in received]
        pairs = [(t, g) for t, g in zip(sent, grads, strict=True) if t.requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True))
    return output


def gradients(*models):
    return {
        name: parameter.grad
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def token_loss(logits, labels):
    logits = logits[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")


def check(config, num_stages, *, dtype=torch.float32, drop=(), prepare=None, **options):
    """Two micro-batches of different lengths, with padding, through the whole and the stages."""
    whole = build_whole(config, dtype)
    stages = build_stages(config, whole, num_stages, dtype, **options)
    if prepare is not None:
        prepare(whole, stages)
    batches = tiny_micro_batches("mixtral", lengths=(14, 11))
    for batch in batches:
        labels = batch.pop("labels")
        inputs = {name: value for name, value in batch.items() if name not in drop}
        expected = whole(**inputs, output_router_logits=True, use_cache=False)
        wanted = expected.aux_loss * COEFFICIENT
        (token_loss(expected.logits, labels) / 30 + wanted / 2).backward()
        logits, extra_loss = chain(
            stages,
            inputs,
            lambda logits, extra: token_loss(logits, labels) / 30 + extra / 2,  # noqa: B023
        )
        assert torch.equal(logits, expected.logits)
        assert extra_loss.shape == () and torch.equal(extra_loss, wanted)
    ours, theirs = gradients(*stages), gradients(whole)
    assert set(ours) == set(theirs)
    for name, grad in ours.items():
        assert torch.equal(grad, theirs[name]), f"{name}: {(grad - theirs[name]).abs().max()}"
    return whole, stages


@pytest.mark.parametrize(
    ("family", "num_stages"),
    [("mixtral", 1), ("mixtral", 4), ("qwen3_moe", 2), ("gpt_oss", 2), ("granitemoe", 4)],
)
def test_stages_equal_the_whole(family, num_stages):
    config = make_config(family)
    recorded = getattr(transformers, type(config).__name__.replace("Config", "PreTrainedModel"))
    if "router_logits" not in (recorded._can_record_outputs or {}):
        pytest.skip("this version of transformers does not record the routers of this model")
    check(config, num_stages)


def test_without_a_mask_every_token_counts():
    check(make_config("qwen3_moe"), 2, drop=("attention_mask",))


def test_statistics_are_float32_beside_a_bf16_model():
    _, stages = check(make_config("mixtral"), 3, dtype=torch.bfloat16)
    hidden, statistics = stages[0].get_example_output(2, 5)
    assert hidden.dtype == torch.bfloat16 and statistics.dtype == torch.float32
    assert statistics.shape == (2 * 4 + 1,)


@pytest.mark.parametrize("dense", [[1, 2], [0, 1, 3]])
def test_stages_without_experts_hand_the_statistics_on(dense):
    check(make_config("qwen3_moe", mlp_only_layers=dense), 4)


def test_checkpointing_does_not_count_twice():
    calls = []

    def prepare(whole, stages):
        for stage in stages:
            stage.enable_gradient_checkpointing()
        router = stages[0].get_submodule("model.layers.0.mlp.gate")
        router.register_forward_hook(lambda *_: calls.append(1))

    check(make_config("mixtral"), 2, prepare=prepare)
    assert len(calls) == 4, "each of two micro-batches is computed once more"


def adapt(config, num_stages):
    """The whole model and its stages with the same LoRA on the attention, all else frozen."""
    whole = build_whole(config)
    options = {"rank": 2, "alpha": 4.0, "target": ["q_proj", "v_proj"]}
    plain = copy.deepcopy(whole)
    whole.requires_grad_(False)
    wrap_linear(whole.model, prefix="model", **options)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if ".lora." in name:
                parameter.requires_grad_().normal_(std=0.1)
    lora = {f"lora_{name}": value for name, value in options.items()}
    stages = [
        CausalLMStage(
            copy.deepcopy(config),
            stage=stage,
            num_stages=num_stages,
            llm_lora_num=1,
            frozen_lm_head=True,
            **lora,
        )
        for stage in range(num_stages)
    ]
    weights = whole.state_dict()
    for stage in stages:
        stage.to_empty(device="cpu")
        stage.load_state_dict({name: weights[name].clone() for name in stage.state_dict()})
        restore_buffers(stage, plain)
        stage.frozen()
        stage.train()
    return whole, stages


def test_the_loss_of_frozen_routers_reaches_adapters():
    whole, stages = adapt(make_config("mixtral"), 2)
    assert not any(p.requires_grad for n, p in whole.named_parameters() if "gate" in n)
    batch = tiny_micro_batches("mixtral")[0]
    del batch["labels"]
    wanted = whole(**batch, output_router_logits=True).aux_loss * COEFFICIENT
    wanted.backward()
    _, extra_loss = chain(stages, batch, lambda logits, extra: extra)
    assert torch.equal(extra_loss, wanted)
    ours, theirs = gradients(*stages), gradients(whole)
    assert set(ours) == {name for name, grad in theirs.items() if ".lora." in name}
    assert all(torch.equal(grad, theirs[name]) for name, grad in ours.items())
    first = [grad for name, grad in ours.items() if name.startswith("model.layers.0.")]
    assert len(first) == 4 and all(grad.abs().max() > 0 for grad in first)


# -- whether it is on ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_config", "option", "is_on"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_the_option_goes_before_the_config(in_config, option, is_on):
    config = make_config("mixtral", output_router_logits=in_config)
    whole = build_whole(config)
    stages = build_stages(config, whole, 2, output_router_logits=option)
    batch = tiny_micro_batches("mixtral")[0]
    del batch["labels"]
    sent = stages[0](batch["input_ids"], **batch)
    assert isinstance(sent, tuple) == is_on
    assert len(stages[0].get_example_output(2, 5)) == 1 + is_on
    output = stages[1](*(sent if is_on else (sent,)), **batch)
    assert isinstance(output, tuple) == is_on
    # the checkpoint needs the original value
    assert stages[0].config.output_router_logits == in_config


def test_the_coefficient_can_be_set():
    config = make_config("mixtral")
    for coefficient, wanted in ((None, COEFFICIENT), (0.25, 0.25), (0.0, 0.0)):
        stage = CausalLMStage(config, stage=0, num_stages=2, router_aux_loss_coef=coefficient)
        assert stage.router_loss.coefficient == wanted


def test_the_parts_pass_the_options_on(tmp_path):
    make_config("mixtral", output_router_logits=False).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _, _ = train_model_register["causal_lm"](
        config_path=str(tmp_path),
        processor_path=None,
        checkpoint_path=None,
        stage=0,
        num_stages=2,
        output_router_logits=True,
        router_aux_loss_coef=0.125,
    )
    assert model.router_loss == RouterLoss(num_experts=4, top_k=2, coefficient=0.125)


# -- what is refused -----------------------------------------------------------------------


def test_a_model_without_routers_is_refused():
    with pytest.raises(UserError, match="LlamaForCausalLM.*Set output_router_logits to false"):
        CausalLMStage(tiny_config("llama"), stage=0, num_stages=2, output_router_logits=True)


def test_a_mixture_whose_loss_has_another_weight_is_refused():
    config = transformers.JetMoeConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=4,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=24,
        num_local_experts=4,
        output_router_logits=True,
    )
    with pytest.raises(UserError, match="jetmoe"):
        CausalLMStage(config, stage=0, num_stages=2)


def test_a_vision_language_model_is_refused():
    config = tiny_config("internvl")
    config.text_config.output_router_logits = True
    with pytest.raises(UserError, match="text decoder with experts"):
        VisionLanguageStage(config, stage=0, num_stages=2)


def test_another_formula_of_the_library_is_refused(monkeypatch):
    config = make_config("mixtral")
    module = sys.modules[transformers.MixtralForCausalLM.__module__]
    library = module.load_balancing_loss_func

    def mean_of_layers(gate_logits, num_experts, top_k, attention_mask):
        each = [library((logits,), num_experts, top_k, attention_mask) for logits in gate_logits]
        return torch.stack(each).mean()

    monkeypatch.setattr(module, "load_balancing_loss_func", mean_of_layers)
    with pytest.raises(UserError, match="another number"):
        CausalLMStage(config, stage=0, num_stages=2)
