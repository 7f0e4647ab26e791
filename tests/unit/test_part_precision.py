"""Norms and logits in float32 in a half model, against transformers' modules cast by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from loss_fn import sft
from stageline.checkpoint.save import save_split_model
from stageline.modules.chunked_loss import ChunkedLoss
from stageline.modules.methods import Methods
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import load_stages, tiny_whole

HALF = torch.bfloat16


def make_stages(folder, methods, num_stages=2):
    stages = load_stages(folder, num_stages=num_stages, dtype=HALF)
    for model in stages:
        methods.finish(model, ((), False))
    return stages


def batch_of(family):
    batch = tiny_micro_batches(family, lengths=(14,))[0]
    return {name: value for name, value in batch.items() if name != "labels"}


def logits_of(stages, batch):
    hidden = batch["input_ids"]
    for stage in stages:
        # hidden states cross a boundary in half precision
        assert hidden.dtype in (torch.long, HALF)
        hidden = stage(hidden, **batch)
    return hidden


def cast_by_hand(whole, family):
    """Compute each norm by its own formula in float32, written out here."""
    for name, module in whole.named_modules():
        if name.rpartition(".")[2] not in NORMS[family]:
            continue
        module.float()
        module.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        module.register_forward_hook(lambda module, args, output: output.to(HALF))
    return whole


NORMS = {
    "llama": ("input_layernorm", "post_attention_layernorm", "norm"),
    "gpt_neox": ("input_layernorm", "post_attention_layernorm", "final_layer_norm"),
    "qwen3": ("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"),
}


@pytest.mark.parametrize("family", NORMS)
def test_norms_compute_in_float32(family, tmp_path):
    tiny_whole(family, tmp_path / "base")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=HALF)
    batch = batch_of(family)
    before = whole(**batch, use_cache=False).logits
    expected = cast_by_hand(whole, family)(**batch, use_cache=False).logits
    stages = make_stages(tmp_path / "base", Methods(norms_fp32=True))
    found = logits_of(stages, batch)
    assert torch.equal(found, expected)
    # else the option does nothing; torch's own LayerNorm works in float32 whatever comes
    assert torch.equal(found, before) == (family == "gpt_neox")
    for stage in stages:
        for name, parameter in stage.named_parameters():
            is_norm = name.split(".")[-2] in NORMS[family]
            assert parameter.dtype == (torch.float32 if is_norm else HALF), name
    found.float().square().sum().backward()
    expected.float().square().sum().backward()
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter.grad, grads[name]), name
    save_split_model(stages, None, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=HALF)
    torch.testing.assert_close(loaded(**batch, use_cache=False).logits, before)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_are_float32_before_they_are_capped(family, tmp_path):
    """A cap of half numbers rounds them a second time; without one nothing but the type differs."""
    tiny_whole(family, tmp_path)
    batch = batch_of(family)
    plain = logits_of(make_stages(tmp_path, Methods()), batch)
    found = logits_of(make_stages(tmp_path, Methods(upcast_lm_head=True)), batch)
    assert plain.dtype == HALF and found.dtype == torch.float32
    assert torch.equal(found.to(HALF), plain) or family == "gemma2"
    assert torch.equal(found, plain.float()) == (family == "llama")
    torch.testing.assert_close(found, plain.float(), rtol=2e-2, atol=2e-2)


def test_losses_over_chunks_see_the_same_logits(tmp_path):
    tiny_whole("gemma2", tmp_path)
    batch = tiny_micro_batches("gemma2", lengths=(14,))[0]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    count = torch.tensor(7.0)
    stage = make_stages(tmp_path, Methods(upcast_lm_head=True), 1)[0]
    whole = sft(stage(batch["input_ids"], **inputs), batch, num_targets=count)
    stage.logits_chunk = 5
    hidden = stage(batch["input_ids"], **inputs)
    chunked = ChunkedLoss(sft, whole=stage.whole, chunk=5)(hidden, batch, num_targets=count)
    torch.testing.assert_close(chunked, whole)
