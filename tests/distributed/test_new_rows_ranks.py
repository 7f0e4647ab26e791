"""Rows of new tokens over real pipelines and sharded replicas against one process."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.files import read_tensors
from stageline.checkpoint.load import fill_stage
from stageline.checkpoint.save import save_split_model
from stageline.modules.new_rows import NewRows
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.training.optimizers import optimizer_groups
from stageline.training.replicas import Replicas, ShardedReplicas
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
IDS = (VOCAB_SIZE, VOCAB_SIZE + 1, 40)
LORA = {"llm_lora_num": 1, "lora_rank": 2}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
MAX_NORM = 0.05


def batches(replica=0):
    made = tiny_micro_batches("llama", seed=3 + replica)
    for batch in made:
        for place, token in zip((2, 4, 6), IDS, strict=True):
            batch["input_ids"][0, place] = token
            batch["labels"][0, place] = token
    return made


def make_optimizer(parameters, *, eps=1e-8):
    if not parameters:
        return None
    groups = optimizer_groups(parameters, weight_decay=0.1)
    return torch.optim.AdamW(groups, lr=1.0, eps=eps)


def stages_of(base, plan, rank, dtype, options):
    rows = NewRows(IDS, ((9,), (10, 11), (12,)), frozenset(IDS), train_alone=True)
    stages = []
    for stage in plan.stages_of(rank):
        config = AutoConfig.from_pretrained(base)
        count = plan.num_stages
        model = CausalLMStage(config, stage=stage, num_stages=count, dtype=dtype, **options)
        fill_stage(model, str(base), dtype=dtype, new_rows=rows)
        stages.append(model)
    return stages


def train(stages, plan, *, group=None, replicas=None, micro_batches=None, eps=1e-8):
    runner = PipelineRunner(stages, device=CPU, schedule=plan, group=group)
    step = TrainStep(
        runner,
        make_optimizer=partial(make_optimizer, eps=eps),
        loss_fn=sft,
        learning_rate=lambda step: 0.02,
        max_grad_norm=MAX_NORM,
        replicas=replicas,
    )
    told, grads = [], []
    for index in range(3):
        result = step(micro_batches or batches(), step=index)
        told.append((result.loss, result.grad_norm))
        named = step.weights.parameters.items()
        grads.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    return told, grads, sorted(step.weights.shares)


def pipeline(rank, num_ranks, schedules, base, folder, dtype, options):
    told = []
    for schedule in schedules:
        plan = make_schedule(schedule, num_ranks=num_ranks)
        stages = stages_of(base, plan, rank, dtype, options)
        told.append(train(stages, plan)[0])
        save_split_model(stages, None, folder / f"{num_ranks}-{schedule}")
    return told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_split_equals_one_stage(tied, dtype, tmp_path):
    tiny_whole("llama", tmp_path / "base", tied=tied)
    frozen = {"frozen_llm": True, "frozen_lm_head": True}
    variant = (tmp_path / "base", tmp_path, dtype, frozen)
    schedules = ("1f1b", "zbv", "interleaved_zero_bubble")
    ((expected,),) = run_ranks(pipeline, 1, 1, ("1f1b",), *variant)
    one = read_tensors(tmp_path / "1-1f1b" / "model.safetensors")
    # tied in bf16: one stage rounds the sum of both gradients, two stages add in float32
    is_rounded = tied and dtype == torch.bfloat16
    rel, close = (1e-3, {"rtol": 2e-2, "atol": 2e-3}) if is_rounded else (1e-6, CLOSE)
    for rank in run_ranks(pipeline, 2, 2, schedules, *variant):
        for found in rank:
            assert [loss for loss, _ in found] == pytest.approx([x for x, _ in expected], rel=rel)
            assert [norm for _, norm in found] == pytest.approx(
                [x for _, x in expected], rel=max(rel, 1e-5)
            )
    before = read_base(tmp_path, dtype)
    old = [token for token in range(VOCAB_SIZE) if token not in IDS]
    for schedule in schedules:
        folder = tmp_path / f"2-{schedule}"
        for file in folder.glob("*.safetensors"):
            for name, value in read_tensors(file).items():
                torch.testing.assert_close(value, one[name], **close)
                if name not in ("model.embed_tokens.weight", "lm_head.weight"):
                    assert torch.equal(value, before[name]), name
                    continue
                assert torch.equal(value[old], before[name][old])
                # the new row has left its start
                assert not torch.equal(value[40], before[name][12])


def read_base(tmp_path, dtype):
    found = {}
    for file in (tmp_path / "base").glob("*.safetensors"):
        found.update({n: v.to(dtype) for n, v in read_tensors(file).items()})
    return found


def replicated(rank, base, folder, shards):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    plan = make_schedule("1f1b", num_ranks=2)
    stages = stages_of(base, plan, rank % 2, torch.float32, LORA)
    if shards:
        replicas = ShardedReplicas(stages, mesh=mesh["dp"])
    else:
        replicas = Replicas(mesh.get_group("dp"))
    trained = train(
        stages,
        plan,
        group=mesh.get_group("pp"),
        replicas=replicas,
        micro_batches=batches(mesh["dp"].get_local_rank()),
        eps=1e-3,  # about as large as a clipped gradient
    )
    save_split_model(
        stages, None, folder, group=mesh.get_group("pp"), replicas=mesh.get_group("dp")
    )
    return trained


def whole_gradients(ranks):
    """Return the clipped gradients of each step, by (stage, name), from those of four ranks."""
    steps = []
    for of_ranks in zip(*(grads for _, grads, _ in ranks), strict=True):
        whole = {}
        for stage in (0, 1):
            first, second = of_ranks[stage], of_ranks[2 + stage]
            assert first.keys() == second.keys()
            for name, grad in first.items():
                is_share = name in ranks[stage][2]
                assert is_share or torch.equal(grad, second[name]), f"replicas differ in {name}"
                whole[stage, name] = torch.cat([grad, second[name]]) if is_share else grad
        steps.append(whole)
    return steps


def test_sharded_replicas_train_the_same_rows(tmp_path):
    """Gradients are compared, and weights behind an AdamW that does not enlarge rounding.

    The norm of gradients that are shared out is a sum in another order, and with the kernels of
    some CPUs (AVX2) another number in its last bit. Clipping by it moves the last bit of every
    gradient, of which AdamW with torch's eps makes 5e-6 in a weight whose gradient is nearly zero.
    Without clipping, and with norms summed in float64, both runs are equal to the bit.
    """
    base = tmp_path / "base"
    tiny_whole("llama", base, tied=True)
    expected = run_ranks(replicated, 4, base, tmp_path / "plain", False)
    found = run_ranks(replicated, 4, base, tmp_path / "shards", True)
    for (one, *_), (other, *_) in zip(expected, found, strict=True):
        assert [x for pair in one for x in pair] == pytest.approx(
            [x for pair in other for x in pair], rel=1e-6
        )
    for one, other in zip(whole_gradients(expected), whole_gradients(found), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6 * MAX_NORM)
    one, other = (
        read_tensors(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "shards")
    )
    assert one.keys() == other.keys() and any("trainable_tokens" in name for name in one)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)
