"""Every schedule against plain transformers, for what may be trained and how rows are shaped.

The reference is one process, one whole model and plain PyTorch, on the same micro-batches in turn.
All schedules run in one group of ranks, on stages that are loaded once and put back after a run:
by our plan, and by the schedule class that torch has for it.
Equal to the last bit, but for two cases: looped_bfs goes through the micro-batches backwards, so it
adds gradients up in another order, and so does a tied weight.
"""

import copy
from functools import cache

import peft
import pytest
import torch
import transformers

from loss_fn import sft
from pp_models import CausalLMStage, VisionLanguageStage
from stageline.checkpoint.load import load_split_model
from stageline.data.batches.batch import pack_rows
from stageline.data.text.encode import Encoded
from stageline.pipeline.runner import PipelineRunner, TorchPipelineRunner
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import count_targets, drop_pixels, tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

NUM_STEPS = 2
MAX_NORM = 0.05
ADAMW = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}
LENGTHS = {"padded": (16,) * 8, "own": (14, 11, 19, 12, 10, 17, 13, 15)}
KINDS = (*LENGTHS, "packed")
VARIANTS = ("full", "tied", "lora", "frozen_half", "frozen_tower", "frozen_but_head")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def family_of(variant):
    return "internvl" if variant == "frozen_tower" else "llama"


def num_layers(schedule):
    """Return one layer for each stage, and one more where stages are few."""
    return max(3, schedule.num_stages + (schedule.num_stages < 6))


def is_trained(variant, name, num_layers):
    """Whether a variant without LoRA trains this parameter."""
    if variant == "frozen_tower":
        return "vision_tower" not in name
    if variant == "frozen_but_head":
        return "lm_head" in name or f"layers.{num_layers - 1}." in name
    if variant == "frozen_half":
        return not (
            "embed" in name or any(f"layers.{index}." in name for index in range(num_layers // 2))
        )
    return True


def num_micro_batches(num_ranks):
    """Return enough for each schedule to leave its warm-up: two rounds, one per stage of zbv."""
    return max(4, 2 * num_ranks)


def batches_of_step(variant, kind, step, count):
    family, seed = family_of(variant), 50 + step
    lengths = LENGTHS["own" if kind == "packed" else kind][:count]
    if kind != "packed":
        # another order in each step: no buffer of the last one fits
        return tiny_micro_batches(family, lengths=lengths[step:] + lengths[:step], seed=seed)
    samples = tiny_micro_batches(family, lengths=lengths * 2, seed=seed, rows=1)
    return [packed(pair) for pair in zip(samples[::2], samples[1::2], strict=True)]


def packed(samples):
    """Two samples in one row; that they come out as alone is tested in unit/test_packing.py."""
    row = []
    for sample in samples:
        length = int(sample["attention_mask"].sum())
        ids = sample["input_ids"][0, :length].tolist()
        is_target = (sample["labels"][0, :length] != -100).tolist()
        row.append(Encoded(ids, is_target, [False] * length))
    batch = pack_rows([row], pad_token_id=0)
    if "pixel_values" in samples[0]:
        batch["pixel_values"] = torch.cat([sample["pixel_values"] for sample in samples])
    return batch


def for_the_library(batch):
    """Positions that restart, and no mask: then it keeps samples apart by itself."""
    left_out = ("attention_mask", "sample_ids") if "sample_ids" in batch else ()
    return {name: value for name, value in batch.items() if name not in left_out}


def build_whole(variant, folder, num_layers):
    torch.manual_seed(3)
    config = tiny_config(family_of(variant), tied=variant == "tied", num_hidden_layers=num_layers)
    auto = (
        transformers.AutoModelForImageTextToText
        if variant == "frozen_tower"
        else transformers.AutoModelForCausalLM
    )
    whole = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # transformers starts biases and norms at 0 and 1, which hides mistakes
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole.save_pretrained(folder)
    if variant != "lora":
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_(is_trained(variant, name, num_layers))
        return whole.train()
    adapted = peft.get_peft_model(
        whole, peft.LoraConfig(r=2, lora_alpha=4.0, target_modules=LINEAR)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # B starts at zero, which would hide A's gradient
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted.train()


def our_name(name):
    """Return our name of a parameter of peft."""
    return (
        name.removeprefix("base_model.model.")
        .replace("lora_A.default", "lora.lora_A")
        .replace("lora_B.default", "lora.lora_B")
        .replace("base_layer", "lora_module")
    )


def trained_of(whole):
    return {our_name(n): p for n, p in whole.named_parameters() if p.requires_grad}


def reference_run(variant, kind, whole, num_batches):
    trained = trained_of(whole)
    optimizer = torch.optim.AdamW(trained.values(), **ADAMW)
    steps = []
    for step in range(NUM_STEPS):
        micro_batches = batches_of_step(variant, kind, step, num_batches)
        count = torch.tensor(float(count_targets(micro_batches)))
        optimizer.zero_grad()
        loss = torch.zeros(())
        for batch in micro_batches:
            inputs = for_the_library(batch)
            share = whole(**inputs, num_items_in_batch=count, use_cache=False).loss
            share.backward()
            loss = loss + share.detach()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
        assert norm > MAX_NORM, "clipping must act, or the test shows nothing"
        grads = {name: p.grad.clone() for name, p in trained.items()}
        optimizer.step()
        steps.append({"loss": loss.item(), "norm": norm.item(), "grads": grads})
    weights = {name: p.detach().clone() for name, p in trained.items()}
    return {"steps": steps, "weights": weights}


def build_stage(variant, folder, start, *, stage, num_stages):
    stage_class = VisionLanguageStage if variant == "frozen_tower" else CausalLMStage
    lora = {"llm_lora_num": 1, "lora_rank": 2, "lora_alpha": 4.0, "frozen_lm_head": True}
    config = transformers.AutoConfig.from_pretrained(folder)
    model = stage_class(
        config, stage=stage, num_stages=num_stages, **(lora if variant == "lora" else {})
    )
    load_split_model(model, folder, device="cpu", dtype=torch.float32)
    model.frozen()
    for name, parameter in model.named_parameters():
        if variant != "lora":
            parameter.requires_grad_(
                is_trained(variant, name, config.get_text_config().num_hidden_layers)
            )
        elif name in start:
            parameter.data.copy_(start[name])
    return model.train()


class Variant:
    """Its whole model and its stages as they are before the first step."""

    def __init__(self, name, folder, num_layers):
        self.name, self.folder = name, folder
        self._whole = build_whole(name, folder, num_layers)
        self._start = {n: p.detach().clone() for n, p in trained_of(self._whole).items()}
        self._stages = {}

    def reference(self, kind, num_batches):
        return reference_run(self.name, kind, copy.deepcopy(self._whole), num_batches)

    def load_stages(self, num_stages):
        """Before ranks are forked, which inherit them."""
        for stage in range(num_stages):
            if (num_stages, stage) not in self._stages:
                model = build_stage(
                    self.name, self.folder, self._start, stage=stage, num_stages=num_stages
                )
                start = {n: p.detach().clone() for n, p in model.named_parameters()}
                self._stages[num_stages, stage] = model, start

    @torch.no_grad()
    def stages_of(self, rank, schedule):
        """Reset what an earlier schedule has trained."""
        models = []
        for stage in schedule.stages_of(rank):
            model, start = self._stages[schedule.num_stages, stage]
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])
                parameter.grad = None
            models.append(model)
        return models


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    return cache(lambda name, layers: Variant(name, tmp_path_factory.mktemp(name), layers))


def split_run(rank, variant, kind, schedule, runner_class=PipelineRunner):
    models = variant.stages_of(rank, schedule)
    runner = runner_class(models, device=torch.device("cpu"), schedule=schedule)
    train_step = TrainStep(
        runner,
        make_optimizer=lambda parameters: (
            torch.optim.AdamW(parameters.values(), **ADAMW) if parameters else None
        ),
        loss_fn=sft,
        learning_rate=lambda step: ADAMW["lr"],
        max_grad_norm=MAX_NORM,
    )
    steps = []
    for step in range(NUM_STEPS):
        count = num_micro_batches(schedule.num_ranks)
        micro_batches = batches_of_step(variant.name, kind, step, count)
        if rank > 0:
            micro_batches = [drop_pixels(batch) for batch in micro_batches]
        result = train_step(micro_batches, step=step)
        grads = {
            name: p.grad.clone()
            for name, p in runner.local.named_parameters().items()
            if p.grad is not None
        }
        steps.append({"loss": result.loss, "norm": result.grad_norm, "grads": grads})
    weights = {
        name: p.detach().clone()
        for name, p in runner.local.named_parameters().items()
        if p.requires_grad
    }
    return {"steps": steps, "weights": weights}


def compared_runs(rank, models, kind, runs, references):
    """Run and compare all; return the names of gradients by step, and of weights, of each run."""
    found = []
    for name, run in runs.items():
        layers = num_layers(run[0])
        variant, reference = models[layers], references[layers]
        ours = split_run(rank, variant, kind, *run)
        bitwise = "looped_bfs" not in name and variant.name != "tied"
        compare(ours, reference, bitwise=bitwise, where=f"{name}, rank {rank}")
        found.append([*(list(step["grads"]) for step in ours["steps"]), list(ours["weights"])])
    return found


def compare(ours, reference, *, bitwise, where):
    def same(ours, theirs, what):
        if bitwise:
            assert torch.equal(ours, theirs), (
                f"{where}: {what} is {(ours - theirs).abs().max()} off"
            )
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=f"{where}: {what}")

    tolerance = 0 if bitwise else 1e-6
    for step, (made, expected) in enumerate(zip(ours["steps"], reference["steps"], strict=True)):
        for figure in ("loss", "norm"):
            wanted = pytest.approx(expected[figure], rel=tolerance, abs=0)
            assert made[figure] == wanted, f"{where}: {figure} of step {step}"
        for name, grad in made["grads"].items():
            same(grad, expected["grads"][name], f"gradient of {name} in step {step}")
    for name, weight in ours["weights"].items():
        same(weight, reference["weights"][name], f"weight {name}")


def all_runs(num_ranks, with_torchs):
    """Name -> (schedule, runner class)."""
    schedules = {name: make_schedule(name, num_ranks=num_ranks) for name in SCHEDULES}
    if num_ranks == 2:
        schedules["three_a_rank"] = make_schedule(
            "interleaved_1f1b", num_ranks=2, stages_per_rank=3
        )
    runs = {name: (schedule, PipelineRunner) for name, schedule in schedules.items()}
    if with_torchs:
        runs |= {
            f"torch's {name}": (schedule, TorchPipelineRunner)
            for name, schedule in schedules.items()
            if schedule.kind.torch_name
        }
    return runs


# Two ranks have all schedules and variants, on rows of unequal lengths; full training has each kind
# of rows. Four ranks make the pipeline deeper, and a variant gets the rows that are hardest for it.
ON_FOUR = [
    ("full", "own"),
    ("full", "packed"),
    ("tied", "own"),
    ("lora", "packed"),
    ("frozen_half", "packed"),
    ("frozen_tower", "own"),
    ("frozen_but_head", "padded"),
]
CASES = [
    ("full", "own", 1),
    ("full", "packed", 1),
    *(("full", kind, 2) for kind in KINDS),
    *((variant, "own", 2) for variant in VARIANTS[1:]),
    ("frozen_tower", "packed", 2),
    *((variant, kind, 4) for variant, kind in ON_FOUR),
]
# classes of torch run the same passes: on full training, and where a rank's first stage or last one
# has no gradient
WITH_TORCHS = {
    *(("full", "own", ranks) for ranks in (2, 4)),
    ("frozen_tower", "own", 2),
    ("frozen_but_head", "own", 2),
}


@pytest.mark.parametrize("variant, kind, num_ranks", CASES)
def test_every_schedule_equals_the_whole_model(variant, kind, num_ranks, variants):
    num_batches = num_micro_batches(num_ranks)
    runs = all_runs(num_ranks, (variant, kind, num_ranks) in WITH_TORCHS)
    models, references = {}, {}
    for schedule, _ in runs.values():
        layers = num_layers(schedule)
        if layers not in models:
            models[layers] = variants(variant, layers)
            references[layers] = models[layers].reference(kind, num_batches)
        models[layers].load_stages(schedule.num_stages)
        schedule.orders(num_batches)  # ranks find them in their cache
    ranks = run_ranks(compared_runs, num_ranks, models, kind, runs, references)
    for (name, (schedule, _)), *of_ranks in zip(runs.items(), *ranks, strict=True):
        reference = references[num_layers(schedule)]
        wanted = [*(set(step["grads"]) for step in reference["steps"]), set(reference["weights"])]
        found = [set().union(*names) for names in zip(*of_ranks, strict=True)]
        assert found == wanted, f"{name} on {num_ranks} ranks"
