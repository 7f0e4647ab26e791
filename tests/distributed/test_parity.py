"""The split model against plain transformers: equal to the last bit, for every family and split.

The reference is one process that runs the same micro-batches through transformers' own forward
and loss. Where a weight is tied across stages its gradient is a sum in another order: 1e-6.
"""

from functools import cache

import pytest
import torch
import transformers
from transformers import AutoConfig

from loss_fn import sft
from pp_models import class_of_key
from stageline.checkpoint.load import load_split_model
from stageline.pipeline.runner import PipelineRunner
from stageline.training.optimizers import optimizer_groups
from stageline.training.step import TrainStep
from tests.helpers.chain import run_chain
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import (
    count_targets,
    drop_pixels,
    join_micro_batches,
    tiny_micro_batches,
)
from tests.helpers.tiny_models import DECODERS, VISION_LANGUAGE, tiny_config

NUM_STEPS = 2
# padding beyond the sliding window of 8 makes NaN in transformers' own full batch
SIMILAR_LENGTHS = (14, 12, 16, 13)
MAX_NORM = 0.05  # well below the norm of these models, so that clipping acts
RATES = (1e-3, 2e-3)
EPS = 1e-4  # a smaller one blows gradients that are roundings up to the size of others
FAMILIES = DECODERS + VISION_LANGUAGE


def stage_class(family):
    return class_of_key(family)


def use_plain_experts(config, dtype):
    """Grouped matrix products, the default for experts, know no float64."""
    if dtype == torch.float64:
        config._experts_implementation = "eager"


def build_whole(family, *, tied, dtype=torch.float32, folder=None):
    torch.manual_seed(3)
    auto = (
        transformers.AutoModelForImageTextToText
        if family in VISION_LANGUAGE
        else transformers.AutoModelForCausalLM
    )
    config = tiny_config(family, tied=tied)
    use_plain_experts(config, dtype)
    whole = auto.from_config(config, dtype=dtype)
    with torch.no_grad():  # transformers starts biases and norms at 0 and 1, which hides mistakes
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    if folder is not None:
        whole.save_pretrained(folder)
    return whole.train()


def build_stage(family, folder, *, stage, num_stages, dtype=torch.float32):
    config = AutoConfig.from_pretrained(folder)
    use_plain_experts(config, dtype)
    model = stage_class(family)(config, stage=stage, num_stages=num_stages, dtype=dtype)
    load_split_model(model, folder, device="cpu", dtype=dtype)
    model.frozen()
    return model.train()


def make_optimizer(parameters):
    groups = optimizer_groups(parameters, weight_decay=0.1)
    return torch.optim.AdamW(groups, lr=1.0, eps=EPS)


def batches_of_step(family, step, dtype=torch.float32):
    return tiny_micro_batches(family, lengths=(14, 11 + step, 19, 12), seed=100 + step, dtype=dtype)


def reference_run(family, whole):
    """Train with plain PyTorch and transformers: micro-batches one by one, transformers' loss."""
    decayed = [p for p in whole.parameters() if p.ndim >= 2]
    others = [p for p in whole.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1.0,
        eps=EPS,
    )
    steps = []
    for step in range(NUM_STEPS):
        micro_batches = batches_of_step(family, step)
        count = torch.tensor(float(count_targets(micro_batches)))
        optimizer.zero_grad()
        loss = torch.zeros(())
        for batch in micro_batches:
            share = whole(**batch, num_items_in_batch=count, use_cache=False).loss
            share.backward()
            loss = loss + share.detach()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        grads = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
        steps.append({"loss": loss.item(), "norm": norm.item(), "grads": grads})
    weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
    return {"steps": steps, "weights": weights}


def split_run(model, rank, family, schedule):
    runner = PipelineRunner(model, device=torch.device("cpu"), schedule=schedule)
    train_step = TrainStep(
        runner,
        make_optimizer=make_optimizer,
        loss_fn=sft,
        learning_rate=RATES.__getitem__,
        max_grad_norm=MAX_NORM,
    )
    steps = []
    for step in range(NUM_STEPS):
        micro_batches = batches_of_step(family, step)
        if rank > 0:
            micro_batches = [drop_pixels(batch) for batch in micro_batches]
        result = train_step(micro_batches, step=step)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        steps.append({"loss": result.loss, "norm": result.grad_norm, "grads": grads})
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"steps": steps, "weights": weights}


def schedules_of(tied, num_stages):
    """Each family meets both schedules, on two stages both; all are in test_schedule_parity.py.

    That a tied weight is added up under each schedule is tested there, too.
    """
    if tied or num_stages == 4:
        return ("1f1b",)
    return ("gpipe", "1f1b") if num_stages == 2 else ("gpipe",)


def compared_runs(rank, family, folders, num_stages, references):
    """Run and compare all variants and schedules of one family on the same ranks.

    Returns:
        Names of the gradients by step, and of the weights, for each run.
    """
    found = {}
    for tied, folder in folders.items():
        model = build_stage(family, folder, stage=rank, num_stages=num_stages)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for schedule in schedules_of(tied, num_stages):
            begin_again(model, start)
            ours = split_run(model, rank, family, schedule)
            # a tied weight shifts all else by rounding
            compare(ours, references[tied], bitwise=not tied or num_stages == 1)
            names = [*(list(step["grads"]) for step in ours["steps"]), list(ours["weights"])]
            found[f"{tied} {schedule}"] = names
    return found


@torch.no_grad()
def begin_again(model, start):
    """With the weights of `start` and no gradients."""
    for name, parameter in model.named_parameters():
        parameter.copy_(start[name])
        parameter.grad = None


def assert_close(ours, theirs, *, bitwise, what):
    if bitwise:
        assert torch.equal(ours, theirs), f"{what}: {(ours - theirs).abs().max()} apart"
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=what)


def compare(ours, reference, *, bitwise):
    for step, (made, expected) in enumerate(zip(ours["steps"], reference["steps"], strict=True)):
        if bitwise or step == 0:
            assert made["loss"] == expected["loss"]
        assert made["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert made["norm"] == pytest.approx(expected["norm"], rel=0 if bitwise else 1e-6)
        for name, grad in made["grads"].items():
            assert_close(grad, expected["grads"][name], bitwise=bitwise, what=f"grad of {name}")
    for name, weight in ours["weights"].items():
        assert_close(weight, reference["weights"][name], bitwise=bitwise, what=name)


def assert_complete(ranks, reference, *, tied):
    """Check that the ranks together have each gradient and weight, and a tied one twice."""
    *grads, weights = zip(*ranks, strict=True)
    for of_ranks, step in zip(grads, reference["steps"], strict=True):
        assert set().union(*of_ranks) == set(step["grads"])
    held = [name for names in weights for name in names]
    assert set(held) == set(reference["weights"])
    twice = {name for name in held if held.count(name) > 1}
    assert len(twice) == (1 if tied and len(ranks) > 1 else 0)


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """family -> {tied: folder}, {tied: reference}: the same for each number of stages."""

    @cache
    def run(family):
        folders, references = {}, {}
        for tied in (False, True):
            folders[tied] = tmp_path_factory.mktemp(f"{family}-{tied}")
            whole = build_whole(family, tied=tied, folder=folders[tied])
            # before ranks are forked: the split plan is found once
            build_stage(family, folders[tied], stage=0, num_stages=1)
            references[tied] = reference_run(family, whole)
            norms = [step["norm"] for step in references[tied]["steps"]]
            assert min(norms) > MAX_NORM, "clipping must act, or the test shows nothing"
        return folders, references

    return run


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_split_equals_whole(family, num_stages, whole_runs):
    folders, references = whole_runs(family)
    found = run_ranks(compared_runs, num_stages, family, folders, num_stages, references)
    for tied in (False, True):
        for schedule in schedules_of(tied, num_stages):
            ranks = [names[f"{tied} {schedule}"] for names in found]
            assert_complete(ranks, references[tied], tied=tied)


@pytest.fixture
def true_float64(monkeypatch):
    """Remove the float32 islands (norms, softmax) of transformers, for reference and stages."""
    to_float, softmax = torch.Tensor.float, torch.nn.functional.softmax

    def keep_double(tensor):
        return tensor if tensor.dtype == torch.float64 else to_float(tensor)

    def softmax_as_input(tensor, dim=None, dtype=None, **kwargs):
        return softmax(tensor, dim=dim, **kwargs)

    monkeypatch.setattr(torch.Tensor, "float", keep_double)
    monkeypatch.setattr(torch.nn.functional, "softmax", softmax_as_input)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_split_equals_one_full_batch_in_float64(family, tied, tmp_path, true_float64):
    whole = build_whole(family, tied=tied, dtype=torch.float64, folder=tmp_path)
    batch = join_micro_batches(
        tiny_micro_batches(family, lengths=SIMILAR_LENGTHS, dtype=torch.float64)
    )
    labels = batch.pop("labels")[:, 1:]
    logits = whole(**batch, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])
    loss.backward()
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    stages = [
        build_stage(family, tmp_path, stage=stage, num_stages=3, dtype=torch.float64)
        for stage in range(3)
    ]
    micro_batches = tiny_micro_batches(family, lengths=SIMILAR_LENGTHS, dtype=torch.float64)
    divisor = torch.tensor(float(count_targets(micro_batches)), dtype=torch.float64)
    losses = run_chain(
        stages,
        micro_batches,
        loss_fn=lambda logits, batch: sft(logits, batch, num_targets=divisor),
    )
    assert sum(losses).item() == pytest.approx(loss.item(), abs=1e-9)
    summed: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                summed[name] = summed[name] + grad if name in summed else grad
    assert set(summed) == set(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(summed[name], grad, rtol=0, atol=1e-9, msg=name)


def test_a_broken_split_is_noticed(tmp_path):
    """The comparison above can fail: one layer that sees a wrong weight is enough."""
    whole = build_whole("llama", tied=False, folder=tmp_path)
    with torch.no_grad():
        whole.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-4
    reference = reference_run("llama", whole)
    with pytest.raises(AssertionError, match="in compare"):
        run_ranks(compared_runs, 2, "llama", {False: tmp_path}, 2, {False: reference})
