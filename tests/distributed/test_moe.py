"""Mixtures of experts with the router loss over ranks: two optimizer steps, bit for bit.

The reference is one process with plain transformers: the micro-batches one by one, its own
`aux_loss` added as a mean over the micro-batches of the step.
"""

from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.load import load_split_model
from stageline.pipeline.runner import PipelineRunner, TorchPipelineRunner
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from stageline.training.evaluation import evaluate
from stageline.training.optimizers import optimizer_groups
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import count_targets, tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

NUM_STEPS = 2
COEFFICIENT = 0.5  # far above what is usual, so that the loss weighs in every gradient
MAX_NORM = 0.05


def build_whole(family, folder, **overrides):
    torch.manual_seed(3)
    config = tiny_config(
        family, output_router_logits=True, router_aux_loss_coef=COEFFICIENT, **overrides
    )
    whole = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # routers that start near zero choose at random
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    whole.save_pretrained(folder)
    return whole.train()


def batches_of_step(step):
    return tiny_micro_batches("mixtral", lengths=(14, 11 + step, 19, 12), seed=100 + step)


def make_optimizer(parameters):
    if not parameters:
        return None
    return torch.optim.AdamW(optimizer_groups(parameters, weight_decay=0.1), lr=1e-3, eps=1e-6)


def reference_run(whole):
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in whole.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in whole.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        eps=1e-6,
    )
    steps = []
    for step in range(NUM_STEPS):
        micro_batches = batches_of_step(step)
        count = torch.tensor(float(count_targets(micro_batches)))
        optimizer.zero_grad()
        loss, router_loss = torch.zeros(()), torch.zeros(())
        for batch in micro_batches:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            outputs = whole(**inputs, output_router_logits=True, use_cache=False)
            share = whole.loss_function(
                outputs.logits, batch["labels"], whole.vocab_size, num_items_in_batch=count
            )
            extra = outputs.aux_loss * COEFFICIENT / len(micro_batches)
            (share + extra).backward()
            loss, router_loss = loss + share.detach(), router_loss + extra.detach()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        grads = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
        optimizer.step()
        steps.append(
            {
                "loss": loss.item(),
                "router_loss": router_loss.item(),
                "norm": norm.item(),
                "grads": grads,
            }
        )
    weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
    return {"steps": steps, "weights": weights}


def build_stage(folder, stage, num_stages, options):
    config = AutoConfig.from_pretrained(folder)
    model = CausalLMStage(config, stage=stage, num_stages=num_stages, **options)
    load_split_model(model, folder, device="cpu", dtype=torch.float32)
    model.frozen()
    return model.train()


@cache
def loaded(folder, stage, num_stages):
    """Return a stage and its parameters as they are before the first step."""
    model = build_stage(folder, stage, num_stages, {})
    return model, {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def stage_again(folder, stage, num_stages, options):
    """Return a stage that is loaded once, also for ranks that are forked later, and put back."""
    if options:
        return build_stage(folder, stage, num_stages, options)
    model, start = loaded(folder, stage, num_stages)
    for name, parameter in model.named_parameters():
        parameter.copy_(start[name])
        parameter.grad = None
    return model.train()


def split_run(rank, folder, num_ranks, name, options=None, *, runner_class=PipelineRunner):
    schedule = make_schedule(name, num_ranks=num_ranks)
    stages = [
        stage_again(folder, stage, schedule.num_stages, options)
        for stage in schedule.stages_of(rank)
    ]
    runner = runner_class(stages, device=torch.device("cpu"), schedule=schedule)
    train_step = TrainStep(
        runner,
        make_optimizer=make_optimizer,
        loss_fn=sft,
        learning_rate=lambda step: 1e-3,
        max_grad_norm=MAX_NORM,
    )
    held_out = evaluate(runner, [batches_of_step(9)], loss_fn=sft)
    steps = []
    for step in range(NUM_STEPS):
        result = train_step(batches_of_step(step), step=step)
        named = runner.local.named_parameters()
        grads = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        steps.append(
            {
                "loss": result.loss,
                "router_loss": result.extra_loss,
                "norm": result.grad_norm,
                "grads": grads,
            }
        )
    weights = {name: p.detach().clone() for name, p in runner.local.named_parameters().items()}
    return {"steps": steps, "weights": weights, "held_out": held_out.loss}


def schedules_of(num_ranks):
    """Return schedules for which 4 layers suffice; looped_bfs adds up in another order."""
    return [
        name
        for name, kind in SCHEDULES.items()
        if name != "looped_bfs" and (num_ranks < 3 or not kind.is_multi)
    ]


def compared_runs(rank, folder, num_ranks, has_torch, reference, held_out):
    """Run our plan, and torch's own classes, too, if they are wanted; compare each run.

    Returns:
        Names of the gradients by step, and of the weights, for each run.
    """
    classes = {"": PipelineRunner} | ({"torch's ": TorchPipelineRunner} if has_torch else {})
    found = {}
    for prefix, runner_class in classes.items():
        for name in schedules_of(num_ranks):
            if prefix and not SCHEDULES[name].torch_name:
                continue
            ours = split_run(rank, folder, num_ranks, name, runner_class=runner_class)
            assert_equal(ours, reference)
            assert ours["held_out"] == pytest.approx(held_out, rel=1e-6), "by the logits"
            found[prefix + name] = names_of(ours)
    return found


def names_of(run):
    return [*(list(step["grads"]) for step in run["steps"]), list(run["weights"])]


def assert_equal(ours, reference):
    """Check what one rank has, to the bit."""
    for step, (made, expected) in enumerate(zip(ours["steps"], reference["steps"], strict=True)):
        for figure in ("loss", "router_loss", "norm"):
            assert made[figure] == expected[figure], f"{figure} of step {step}"
        for name, grad in made["grads"].items():
            assert torch.equal(grad, expected["grads"][name]), f"step {step}, {name}"
    for name, weight in ours["weights"].items():
        assert torch.equal(weight, reference["weights"][name]), name


def assert_complete(ranks, reference):
    """Check that the ranks together have each gradient and weight."""
    found = [set().union(*names) for names in zip(*ranks, strict=True)]
    assert found == [set(names) for names in names_of(reference)]


def compare(stages, reference):
    for stage in stages:
        assert_equal(stage, reference)
    assert_complete([names_of(stage) for stage in stages], reference)


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """Family -> its folder, the reference, and a loss of held-out rows: once for all splits."""

    @cache
    def run(family):
        folder = tmp_path_factory.mktemp(family)
        whole = build_whole(family, folder)
        batches = batches_of_step(9)
        count = torch.tensor(float(count_targets(batches)))
        with torch.no_grad():
            held_out = sum(
                sft(
                    whole(batch["input_ids"], attention_mask=batch["attention_mask"]).logits,
                    batch,
                    num_targets=count,
                )
                for batch in batches
            )
        reference = reference_run(whole)
        figures = reference["steps"][0]
        assert figures["norm"] > MAX_NORM, "clipping must act"
        assert figures["router_loss"] > 0.5, "the router loss must weigh something"
        return folder, reference, held_out.item()

    return run


@pytest.mark.parametrize(
    ("family", "num_ranks"), [("mixtral", 1), ("mixtral", 2), ("mixtral", 3), ("qwen3_moe", 2)]
)
def test_every_schedule_equals_the_whole_model(family, num_ranks, whole_runs):
    folder, reference, held_out = whole_runs(family)
    has_torch = num_ranks == 2 and family == "mixtral"
    for name in schedules_of(num_ranks):
        num_stages = make_schedule(name, num_ranks=num_ranks).num_stages
        for stage in range(num_stages):
            loaded(folder, stage, num_stages)
    ranks = run_ranks(compared_runs, num_ranks, folder, num_ranks, has_torch, reference, held_out)
    for name in ranks[0]:
        assert_complete([names[name] for names in ranks], reference)


def test_stages_without_experts(tmp_path):
    """The first stage has no statistics that need a gradient, the last one hands none on."""
    reference = reference_run(build_whole("qwen3_moe", tmp_path, mlp_only_layers=[0, 3]))
    results = run_ranks(split_run, 3, tmp_path, 3, "1f1b", {"partition": [1, 2, 1]})
    compare(results, reference)


def test_a_wrong_weight_is_noticed(whole_runs):
    """Notice a coefficient that is 0.1 % off: in the metric, and in the gradients."""
    folder, reference, _ = whole_runs("mixtral")
    options = {"router_aux_loss_coef": COEFFICIENT * 1.001}
    results = run_ranks(split_run, 2, folder, 2, "1f1b", options)
    with pytest.raises(AssertionError, match="router_loss"):
        compare(results, reference)
    for result in results:  # now the metric is right and the gradient is wrong
        for ours, expected in zip(result["steps"], reference["steps"], strict=True):
            ours["router_loss"], ours["norm"] = expected["router_loss"], expected["norm"]
    with pytest.raises(AssertionError, match="step 0, model"):
        compare(results, reference)


def test_statistics_travel_where_nothing_trains(tmp_path):
    """All layers are frozen: no gradient goes back, the figure is still that of the whole."""
    whole = build_whole("mixtral", tmp_path).requires_grad_(False)
    whole.lm_head.requires_grad_(True)
    reference = reference_run(whole)
    results = run_ranks(split_run, 2, tmp_path, 2, "1f1b", {"frozen_llm": True})
    compare(results, reference)
    assert list(results[0]["steps"][0]["grads"]) == []


def accumulate(rank, folder, num_stages):
    """Run the same micro-batches once, and three times in one step."""
    once = batches_of_step(0)
    stage = CausalLMStage(AutoConfig.from_pretrained(folder), stage=rank, num_stages=num_stages)
    load_split_model(stage, folder, device="cpu", dtype=torch.float32)
    stage.train()
    runner = PipelineRunner(stage, device=torch.device("cpu"))
    train_step = TrainStep(
        runner, make_optimizer=make_optimizer, loss_fn=sft, learning_rate=lambda step: 0.0
    )
    results = [train_step(batches, step=0) for batches in (once, once * 3)]
    return [[result.loss, result.extra_loss, result.grad_norm] for result in results]


def test_accumulation_makes_the_router_loss_no_heavier(whole_runs):
    folder, *_ = whole_runs("mixtral")
    once, thrice = run_ranks(accumulate, 2, folder, 2)[1]
    assert thrice == pytest.approx(once, rel=1e-5)
