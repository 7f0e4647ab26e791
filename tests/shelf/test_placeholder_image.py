"""A micro-batch without images: the tower works on a placeholder, and nothing comes of it."""

import pytest
import torch

from loss_fn import sft
from pp_models import class_of_key
from stageline.checkpoint.init import init_split_model
from stageline.pipeline.runner import PipelineRunner
from stageline.training.replicas import Replicas, ShardedReplicas, bit_sum
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import VISION_LANGUAGE, tiny_config

CPU = torch.device("cpu")
MODES = {
    "full": {},
    "projector": {"frozen_vit": True},
    "lora": {"vit_lora_num": 1, "lora_rank": 2},
    "frozen": {"frozen_vit": True, "frozen_mlp": True},
}


def build(family, *, num_stages=1, **options):
    model = class_of_key(family)(tiny_config(family), stage=0, num_stages=num_stages, **options)
    init_split_model(model, seed=1, device="cpu", dtype=torch.float32)
    model.frozen()
    return model.train()


def text_batch():
    return tiny_micro_batches("llama", lengths=(12,))[0]


def image_batch(family):
    return tiny_micro_batches(family, lengths=(12,))[0]


def run(model, batch):
    """Return the output's value, and the gradients of tower and projector by name."""
    model.zero_grad()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    output = model(batch["input_ids"], **inputs)
    outputs = output if isinstance(output, tuple) else (output,)
    sum((one * torch.arange(one.shape[-1])).sum() for one in outputs).backward()
    front = {id(weight) for weight in model.front_weights()}
    named = [(name, p.grad) for name, p in model.named_parameters() if id(p) in front]
    return outputs[0].detach(), {name: grad for name, grad in named if grad is not None}


def count_towers(model):
    """Return a list that grows by one with each run of the tower."""
    runs = []
    tower = model.get_submodule(model.paths.vision_tower)
    tower.register_forward_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *((family, "full") for family in VISION_LANGUAGE),
        *(("internvl", mode) for mode in MODES if mode != "full"),
        ("qwen3_vl", "lora"),
    ],
)
def test_the_tower_works_and_nothing_comes_of_it(family, mode):
    model = build(family, num_stages=2, **MODES[mode])
    _, with_picture = run(model, image_batch(family))
    assert bool(with_picture) == (mode != "frozen")
    runs = count_towers(model)
    before = torch.get_rng_state()
    hidden, without = run(model, text_batch())
    assert torch.equal(torch.get_rng_state(), before)
    assert len(runs) == (mode != "frozen")
    assert without == {}, "an optimizer would move weights whose gradient is zero"
    model.requires_grad_(False)
    with torch.no_grad():
        inputs = text_batch()
        del inputs["labels"]
        plain = model(inputs["input_ids"], **inputs)
    assert torch.equal(hidden, plain)
    assert len(runs) == (mode != "frozen"), "evaluation has no use for it"


@pytest.mark.parametrize("family", ["internvl", "qwen3_vl"])
def test_a_broken_tower_reaches_nothing(family):
    """Zero times nan would be nan: nothing is multiplied by zero."""
    model = build(family)
    expected, _ = run(model, text_batch())
    with torch.no_grad():
        for weight in model.get_submodule(model.paths.vision_tower).parameters():
            weight.fill_(torch.inf)
    found, grads = run(model, text_batch())
    assert torch.equal(found, expected)
    assert grads == {}


# -- replicas ----------------------------------------------------------------------------------


def copies_of_front(step, model):
    """Sums of the bits of tower and projector's weights, or of this replica's share of them."""
    front = (*model.parts()["vit"], *model.parts()["mlp"])
    named = step.weights.parameters.items()
    return {name: bit_sum(p).item() for name, p in named if name.startswith(front)}


def pictures_on_one_replica(rank, family):
    """Two replicas of one stage, replicated and sharded, tower trained and frozen."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    results = {}
    for mode in ("full", "frozen"):
        for is_sharded in (False, True):
            model = build(family, **MODES[mode])
            replicas = Replicas(mesh.get_group("dp"))
            if is_sharded:
                replicas = ShardedReplicas([model], mesh=mesh["dp"])
            runner = PipelineRunner(model, device=CPU, group=mesh.get_group("pp"))
            step = TrainStep(
                runner,
                make_optimizer=lambda named: torch.optim.AdamW(named.values(), lr=1.0),
                loss_fn=sft,
                learning_rate=lambda step: 0.01,
                replicas=replicas,
            )
            batch = image_batch(family) if rank == 0 else text_batch()
            losses = [step([batch, batch], step=number).loss for number in range(2)]
            start = copies_of_front(step, model)
            losses.append(step([text_batch()] * 2, step=2).loss)
            moved = [n for n, value in copies_of_front(step, model).items() if value != start[n]]
            assert moved == [], "no replica had a picture"
            seen = []
            runner.evaluate([batch], on_output=lambda output, _, seen=seen: seen.append(output))
            losses.append(seen[0].double().sum().item())
            results[f"{mode} {is_sharded}"] = losses
    return results


def test_replicas_with_and_without_pictures_work_together():
    first, second = run_ranks(pictures_on_one_replica, 2, "qwen3_vl")
    for mode in ("full", "frozen"):
        for result in (first, second):
            assert result[f"{mode} True"] == pytest.approx(result[f"{mode} False"], rel=1e-5)
        assert first[f"{mode} True"][:3] == second[f"{mode} True"][:3]
    assert first["full True"] != first["frozen True"]
