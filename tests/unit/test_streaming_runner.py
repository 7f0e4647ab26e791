"""Stages that stream against the same stages on a pipeline: losses, weights, evaluation.

The pipeline is held against plain transformers elsewhere. All here is one process.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import transformers

from loss_fn import sft
from pp_models import CausalLMStage
from pp_models.vision_language import stage_class_of
from prompt_fn import auto, fill
from stageline.checkpoint.load import load_split_model
from stageline.errors import UserError
from stageline.pipeline.runner import PipelineRunner
from stageline.streaming.lanes import Lane
from stageline.streaming.plan import Plan
from stageline.pipeline.schedules import make_schedule
from stageline.streaming.runner import StreamingRunner, even_plan
from stageline.testing.late_queues import late_lanes
from stageline.testing.tiny_batches import tiny_micro_batches
from stageline.testing.tiny_models import VISION_LANGUAGE, tiny_config
from stageline.testing.tiny_processors import tiny_processor
from stageline.testing.tiny_vision_batches import vision_micro_batches
from stageline.training.evaluation import evaluate
from stageline.training.optimizer_groups import optimizer_groups
from stageline.training.precision import MasterWeights
from stageline.training.step import TrainStep

NUM_STAGES = 4
LORA = {"llm_lora_num": 1, "lora_rank": 2, "lora_dropout": 0.3, "frozen_lm_head": True}


@pytest.fixture(autouse=True)
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@functools.cache
def processor_of(family):
    try:
        return tiny_processor(family)
    except ImportError as error:
        pytest.skip(str(error))


def save_whole(family, folder, **overrides):
    torch.manual_seed(3)
    auto_class = transformers.AutoModelForCausalLM
    if family in VISION_LANGUAGE:
        auto_class = transformers.AutoModelForImageTextToText
        vocab_size = len(processor_of(family).tokenizer)
        overrides |= {"vocab_size": vocab_size, "max_position_embeddings": 256}
    whole = auto_class.from_config(tiny_config(family, **overrides))
    with torch.no_grad():  # biases and norms start at 0 and 1, routers near zero: it hides mistakes
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole.save_pretrained(folder)


def stages_of(family, folder, **options):
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = stage_class_of(family) if family in VISION_LANGUAGE else CausalLMStage
    stages = []
    for stage in range(NUM_STAGES):
        model = kind(config, stage=stage, num_stages=NUM_STAGES, **options)
        load_split_model(model, folder, device="cpu", dtype=torch.float32)
        model.frozen()
        stages.append(model.train())
    return stages


def micro_batches_of(family):
    if family in VISION_LANGUAGE:
        return vision_micro_batches(processor_of(family), prompt_fn=fill, image_token=auto)
    return tiny_micro_batches(family)


def make_optimizer(parameters):
    return torch.optim.AdamW(optimizer_groups(parameters, weight_decay=0.1), lr=1e-2, eps=1e-6)


def train(runner, family, num_steps=3):
    """What is told of each step and of an evaluation, and all weights."""
    train_step = TrainStep(
        runner,
        make_optimizer=make_optimizer,
        loss_fn=sft,
        learning_rate=lambda step: 1e-2 / (1 + step),
        max_grad_norm=0.5,
        make_weights=getattr(runner, "make_weights", MasterWeights),
    )
    batches = micro_batches_of(family)
    told = []
    for step in range(num_steps):
        result = train_step(batches, step=step)
        told.append((result.loss, result.extra_loss, result.grad_norm))
    found = evaluate(runner, [batches], loss_fn=sft, keep=4)
    weights = {name: p.detach().clone() for name, p in runner.local.named_parameters().items()}
    return told, (found.loss, found.predicted), weights


def pipeline(stages):
    # micro-batches go backward in their order, as in a stream: sums are the same to the bit
    schedule = make_schedule("interleaved_1f1b", num_ranks=1, stages_per_rank=NUM_STAGES)
    return PipelineRunner(stages, device=torch.device("cpu"), schedule=schedule, seed=5)


def streamed(stages, **options):
    options = {"lanes": [Lane.cpu()], "plan": even_plan(NUM_STAGES, 1), **options}
    return StreamingRunner(stages, seed=5, **options)


CASES = {
    "llama": ("llama", {}, {}),
    "lora": ("llama", {}, LORA),
    "experts": ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}, {}),
    "deepstack": ("qwen3_vl", {}, {}),
    "images": ("llava", {}, {"frozen_vit": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_pipeline_to_the_bit(case, tmp_path):
    family, overrides, options = CASES[case]
    save_whole(family, tmp_path, **overrides)
    expected = train(pipeline(stages_of(family, tmp_path, **options)), family)
    made = train(streamed(stages_of(family, tmp_path, **options)), family)
    assert made[:2] == expected[:2]
    assert made[2].keys() == expected[2].keys()
    for name, weight in expected[2].items():
        assert torch.equal(made[2][name], weight), name
    losses = [loss for loss, *_ in made[0]]
    assert len(set(losses)) == len(losses), "nothing was learnt"
