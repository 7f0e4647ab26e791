"""A vision tower on stages of its own: equal to transformers' unsplit model, for every family.

Micro-batches come from real processors and the collate part; one of them has no image. Most cases
chain all stages in this process; real pipelines and whole runs come behind.
"""

import functools

import pytest
import torch
import transformers
from torch import nn

from loss_fn import sft
from pp_models import CausalLMStage, VisionLanguageStage, class_of_key
from stageline.checkpoint.load import load_split_model
from stageline.errors import UserError
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.stages.vision_stages import Departure
from tests.distributed.test_vision_parity import (
    divisor_of,
    micro_batches_of,
    processor_of,
    true_float64,  # noqa: F401 (for each test in here)
)
from tests.helpers.chain import evaluate_chain, run_chain
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import assert_same_tensors
from tests.helpers.small_vision_run import VisionJob, with_blocks
from tests.helpers.tiny_batches import drop_pixels
from tests.helpers.tiny_models import VISION_LANGUAGE, tiny_config

FLOAT64 = torch.float64
NUM_BLOCKS = 3
# trained parameters -> (stages of the tower, stages)
SPLITS = {"full": ((1, 2), (3, 4)), "frozen": ((2, 4),), "lora": ((2, 3),)}
OPTIONS = {
    "full": {},
    "frozen": {"frozen_vit": True},
    "lora": {"vit_lora_num": 1, "lora_rank": 2, "lora_alpha": 4.0},
}
TOWERS = ("model.vision_tower.", "model.visual.", "model.vision_model.")


# -- the reference ---------------------------------------------------------------------------


class Adapter(nn.Module):
    """The reference's own LoRA, with Stageline's parameter names."""

    def __init__(self, linear):
        super().__init__()
        self.lora_module = linear
        down = nn.Linear(linear.in_features, 2, bias=False, dtype=FLOAT64)
        up = nn.Linear(2, linear.out_features, bias=False, dtype=FLOAT64)
        self.lora = nn.ModuleDict({"lora_A": down, "lora_B": up})

    @property
    def weight(self):
        return self.lora_module.weight

    def forward(self, x):
        return self.lora_module(x) + 2.0 * self.lora["lora_B"](self.lora["lora_A"](x))


def is_of_tower(name):
    """Tell by names, independently of the code; the projectors of Qwen are in its tower."""
    return name.startswith(TOWERS) and "merger" not in name


def build_whole(family, mode, folder, *, tied=False):
    torch.manual_seed(3)
    vocab_size = len(processor_of(family).tokenizer)
    config = tiny_config(family, tied=tied, vocab_size=vocab_size, max_position_embeddings=256)
    config = with_blocks(config, NUM_BLOCKS)
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=FLOAT64)
    with torch.no_grad():  # transformers starts biases and norms at 0 and 1, which hides mistakes
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole.save_pretrained(folder)
    if mode == "lora":
        for name, module in list(whole.named_modules()):
            if is_of_tower(name) and isinstance(module, nn.Linear):
                whole.set_submodule(name, Adapter(module))
    for name, parameter in whole.named_parameters():
        if is_of_tower(name):
            parameter.requires_grad_(mode == "full" or (mode == "lora" and ".lora." in name))
    return whole.train()


def reference_of(family, whole):
    """Return losses and gradients of the unsplit model, one micro-batch after the other."""
    losses = []
    for batch in micro_batches_of(family):
        labels = batch["labels"][:, 1:]
        is_target = labels != -100
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = whole(**inputs, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits[is_target], labels[is_target], reduction="sum")
        loss = loss / divisor_of(family)
        loss.backward()
        losses.append(loss.detach())
    grads = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    return losses, grads


# -- the stages ------------------------------------------------------------------------------


def build_stage(family, mode, folder, whole, **kwargs):
    stage_class = class_of_key(family)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = stage_class(config, dtype=FLOAT64, **OPTIONS[mode], **kwargs)
    load_split_model(model, folder, device="cpu", dtype=FLOAT64)
    model.frozen()
    values = dict(whole.named_parameters())
    with torch.no_grad():  # adapters start at zero, which would hide mistakes
        for name, parameter in model.named_parameters():
            if ".lora." in name:
                parameter.copy_(values[name])
            assert torch.equal(parameter, values[name]), f"{name} is read wrong"
    return model.train()


def build_stages(family, mode, folder, whole, *, vision_stages, num_stages, **kwargs):
    options = {"num_stages": num_stages, "vision_stages": vision_stages, **kwargs}
    return [
        build_stage(family, mode, folder, whole, stage=stage, **options)
        for stage in range(num_stages)
    ]


def loss_fn_of(family):
    return functools.partial(sft, num_targets=divisor_of(family))


def compare(losses, grads, reference):
    expected_losses, expected = reference
    for ours, theirs in zip(losses, expected_losses, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg="loss")
    assert set(grads) == set(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-9, msg=name)


def grads_of(stages):
    """Return the gradients of all stages; those of a tied weight are added up."""
    grads = {}
    for model in stages:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grads[name] = grads[name] + parameter.grad if name in grads else parameter.grad
    return grads


def run_split(family, stages, **kwargs):
    losses = run_chain(stages, micro_batches_of(family), loss_fn=loss_fn_of(family), **kwargs)
    return losses, grads_of(stages)


# -- the proof -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SPLITS)
@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_stages_equal_the_unsplit_model(family, mode, tmp_path):
    whole = build_whole(family, mode, tmp_path)
    reference = reference_of(family, whole)
    for vision_stages, num_stages in SPLITS[mode]:
        stages = build_stages(
            family, mode, tmp_path, whole, vision_stages=vision_stages, num_stages=num_stages
        )
        held = [name for model in stages for name, _ in model.named_parameters()]
        assert sorted(held) == sorted(name for name, _ in whole.named_parameters())
        for model in stages[vision_stages:]:
            assert not any(is_of_tower(name) for name, _ in model.named_parameters())
        compare(*run_split(family, stages, splits_backward=num_stages == 4), reference)


def test_a_tied_weight_lies_behind_the_tower_and_on_the_last_stage(tmp_path):
    whole = build_whole("internvl", "full", tmp_path, tied=True)
    reference = reference_of("internvl", whole)
    options = {"vision_stages": 1, "vision_partition": [NUM_BLOCKS], "partition": [1, 3]}
    stages = build_stages("internvl", "full", tmp_path, whole, num_stages=3, **options)
    embedding = "model.language_model.embed_tokens.weight"
    holders = [embedding in dict(model.named_parameters()) for model in stages]
    assert holders == [False, True, True]
    compare(*run_split("internvl", stages), reference)


def test_recomputed_blocks_give_the_same(tmp_path):
    whole = build_whole("qwen3_vl", "full", tmp_path)
    reference = reference_of("qwen3_vl", whole)
    stages = build_stages("qwen3_vl", "full", tmp_path, whole, vision_stages=2, num_stages=3)
    for model in stages:
        model.enable_gradient_checkpointing()
    assert sum(getattr(m, "is_recomputed", False) for s in stages[:2] for m in s.modules()) == 3
    compare(*run_split("qwen3_vl", stages), reference)


def test_without_an_image_the_tower_runs_and_has_no_say(tmp_path):
    whole = build_whole("llava", "full", tmp_path)
    stages = build_stages("llava", "full", tmp_path, whole, vision_stages=2, num_stages=3)
    batch = micro_batches_of("llava")[1]
    assert "pixel_values" not in batch
    calls = []
    for _, block in stages[0].tower_list():
        block.register_forward_hook(lambda *_: calls.append(1))
    run_chain(stages, [batch], loss_fn=loss_fn_of("llava"))
    assert len(calls) == len(stages[0].tower_list()) == 2
    for model in stages[:2]:  # zeros would let AdamW decay; plain transformers leaves None, too
        assert all(parameter.grad is None for parameter in model.parameters())


def real_pipeline(rank, family, folder, whole, schedule, num_ranks):
    kind = make_schedule(schedule, num_ranks=num_ranks)
    count = kind.num_stages
    stages = [
        build_stage(family, "full", folder, whole, stage=stage, vision_stages=2, num_stages=count)
        for stage in kind.stages_of(rank)
    ]
    runner = PipelineRunner(stages, device=torch.device("cpu"), schedule=kind)
    batches = micro_batches_of(family)
    if stages[0].stage > 0:
        batches = [drop_pixels(batch) for batch in batches]
    runner.step(batches, loss_fn=loss_fn_of(family))
    return grads_of(stages)


@pytest.mark.parametrize(
    ("family", "schedule", "num_ranks"), [("idefics3", "zbv", 2), ("qwen3_vl", "1f1b", 3)]
)
def test_real_pipelines_equal_the_unsplit_model(family, schedule, num_ranks, tmp_path):
    whole = build_whole(family, "full", tmp_path)
    losses, expected = reference_of(family, whole)
    results = run_ranks(real_pipeline, num_ranks, family, tmp_path, whole, schedule, num_ranks)
    merged = {}
    for result in results:
        assert not set(merged) & set(result)
        merged.update(result)
    compare(losses, merged, (losses, expected))


def test_a_wrong_border_is_noticed(tmp_path, monkeypatch):
    """The comparisons above can fail: hidden states that arrive a little off are enough."""
    whole = build_whole("internvl", "full", tmp_path)
    stages = build_stages("internvl", "full", tmp_path, whole, vision_stages=2, num_stages=3)
    batches, loss_fn = micro_batches_of("internvl"), loss_fn_of("internvl")
    right = evaluate_chain(stages, batches, loss_fn=loss_fn)
    forward = Departure.forward
    monkeypatch.setattr(Departure, "forward", lambda self, x, *_, **__: forward(self, 2 * x))
    wrong = evaluate_chain(stages, batches, loss_fn=loss_fn)
    differs = [float((a - b).abs()) > 1e-7 for a, b in zip(right, wrong, strict=True)]
    assert differs == [True, False, True]


# -- whole runs ------------------------------------------------------------------------------

LORA = "--vit-lora-num 1 --lora.rank 2 --lora.dropout 0.3".split()
LORA += "--parts.llm.frozen --parts.lm_head.frozen".split()


def run(job, name, *options, ranks):
    finished = job.fork(name, "--total-steps", 3, *options, ranks=ranks)
    assert finished.code == 0, finished.out + finished.err
    return finished.out


def test_a_run_gives_the_same_and_goes_on_with_another_number(tmp_path):
    job = VisionJob(tmp_path, dropout=0.2)
    split = ("--vision-stages", 2, "--num-stages", 4, "--schedule", "interleaved_1f1b")
    assert "tower 2-2" in run(job, "two", *split, ranks=2)
    run(job, "plain", ranks=2)
    middle = tmp_path / "two" / "checkpoints" / "step-00000002"
    counts = ("--vision-partition", "3", "--partition", "4", "--stages-per-rank", 1)
    run(job, "one", "--resume", middle, *counts, ranks=2)
    run(job, "none", "--resume", middle, ranks=2)
    losses = job.losses("plain")
    assert job.losses("two") == losses
    last = "checkpoints/step-00000003"
    for name in ("two", "one", "none"):
        assert job.losses(name)[3] == losses[3]
        assert_same_tensors(tmp_path / name / last, tmp_path / "plain" / last)


def test_adapters_of_a_tower_do_not_depend_on_its_cut(tmp_path):
    job = VisionJob(tmp_path, family="qwen2_5_vl")
    run(job, "plain", *LORA, ranks=2)
    run(job, "cut", *LORA, "--vision-stages", 2, ranks=3)
    assert job.losses("cut") == job.losses("plain")
    last = "checkpoints/step-00000003"
    assert_same_tensors(tmp_path / "cut" / last, tmp_path / "plain" / last)


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("internvl", {"vision_stages": 2, "num_stages": 2}, ["leaves none", "--num-stages 3"]),
        ("internvl", {"vision_stages": 3, "num_stages": 9}, ["of 2 blocks", "2 or less"]),
        (
            "internvl",
            {"vision_stages": 2, "vision_partition": [2, 1], "num_stages": 3},
            ["--vision-partition 2,1", "tower of 2 blocks"],
        ),
        ("llama", {"vision_stages": 1, "num_stages": 2}, ["llama", "vision tower"]),
        ("mllama", {"vision_stages": 1, "num_stages": 2}, ["'mllama'", "gemma3, idefics3"]),
    ],
)
def test_a_wrong_split_is_refused(family, options, words):
    stage_class = CausalLMStage if family == "llama" else VisionLanguageStage
    config = transformers.MllamaConfig() if family == "mllama" else tiny_config(family)
    with pytest.raises(UserError) as error:
        stage_class(config, stage=0, **options)
    for word in words:
        assert word in str(error.value)


def test_what_the_projector_takes_must_be_on_the_last_stage_of_the_tower():
    config = tiny_config("llava")
    config.vision_feature_layer = [0, -2]
    with pytest.raises(UserError, match="give it 3 blocks or more"):
        VisionLanguageStage(config, stage=0, num_stages=3, vision_stages=2)
