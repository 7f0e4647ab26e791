"""Gradients of every schedule by our plan and by torch's own class, against the unsplit model.

    python benchmarks/torch_schedules.py    # in the environment whose torch is to be tried

Enters its rows into benchmarks/torch_schedules.md; those of the same torch are replaced. Two ranks
on gloo, float32 but for fp16; the reference is plain transformers in one process.
"""

import datetime
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.load import load_split_model
from stageline.errors import UserError
from stageline.pipeline.runner import PipelineRunner, TorchPipelineRunner
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from tests.distributed import test_moe as moe
from tests.distributed import test_schedule_parity as parity
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import count_targets

PAGE = Path(__file__).with_suffix(".md")
NUM_RANKS = 2
NUM_BATCHES = parity.num_micro_batches(NUM_RANKS)
CASES = {
    "ragged": ("full", "own"),
    "packed": ("full", "packed"),
    "frozen first half": ("frozen_half", "own"),
    "LoRA": ("lora", "own"),
    "tied": ("tied", "own"),
    "vision, frozen tower": ("frozen_tower", "own"),
    "router loss": ("router", "own"),
    "fp16": ("fp16", "own"),
}
HEAD = """# Schedules, by our plan and by torch's classes

`python benchmarks/torch_schedules.py` compares the gradients of two steps with those of plain
transformers on the unsplit model, one micro-batch after the other: `=` is equal to the bit, a
number is the largest difference beside the largest gradient of that parameter. 2 ranks on gloo,
CPU; each micro-batch has its own length.
`plan`: our order, carried out by torch's runtime, which is what `--engine pipeline` runs; `torch`:
the schedule class of torch (`--engine torch`). `looped_bfs` adds micro-batches up in reverse, and a
tied weight adds the sums of two stages.

| torch | engine | schedule | CASES |
|---|---|---|RULES|
""".replace("CASES", " | ".join(CASES)).replace("RULES", "---|" * (len(CASES) - 1) + "---")


def half_run(rank, variant, kind, schedule, runner_class):
    """Gradients of two steps in float16, of a loss that is scaled up; no update between them."""
    models = []
    for stage in schedule.stages_of(rank):
        config = AutoConfig.from_pretrained(variant.folder)
        place = {"stage": stage, "num_stages": schedule.num_stages}
        models.append(CausalLMStage(config, **place, dtype=torch.float16).train())
        load_split_model(models[-1], variant.folder, device="cpu", dtype=torch.float16)
    runner = runner_class(models, device=torch.device("cpu"), schedule=schedule)
    steps = []
    for step in range(parity.NUM_STEPS):
        batches = parity.batches_of_step("full", kind, step, NUM_BATCHES)
        count = count_targets(batches)
        for parameter in runner.local.named_parameters().values():
            parameter.grad = None
        runner.step(batches, loss_fn=lambda out, b, n=count: 64 * sft(out, b, num_targets=n))
        named = runner.local.named_parameters()
        steps.append({"grads": {n: p.grad.clone() for n, p in named.items()}})
    return {"steps": steps}


def half_reference(variant, kind):
    whole = AutoModelForCausalLM.from_pretrained(variant.folder, dtype=torch.float16).train()
    steps = []
    for step in range(parity.NUM_STEPS):
        batches = parity.batches_of_step("full", kind, step, NUM_BATCHES)
        count = count_targets(batches)
        whole.zero_grad()
        for batch in batches:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            logits = whole(**inputs, use_cache=False).logits
            (64 * sft(logits, batch, num_targets=count)).backward()
        steps.append({"grads": {n: p.grad.clone() for n, p in whole.named_parameters()}})
    return {"steps": steps}


def run_all(rank, run, runs):
    """Each run's result, or why it was refused."""
    found = []
    for name, runner_class in runs:
        try:
            found.append(run(rank, name, runner_class))
        except UserError as error:
            found.append(str(error))
    return found


def distance(results, reference):
    """The cell of a case."""
    if isinstance(results[0], str):
        return "refused"
    worst = 0.0
    for step, expected in enumerate(reference["steps"]):
        held = {n: g for result in results for n, g in result["steps"][step]["grads"].items()}
        assert held.keys() == expected["grads"].keys()
        for name, grad in held.items():
            theirs = expected["grads"][name]
            worst = max(worst, float((grad - theirs).abs().max() / theirs.abs().max()))
    return "=" if worst == 0 else f"{worst:.0e}"


def cells_of(case, folder, runs):
    variant, kind = CASES[case]
    if variant == "router":
        reference = moe.reference_run(moe.build_whole("mixtral", folder))

        def run(rank, name, runner_class):
            return moe.split_run(rank, folder, NUM_RANKS, name, runner_class=runner_class)
    else:
        is_half = variant == "fp16"
        model = parity.Variant("full" if is_half else variant, folder)
        for name in SCHEDULES:
            model.load_stages(make_schedule(name, num_ranks=NUM_RANKS).num_stages)
        reference = half_reference(model, kind) if is_half else model.reference(kind, NUM_BATCHES)

        def run(rank, name, runner_class):
            schedule = make_schedule(name, num_ranks=NUM_RANKS)
            split_run = half_run if is_half else parity.split_run
            return split_run(rank, model, kind, schedule, runner_class)

    results = run_ranks(run_all, NUM_RANKS, run, runs, timeout=600.0)
    return [distance([result[i] for result in results], reference) for i in range(len(runs))]


def main():
    version = torch.__version__.split("+")[0]
    kinds = {"plan": PipelineRunner, "torch": TorchPipelineRunner}
    runs = [(name, kind) for kind in kinds.values() for name in SCHEDULES]
    columns = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            columns.append(cells_of(case, Path(folder), runs))
        print(case, *columns[-1], flush=True)
    labels = [(engine, name) for engine in kinds for name in SCHEDULES]
    rows = [
        f"| {version} | {engine} | `{name}` | {' | '.join(cells)} |"
        for (engine, name), cells in zip(labels, zip(*columns, strict=True), strict=True)
    ]
    old = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    kept = [row for row in old if re.match(r"\| \d", row) and not row.startswith(f"| {version} ")]
    rows = sorted([*kept, *rows], key=lambda row: row.split("|")[1])  # stable
    PAGE.write_text(HEAD + "\n".join(rows) + f"\n\nMade on {datetime.date.today()}.\n")


if __name__ == "__main__":
    main()
