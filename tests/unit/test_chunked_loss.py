"""The loss in chunks of tokens against loss and gradients of transformers' forward over all tokens.

The reference is plain transformers and torch.
"""

import functools

import pytest
import torch
import transformers

from commands.train_data import check_token_sum
from loss_fn import sft
from options.parts import ChosenPart, chosen_part
from pp_models import class_of_key
from register import LossFacts
from stageline.errors import UserError
from stageline.modules import chunked_loss
from stageline.modules.chunked_loss import ChunkedLogits, ChunkedLoss, LossByToken, head_of
from stageline.modules.lora import wrap_linear
from stageline.modules.policy_loss import PolicyOptions, policy_loss, token_log_probs
from stageline.shrink import shrink_config
from tests.helpers.family_configs import family_config
from tests.helpers.split_backward import plain_backward, split_backward
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import TYPICAL, VISION_LANGUAGE, VOCAB_SIZE, tiny_config

# heads under each of the names, a cap of logits, heads next to the language model
TIED = ("llama", "gemma2", "gemma3_vl")
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
LENGTH = 14


def make_pair(family, *, dtype=torch.float64, tied=False, num_stages=1, **overrides):
    """Return transformers' whole model and Stageline's last stage, with the same weights."""
    auto = (
        transformers.AutoModelForImageTextToText
        if family in VISION_LANGUAGE
        else transformers.AutoModelForCausalLM
    )
    stage_class = class_of_key(family)
    config = tiny_config(family, tied=tied, **overrides)
    config._experts_implementation = "eager"  # grouped products know no float64
    torch.manual_seed(3)
    whole = auto.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    stage = stage_class(config, stage=num_stages - 1, num_stages=num_stages, dtype=dtype)
    stage.to_empty(device="cpu")
    missing = set(stage.state_dict()) - set(whole.state_dict())
    assert not missing
    stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    # rotary frequencies are buffers outside of the state dict
    buffers = dict(whole.named_buffers())
    for name, buffer in stage.named_buffers():
        buffer.copy_(buffers[name])
    stage.whole.tie_weights()
    return whole.train(), stage.train()


def batch_of(family, dtype):
    batch = tiny_micro_batches(family, lengths=(LENGTH,), dtype=dtype)[0]
    return batch, {name: value for name, value in batch.items() if name != "labels"}


def library_loss(whole, inputs, labels):
    """Return torch's cross-entropy of transformers' logits: its own loss rounds to float32."""
    logits = whole(**inputs, use_cache=False).logits
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(ours, theirs, dtype):
    assert ours.keys() == theirs.keys() and ours
    for name, grad in theirs.items():
        limits = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(ours[name], grad, **limits, msg=lambda text, n=name: n + text)


def chunked(stage, loss_fn=sft, chunk=4):
    stage.logits_chunk = chunk
    return ChunkedLoss(loss_fn, whole=stage.whole, chunk=chunk)


@pytest.mark.parametrize("family", [one for one in TYPICAL if one != "phi3"])
def test_it_equals_the_library(family):
    # a cap so low that logits without it would be others
    cap = {"final_logit_softcapping": 0.5} if family == "gemma2" else {}
    for dtype in (torch.float64, torch.float32) if family == "llama" else (torch.float64,):
        whole, stage = make_pair(family, dtype=dtype, tied=family in TIED, **cap)
        batch, inputs = batch_of(family, dtype)
        count = torch.tensor(7.0, dtype=dtype)
        expected = library_loss(whole, inputs, batch["labels"]) / count
        expected.backward()
        for kind, chunk in ((LossByToken, 1), (LossByToken, 100), (ChunkedLoss, 4)):
            stage.logits_chunk = chunk
            loss_fn = kind(sft, whole=stage.whole, chunk=chunk)
            loss = loss_fn(stage(batch["input_ids"], **inputs), batch, num_targets=count)
            loss.backward()
            torch.testing.assert_close(loss, expected, rtol=TOLERANCE[dtype], atol=0.0)
            assert_close(grads_of(stage), grads_of(whole), dtype)
            stage.zero_grad()


# -- parts of the graph that do not train, and two walks -----------------------------------


def last_stage(kind, dtype=torch.float64):
    _, stage = make_pair("gemma2", dtype=dtype, num_stages=2)
    if kind == "lora head":
        stage.whole.lm_head.requires_grad_(False)
        stage.whole.lm_head = wrap_linear(stage.whole.lm_head, rank=2, dropout=0.3, prefix="head")
        with torch.no_grad():
            stage.whole.lm_head.lora.lora_B.weight.normal_()
    if kind == "frozen head":
        stage.whole.lm_head.requires_grad_(False)
    if kind == "head alone":
        stage.requires_grad_(False)
        stage.whole.lm_head.requires_grad_(True)
    return stage


def run(stage, backward, *, loss_fn, needs_grad=True, dtype=torch.float64, scale=1.0):
    batch, inputs = batch_of("gemma2", dtype)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, LENGTH, 16, generator=generator, dtype=dtype)
    hidden.requires_grad_(needs_grad)
    torch.manual_seed(9)
    output = stage(hidden, **inputs)
    loss = loss_fn(output, batch, num_targets=torch.tensor(7.0, dtype=dtype)) * scale
    return loss.item(), backward(loss, None, hidden=hidden, model=stage)


@pytest.mark.parametrize("backward", [plain_backward, split_backward])
@pytest.mark.parametrize("kind", ["all", "frozen head", "head alone"])
def test_frozen_parts_and_two_walks(kind, backward):
    expected = run(last_stage(kind), plain_backward, loss_fn=sft, scale=8.0)
    stage = last_stage(kind)
    ours = run(stage, backward, loss_fn=chunked(stage), scale=8.0)
    assert ours[0] == pytest.approx(expected[0], rel=1e-13)
    assert_close(ours[1], expected[1], torch.float64)


@pytest.mark.parametrize("backward", [plain_backward, split_backward])
def test_a_head_with_lora_and_dropout(backward):
    """The reference draws the same dropout: the same chunks, ordinary autograd."""
    stage = last_stage("lora head")
    loss_fn = chunked(stage)

    def reference(hidden, batch, *, num_targets):
        parts = [sft(logits, p, num_targets=num_targets) for logits, p in pieces(hidden, batch)]
        return torch.stack(parts).sum()

    def pieces(hidden, batch):
        for start in range(0, LENGTH - 1, 4):
            where = slice(start, start + 5)
            cap = stage.whole.config.final_logit_softcapping
            logits = torch.tanh(stage.whole.lm_head(hidden[:, where]) / cap) * cap
            yield logits, {"labels": batch["labels"][:, where]}

    expected = run(stage, plain_backward, loss_fn=reference)
    stage.zero_grad()
    ours = run(stage, backward, loss_fn=loss_fn)
    assert ours[0] == pytest.approx(expected[0], rel=1e-13)
    assert_close(ours[1], expected[1], torch.float64)
    assert any("lora_A" in name for name in ours[1])


def test_a_stage_that_gives_no_gradient_back():
    expected = run(last_stage("head alone"), plain_backward, loss_fn=sft, needs_grad=False)
    stage = last_stage("head alone")
    ours = run(stage, plain_backward, loss_fn=chunked(stage), needs_grad=False)
    assert set(ours[1]) == {"lm_head.weight"}
    assert_close(ours[1], expected[1], torch.float64)


@pytest.mark.parametrize(("backward", "runs"), [(plain_backward, 2), (split_backward, 3)])
def test_how_often_the_head_runs(backward, runs):
    """Once more in the backward pass; in two walks once more in each."""
    stage = last_stage("all")
    lengths = []
    stage.whole.lm_head.register_forward_hook(lambda m, args, out: lengths.append(out.shape[1]))
    run(stage, backward, loss_fn=chunked(stage))
    assert lengths == [5, 5, 5, 2] * runs


# -- losses that need all tokens at once, and a few numbers of each -----------------------------


def answers(logits, batch, *, num_targets, learnt=(True, True), **options):
    """A loss over sampled answers; how sure the model was of each token before is made up."""
    generator = torch.Generator().manual_seed(5)
    shape, wide = batch["labels"].shape, torch.float64
    columns = {
        "loss_advantages": torch.tensor([0.7, -1.3], dtype=wide),
        "loss_is_learnt": torch.tensor(learnt),
        "loss_is_counted": torch.ones(2, dtype=torch.bool),
    }
    for name in ("loss_old", "loss_sampled", "loss_start"):
        columns[name] = torch.randn(shape, generator=generator, dtype=wide) / 2 - 3.5
    chosen = PolicyOptions(**{"kl_beta": 0.1, "temperature": 0.7, "delta": 3.0, **options})
    two = torch.tensor(2.0, dtype=wide)
    counts = {"num_tokens": num_targets, "num_answers": two}
    loss, figures = policy_loss(logits, {**batch, **columns}, options=chosen, **counts)
    answers.figures = {name: value.detach() for name, value in figures.items()}
    return loss


def by_token(stage, loss_fn, chunk=4):
    stage.logits_chunk = chunk
    return LossByToken(loss_fn, whole=stage.whole, chunk=chunk)


@pytest.mark.parametrize(
    ("loss_type", "learnt"),
    [
        *((kind, (False, True)) for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo")),
        ("dapo", (True, True)),
        ("gspo", (False, False)),
    ],
)
def test_losses_over_answers(loss_type, learnt):
    part = functools.partial(
        answers,
        loss_type=loss_type,
        learnt=learnt,
        entropy_coef=0.2,
        importance_correction="sequence_truncate",
    )
    expected = run(last_stage("all"), plain_backward, loss_fn=part)
    wanted = answers.figures
    for chunk in (1, 4):
        stage = last_stage("all")
        ours = run(stage, plain_backward, loss_fn=by_token(stage, part, chunk))
        assert ours[0] == pytest.approx(expected[0], rel=1e-13)
        assert_close(ours[1], expected[1], torch.float64)
        assert_close(answers.figures, wanted, torch.float64)
    assert bool(expected[1][""].any()) == any(learnt)


@pytest.mark.parametrize("kind", ["all", "frozen head", "head alone"])
def test_two_walks_of_a_loss_by_token(kind):
    for part, chunk in ((answers, 4), (sft, 100)):
        expected = run(last_stage(kind), plain_backward, loss_fn=part)
        stage = last_stage(kind)
        ours = run(stage, split_backward, loss_fn=by_token(stage, part, chunk))
        assert_close(ours[1], expected[1], torch.float64)


def test_the_head_runs_over_tokens_in_the_loss():
    """A single chunk runs once; several run again in the backward pass."""
    stage = last_stage("all")
    lengths = []
    stage.whole.lm_head.register_forward_hook(lambda m, args, out: lengths.append(out.shape[1]))
    batch, _ = batch_of("gemma2", torch.float64)
    counts = (batch["labels"][:, 1:] != -100).sum(1).tolist()
    run(stage, plain_backward, loss_fn=by_token(stage, answers, 100))
    part = functools.partial(answers, learnt=(False, True))
    run(stage, plain_backward, loss_fn=by_token(stage, part, 100))
    run(stage, plain_backward, loss_fn=by_token(stage, sft, 100))
    assert lengths == [sum(counts), counts[1], sum(counts)] and counts[0] > 0
    lengths.clear()
    run(stage, plain_backward, loss_fn=by_token(stage, sft, sum(counts) - 1))
    assert lengths == [sum(counts) - 1, 1] * 2


def test_log_probabilities_before_a_step_are_those_of_the_step():
    stage = last_stage("all", torch.float32)
    stage.logits_chunk = 4
    batch, inputs = batch_of("gemma2", torch.float32)
    batch["loss_is_learnt"] = torch.tensor([True, True])
    hidden = stage(torch.ones(2, LENGTH, 16), **inputs)
    with torch.no_grad():
        before = ChunkedLogits(hidden, whole=stage.whole, chunk=4)
        before_BT = token_log_probs(before, batch, temperature=0.7)
    logits = ChunkedLogits(hidden, whole=stage.whole, chunk=4)
    assert torch.equal(token_log_probs(logits, batch, temperature=0.7), before_BT)
    plain_BT = token_log_probs(head_of(stage.whole)(hidden), batch, temperature=0.7)
    torch.testing.assert_close(before_BT, plain_BT, rtol=1e-6, atol=1e-6)


def test_half_gradients_are_summed_in_float32():
    """Sum sixty-four chunks: one is lost in bfloat16 next to the sum, all together are not."""
    whole, stage = make_pair("llama", dtype=torch.bfloat16, max_position_embeddings=512)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(9, VOCAB_SIZE, (1, 257), generator=generator)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    library_loss(whole, {"input_ids": ids}, ids).backward()
    expected = whole.lm_head.weight.grad.float()
    loss_fn = chunked(stage)
    hidden = stage(ids, attention_mask=batch["attention_mask"])
    loss_fn(hidden, batch, num_targets=torch.tensor(1.0)).backward()
    error = (stage.whole.lm_head.weight.grad.float() - expected).norm() / expected.norm()
    assert error < 4e-3  # one rounding of each; summed in bfloat16 it is 1e-2


# -- losses of a user, and refusals --------------------------------------------------------


def weighted(logits, batch, *, num_targets, power: float = 1.0):
    """Rows and tokens have weights; labels are shifted by slicing."""
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100, reduction="none"
    )
    weights = batch["loss_rows"][:, None] * batch["loss_tokens"][:, 1:] ** power
    return (losses * weights).sum() / num_targets


def test_a_loss_with_weights_of_rows_and_tokens():
    results = []
    for is_chunked in (False, True):
        stage = last_stage("all")
        part = functools.partial(weighted, power=2.0)
        loss_fn = chunked(stage, part) if is_chunked else part
        batch, inputs = batch_of("gemma2", torch.float64)
        batch["loss_rows"] = torch.tensor([2.0, 0.5], dtype=torch.float64)
        batch["loss_tokens"] = torch.linspace(0, 1, 2 * LENGTH, dtype=torch.float64).view(2, -1)
        hidden = torch.linspace(-1, 1, 2 * LENGTH * 16, dtype=torch.float64).view(2, LENGTH, 16)
        loss = loss_fn(stage(hidden, **inputs), batch, num_targets=torch.tensor(3.0))
        loss.backward()
        results.append({"loss": loss.detach(), **grads_of(stage)})
    assert_close(results[1], results[0], torch.float64)


def test_a_loss_that_is_no_sum_is_refused():
    def mean_loss(logits, batch, *, num_targets):
        return logits.mean()

    loss = ChosenPart("loss_fn", "mean_loss", mean_loss, facts=LossFacts())
    with pytest.raises(UserError, match="is_token_sum=True.*mean_loss"):
        check_token_sum(loss)
    for key in ("sft", "grpo"):
        check_token_sum(chosen_part("loss_fn", key))


def test_a_head_that_cannot_run_alone_is_refused():
    whole = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"))
    whole.forward = lambda **inputs: transformers.modeling_outputs.CausalLMOutputWithPast()
    with pytest.raises(UserError, match="does not call its base model"):
        head_of(whole)(torch.zeros(1, 3, 16))
    for model in (whole.model, None):
        with pytest.raises(UserError, match="a base model apart from its head"):
            ChunkedLoss(sft, whole=model, chunk=4)


def test_the_model_is_as_before():
    whole = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"))
    base, names = whole.model, list(whole.state_dict())
    logits = head_of(whole)(torch.ones(1, 3, 16))
    assert whole.model is base and list(whole.state_dict()) == names
    assert torch.equal(logits, whole.lm_head(torch.ones(1, 3, 16)))


def test_one_token_has_no_target():
    stage = last_stage("all")
    batch = {"labels": torch.full((2, 1), 5)}
    hidden = torch.zeros(2, 1, 16, dtype=torch.float64, requires_grad=True)
    loss = chunked(stage)(hidden, batch, num_targets=torch.tensor(1.0))
    loss.backward()
    assert loss.item() == 0.0 and not hidden.grad.any()


def test_weights_without_a_part_in_a_chunk_are_passed_over():
    ones = torch.ones(2, dtype=torch.bfloat16)
    sums = [None, None, None]
    for found in ([None, ones, None], [None, ones, ones]):
        chunked_loss._add(sums, found)
    assert sums[0] is None and ones.tolist() == [1, 1]
    assert [total.tolist() for total in sums[1:]] == [[2, 2], [1, 1]]
    assert sums[1].dtype == torch.float32


def test_a_head_may_read_values_of_its_base_and_no_modules():
    torch.manual_seed(0)
    config = shrink_config(family_config("falcon_h1"), num_layers=1)
    whole = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(3, 9)[None]
    hidden = whole.base_model(ids, use_cache=False).last_hidden_state
    assert torch.equal(head_of(whole)(hidden), whole(ids, use_cache=False).logits)
    for name, reason in (("bart", "reads 'decoder'"), ("cpmant", "gives its base model no embed")):
        config = shrink_config(family_config(name), num_layers=1)
        whole = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(UserError, match=f"{reason}.*--logits-chunk"):
            head_of(whole)(hidden)
