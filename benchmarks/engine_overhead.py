"""What the engine costs: a train step against a bare torch loop on the same stages, in turn.

Also the efficiency of two stages against the unsplit model on one thread. Figures:
benchmarks/engine_overhead_cpu_DATE.md. Usage: engine_overhead.py [MODEL_FOLDER] [--layers a,b]
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import AutoConfig, AutoModelForCausalLM

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.pipeline.runner import PipelineRunner
from stageline.training.loss_part import count_targets
from stageline.training.optimizers import optimizer_groups
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks

SEQUENCE = 128
NUM_MICRO_BATCHES = 8


def small_config():
    """Six layers of SmolLM2's shape with its vocabulary: a few seconds a step on one thread."""
    return AutoConfig.for_model(
        "llama",
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=12,
        vocab_size=16384,
        tie_word_embeddings=False,
    )


def micro_batches(vocab_size):
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(NUM_MICRO_BATCHES):
        ids = torch.randint(0, vocab_size, (1, SEQUENCE), generator=generator)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return made


def make_optimizer(parameters):
    return torch.optim.AdamW(optimizer_groups(parameters, weight_decay=0.0), lr=1e-5)


def build(config, rank, partition):
    stage = CausalLMStage(config, stage=rank, num_stages=len(partition), partition=partition)
    init_split_model(stage, seed=0, device="cpu", dtype=torch.float32)
    stage.frozen()
    return stage.train()


class BareStage(torch.nn.Module):
    """What torch's own schedule takes: ids or hidden states in, a tensor out."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, hidden_or_ids):
        return self.stage(hidden_or_ids, attention_mask=torch.ones(hidden_or_ids.shape[:2]).long())


def bare_step_of(stage, rank, num_stages, batches):
    """Schedule, clipping of the own stage and AdamW: nothing of the engine."""
    count = torch.tensor(float(sum(map(count_targets, batches))))
    bare = PipelineStage(BareStage(stage), rank, num_stages, torch.device("cpu"))

    def loss_fn(logits, labels):
        return sft(logits, {"labels": labels}, num_targets=count)

    schedule = Schedule1F1B(bare, NUM_MICRO_BATCHES, loss_fn=loss_fn, scale_grads=False)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-5, weight_decay=0.0)
    ids = torch.cat([batch["input_ids"] for batch in batches])

    def step():
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(ids, return_outputs=False)
        elif rank == num_stages - 1:
            schedule.step(target=ids, losses=[], return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()

    return step


def compare(rank, config, partition, rounds):
    """Seconds of each round: (ours, bare), in turn."""
    batches = micro_batches(config.vocab_size)
    ours_stage, bare_stage = (build(config, rank, partition) for _ in range(2))
    ours = TrainStep(
        PipelineRunner(ours_stage, device=torch.device("cpu")),
        make_optimizer=make_optimizer,
        loss_fn=sft,
        learning_rate=lambda step: 1e-5,
    )
    bare = bare_step_of(bare_stage, rank, len(partition), batches)
    times = {"ours": [], "bare": []}
    for index in range(rounds + 1):
        both = [("ours", lambda: ours(batches, step=0)), ("bare", bare)]
        for name, step in both if index % 2 else both[::-1]:
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if index:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return times


def unsplit(rank, config, rounds):
    """The plain model on one thread, the same micro-batches and optimizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    batches = micro_batches(config.vocab_size)
    count = torch.tensor(float(sum(map(count_targets, batches))))
    times = []
    for index in range(rounds + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        for batch in batches:
            model(**batch, num_items_in_batch=count, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if index:
            times.append(time.perf_counter() - start)
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="folder with config.json; default: a small one")
    parser.add_argument("--layers", default=None, help="layers per stage, such as 18,12")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    config = AutoConfig.from_pretrained(arguments.model) if arguments.model else small_config()
    config.tie_word_embeddings = False  # the bare loop cannot tie
    layers = config.num_hidden_layers
    partition = [layers - layers // 2, layers // 2]
    if arguments.layers:
        partition = [int(count) for count in arguments.layers.split(",")]
    times = run_ranks(compare, 2, config, partition, arguments.rounds, timeout=900)[0]
    alone = run_ranks(unsplit, 1, config, max(3, arguments.rounds // 2), timeout=900)[0]
    ours, bare = (statistics.median(times[name]) for name in ("ours", "bare"))
    ratios = [a / b for a, b in zip(times["ours"], times["bare"], strict=True)]
    one = statistics.median(alone)
    ideal = 2 * NUM_MICRO_BATCHES / (NUM_MICRO_BATCHES + 1)
    figures = {
        "partition": partition,
        "ours_seconds": round(ours, 4),
        "bare_seconds": round(bare, 4),
        "median_ratio_ours_to_bare": round(statistics.median(ratios), 4),
        "unsplit_seconds": round(one, 4),
        "speedup": round(one / ours, 3),
        "ideal_speedup": round(ideal, 3),
        "share_of_ideal": round(one / ours / ideal, 3),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
