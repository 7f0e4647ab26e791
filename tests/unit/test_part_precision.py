"""Norms and logits in float32 in a half model, against transformers' modules cast by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from loss_fn import sft
from stageline.checkpoint.save import save_split_model
from stageline.inference.decoding.answer_groups import AnswerGroups, PromptToAnswer
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.request import Sampling
from stageline.inference.decoding.stage_decoder import StageDecoder, answering
from stageline.modules import methods
from stageline.modules.chunked_loss import ChunkedLogits, ChunkedLoss
from stageline.modules.lora import LoRAWrapper
from stageline.modules.methods import Methods
from stageline.modules.new_rows import ROWS, NewRows
from stageline.modules.policy_loss import token_log_probs
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import load_stages, tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer

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


def watch_head(stage):
    """Return the (hidden states, logits) of each pass of the head."""
    seen = []
    head = stage.whole.get_output_embeddings()
    head.register_forward_hook(lambda module, args, out: seen.append((args[0].detach(), out)))
    return seen


def exact_logits(stage, hidden):
    """Compute the logits of the head in float64, with its adapter if it has one."""
    head = stage.whole.get_output_embeddings()
    hidden, base = hidden.double(), getattr(head, "lora_module", head)
    logits = hidden @ base.weight.detach().double().T
    if base is not head:
        down, up = (one.weight.detach().double() for one in (head.lora.lora_A, head.lora.lora_B))
        logits = logits + head.lora.scale * hidden @ down.T @ up.T
    if rows := base._modules.get(ROWS):
        logits[..., rows.ids] = hidden @ rows.weight.detach().double().T
    return logits


HEADS = {
    "untied": ("llama", {}),
    "tied": ("llama", {"tied": True}),
    "capped": ("gemma2", {}),
    "lora": ("llama", {}),
    "rows": ("llama", {"new_rows": NewRows((3, 7), ((), ()), frozenset(), train_alone=True)}),
}
# sums of 32 products that are exact; logits that are rounded to a half type are off by 1e-2
EXACT = {"rtol": 0, "atol": 2e-5}


@pytest.mark.parametrize(
    ("head", "dtype"), zip(HEADS, [torch.bfloat16, torch.float16] * 3, strict=False)
)
def test_the_head_computes_in_float32(head, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "HEAD_ROWS", 24)  # several chunks, the last one short
    family, options = HEADS[head]
    tiny_whole(family, tmp_path, tied=options.pop("tied", False), noise=0.5)
    stage = load_stages(tmp_path, num_stages=1, dtype=dtype, **options)[0]
    if head == "lora":
        stage.whole.lm_head = LoRAWrapper(stage.whole.lm_head, rank=4, alpha=8.0)
        stage.whole.lm_head.lora.lora_B.weight.data.normal_()
    plain = logits_of([stage], batch_of(family))
    Methods(upcast_lm_head=True).finish(stage, ((), False))
    seen = watch_head(stage)
    found = logits_of([stage], batch_of(family))
    [(hidden, logits)] = seen
    wanted = exact_logits(stage, hidden)
    assert plain.dtype == hidden.dtype == dtype and found.dtype == logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), wanted, **EXACT)
    if family == "gemma2":
        cap = stage.config.final_logit_softcapping
        wanted = cap * (wanted / cap).tanh()
    torch.testing.assert_close(found.double(), wanted, **EXACT)
    with pytest.raises(AssertionError):  # logits that were only cast differ
        torch.testing.assert_close(plain.double(), wanted, **EXACT)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_of_a_head_in_float32(tied, tmp_path, monkeypatch):
    """Compare with the hidden states' and the weight's in float64, rounded once."""
    monkeypatch.setattr(methods, "HEAD_ROWS", 24)
    tiny_whole("llama", tmp_path, tied=tied)
    stage = make_stages(tmp_path, Methods(upcast_lm_head=True), 1)[0]
    head = stage.whole.get_output_embeddings()
    hidden = torch.randn(2, 5, head.in_features, dtype=HALF, requires_grad=True)
    weights = torch.randn(2, 5, head.out_features)
    (head(hidden) * weights).sum().backward()
    exact, weight = (one.detach().double().requires_grad_() for one in (hidden, head.weight))
    ((exact @ weight.T) * weights).sum().backward()
    for found, wanted in ((hidden, exact), (head.weight, weight)):
        assert found.grad.dtype == HALF
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=2**-8, atol=1e-5)


def test_drawn_and_trained_log_probs_are_those_of_the_same_head(tmp_path):
    """Each side's log-probabilities follow in float64 from the hidden states that it had."""
    tiny_whole("llama", tmp_path, noise=0.5)
    tokenizer = tiny_tokenizer()
    stage = make_stages(tmp_path, Methods(upcast_lm_head=True), 1)[0]
    seen = watch_head(stage)
    groups = AnswerGroups(
        LocalChain([StageDecoder(stage, trains_on=True)]),
        tokenizer=tokenizer,
        stop_ids=(),
        device=torch.device("cpu"),
        lots_at_once=1,
        most_on_way=1,
    )
    ids = torch.tensor([[11, 12, 13]])
    prompt = PromptToAnswer({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, (1, 2))
    with answering([stage]):
        sampling = Sampling(max_new_tokens=6, temperature=1.0)
        [answers] = groups.draw([prompt], sampling, lot_size=1)
    exact = [exact_logits(stage, hidden).log_softmax(-1).flatten(0, -2) for hidden, _ in seen]
    rows = torch.cat(exact)
    for answer in answers:
        for token, log_prob in zip(answer.token_ids, answer.log_probs, strict=True):
            assert (rows[:, token] - log_prob).abs().min() < 1e-5
    # training, on whole logits and in chunks
    ids_BT = torch.tensor([[11, 12, 13, *answer.token_ids] for answer in answers])
    batch = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "labels": ids_BT}
    for chunk in (0, 4):
        stage.logits_chunk = chunk
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        seen.clear()
        output = stage(ids_BT, **inputs)
        hidden_BTH = output if chunk else seen[0][0]
        logits = ChunkedLogits(output, whole=stage.whole, chunk=chunk) if chunk else output
        found_BT = token_log_probs(logits, batch, temperature=1.0)
        wanted_BTV = exact_logits(stage, hidden_BTH).log_softmax(-1)[:, :-1]
        wanted_BT = wanted_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
        torch.testing.assert_close(found_BT[:, :-1].double(), wanted_BT, rtol=0, atol=1e-5)


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
