"""The planner's split and advice against what is measured. CPU, one thread a rank.

`split`: uniform against measured on a model with a heavy vision tower and on one with a large
vocabulary; the slowest stage (each stage timed alone, in turn) at p = 2 and 4, and the step that
two ranks really run. `advice`: the advised way against every other one, simulated from the times
of whole stages at p = 2 and 4, and at p = 2 run as well unless --rounds is 0.
Figures: benchmarks/planner_cpu_DATE.md.
Usage: planner.py split|advice [--rounds N]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoConfig

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.pipeline.topology import uniform_partition
from stageline.planner.estimate import (
    ItemRun,
    MemoryRules,
    Workload,
    cost_of,
    durations_of,
    flow_of,
    measure,
    outline_of,
)
from stageline.planner.partition import Placement, legal_schedules
from stageline.planner.planner import Planner
from stageline.planner.simulate import simulate
from stageline.stages.vision_language import VisionLanguageStage
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
TOKENS, NUM_SAMPLES = 96, 8
TEXT = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def language_model(**changes):
    return AutoConfig.for_model("llama", **{**TEXT, **changes})


def heavy_tower():
    """64 image tokens of 256 patches, in a tower of about the weight of five layers."""
    vision = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "image_size": [64, 64],
        "patch_size": [4, 4],
        "hidden_dropout_prob": 0.0,
        "projection_dropout": 0.0,
    }
    return CONFIG_MAPPING["internvl"](
        vision_config=vision,
        text_config={"model_type": "qwen2", **TEXT},
        image_token_id=5,
        image_seq_length=64,
        tie_word_embeddings=False,
    )


def batch_of(config, rows):
    generator = torch.Generator().manual_seed(0)
    vocab_size = config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(9, vocab_size, (rows, TOKENS), generator=generator)
    batch = {}
    if config.model_type == "internvl":
        ids[:, 2:66] = 5
        batch["pixel_values"] = torch.randn(rows, 3, 64, 64, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, **batch}


def maker(config, folder, **options):
    """Pieces and stages with random weights."""
    config.save_pretrained(folder)
    stage_class = VisionLanguageStage if config.model_type == "internvl" else CausalLMStage

    def make(**kwargs):
        paths = {"config_path": folder, "processor_path": None, "checkpoint_path": None}
        return stage_class.build(**paths, is_piece=True, **options, **kwargs)[0]

    return make


def loss_of(output, batch):
    return sft(output, batch, num_targets=torch.tensor(1.0))


def stage_costs(make, outline, partition, workload, known):
    """Every stage of a partition, timed alone; stages of equal layers and ends only once."""
    found, start = [], 0
    for stage, count in enumerate(partition):
        key = (stage == 0, count, stage == len(partition) - 1, outline.sends(start + 1))
        if key not in known:
            model = make(stage=stage, num_stages=len(partition), partition=partition, device=CPU)
            sends = stage > 0 and outline.sends(start + 1)
            with ItemRun(model, workload, computes=True, sends=sends) as run:
                cost = cost_of(run.time())
            trains = any(p.requires_grad for p in model.parameters())
            known[key] = cost + type(cost)(trains=trains)
        found.append(known[key])
        start += count
    return found


def seconds_of_steps(rank, config, ways, rounds, options):
    """Two ranks run every way in turn; the seconds of each round."""
    with tempfile.TemporaryDirectory() as folder:
        make = maker(config, folder, **options)
        runs = []
        for name, stages_per_rank, partition, size in ways:
            schedule = make_schedule(
                name, num_ranks=2, stages_per_rank=None if stages_per_rank == 1 else stages_per_rank
            )
            models = [
                make(stage=s, num_stages=len(partition), partition=partition, device=CPU)
                for s in schedule.stages_of(rank)
            ]
            batches = [batch_of(config, size)] * (NUM_SAMPLES // size)
            runs.append((PipelineRunner(models, device=CPU, schedule=schedule), batches))
    times = [[] for _ in ways]
    for index in range(rounds + 1):
        for place, (runner, batches) in enumerate(runs):
            dist.barrier()
            start = time.perf_counter()
            runner.step(batches, loss_fn=loss_of)
            dist.barrier()
            if index:  # the first round warms up
                times[place].append(time.perf_counter() - start)
    return times


def compare_splits(rounds):
    models = {"heavy tower": heavy_tower(), "vocabulary 32768": language_model(vocab_size=32768)}
    for name, config in models.items():
        with tempfile.TemporaryDirectory() as folder:
            make = maker(config, folder)
            outline = outline_of(make)
            workload = Workload(batch_of(config, 1), lambda model: loss_of, CPU, repeats=7)
            costs = measure(outline, workload)
            for num_ranks in (2, 4):
                schedule = make_schedule("1f1b", num_ranks=num_ranks)
                uniform = uniform_partition(outline.num_layers, num_ranks)
                measured = Placement(costs, schedule, NUM_SAMPLES).by_seconds()
                figures = {"model": name, "p": num_ranks}
                for label, split in (("uniform", uniform), ("measured", measured)):
                    stages = stage_costs(make, outline, split, workload, {})
                    step = simulate(
                        schedule.orders(NUM_SAMPLES), durations_of(stages), num_stages=num_ranks
                    )
                    figures[label] = {
                        "split": split,
                        "slowest_stage_ms": round(1e3 * max(s.seconds() for s in stages), 2),
                        "predicted_ms": round(
                            1e3 * max(s.seconds() for s in costs.stages(split)), 2
                        ),
                        "simulated_step_ms": round(1e3 * step.seconds, 1),
                    }
                if num_ranks == 2:
                    ways = [("1f1b", 1, split, 1) for split in (uniform, measured)]
                    times = run_ranks(seconds_of_steps, 2, config, ways, rounds, {}, timeout=600)[0]
                    ratios = [a / b for a, b in zip(*times, strict=True)]
                    figures["run_step_ms"] = [round(1e3 * statistics.median(t), 1) for t in times]
                    figures["run_gain"] = round(statistics.median(ratios), 3)
                print(json.dumps(figures), flush=True)


@cache
def splits_of(num_layers, num_stages):
    return uniform_partition(num_layers, num_stages)


def every_way(costs_of_size, num_ranks):
    """(schedule, stages a rank, split, size) of all that can be run, uniform and planned splits."""
    ways = []
    for size, costs in costs_of_size.items():
        count = NUM_SAMPLES // size
        for schedule in legal_schedules(num_ranks, count, costs.num_layers):
            planned = Placement(
                costs, schedule, count, rules=MemoryRules(), most_steps=40
            ).by_seconds()
            uniform = splits_of(costs.num_layers, schedule.num_stages)
            for split in [planned] + ([uniform] if uniform != planned else []):
                per_rank = schedule.num_stages // num_ranks
                ways.append((schedule.name, per_rank, list(split), size))
    return ways


def compare_advice(rounds):
    config = language_model()
    for label, options in (("full", {}), ("lora", {"llm_lora_num": 1, "frozen_lm_head": True})):
        with tempfile.TemporaryDirectory() as folder:
            make = maker(config, folder, **options)
            for num_ranks in (2, 4):
                planner = Planner(
                    make,
                    make_schedule("1f1b", num_ranks=num_ranks),
                    num_samples=NUM_SAMPLES,
                    micro_batch_size=1,
                    micro_batch_of=lambda size: batch_of(config, size),
                    loss_for=lambda model: loss_of,
                    make_optimizer=lambda parameters: None,
                    device=CPU,
                    repeats=7,
                )
                choice = planner.advice()[0]  # micro-batches of 1 and 2
                advised = (
                    choice.schedule.name,
                    choice.stages_per_rank,
                    choice.expectation.partition,
                    choice.micro_batch_size,
                )
                ways = every_way({size: planner.measured(size) for size in (1, 2)}, num_ranks)
                if advised not in ways:
                    ways.append(advised)
                seconds = simulated(make, planner, ways, num_ranks)
                report(label, num_ranks, ways, seconds, advised, how="simulated")
                if num_ranks == 2 and rounds:
                    times = run_ranks(
                        seconds_of_steps, 2, config, ways, rounds, options, timeout=1200
                    )[0]
                    seconds = [statistics.median(t) for t in times]
                    report(label, num_ranks, ways, seconds, advised, how="run")


def simulated(make, planner, ways, num_ranks):
    """Steps simulated from stages that were built whole and timed alone."""
    known = {1: {}, 2: {}}
    found = []
    for name, per_rank, split, size in ways:
        schedule = make_schedule(
            name, num_ranks=num_ranks, stages_per_rank=None if per_rank == 1 else per_rank
        )
        workload = Workload(planner.micro_batch_of(size), lambda model: loss_of, CPU, repeats=7)
        stages = stage_costs(make, planner.outline, split, workload, known[size])
        step = simulate(
            schedule.orders(NUM_SAMPLES // size),
            durations_of(stages),
            num_stages=len(split),
            flow=flow_of(stages),
        )
        found.append(step.seconds)
    return found


def report(label, num_ranks, ways, seconds, advised, *, how):
    order = sorted(range(len(ways)), key=seconds.__getitem__)
    place = ways.index(advised)
    figures = {
        "training": label,
        "how": how,
        "p": num_ranks,
        "ways": len(ways),
        "advised": [advised, round(1e3 * seconds[place], 1)],
        "best": [[ways[i], round(1e3 * seconds[i], 1)] for i in order[:3]],
        "worst": [ways[order[-1]], round(1e3 * seconds[order[-1]], 1)],
        "advised_to_best": round(seconds[place] / seconds[order[0]], 3),
    }
    for name in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"):
        own = [s for way, s in zip(ways, seconds, strict=True) if way[0] == name]
        figures[name] = round(1e3 * min(own), 1) if own else None
    print(json.dumps(figures), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["split", "advice"])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (compare_splits if arguments.part == "split" else compare_advice)(arguments.rounds)


if __name__ == "__main__":
    main()
