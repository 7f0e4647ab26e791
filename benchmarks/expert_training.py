"""Step time and peak bytes of LoRA on experts on a CPU: ways of the experts, and of the head.

    OMP_NUM_THREADS=1 python benchmarks/expert_training.py [--quantization nf4]

Ways of the experts are transformers' own: `eager`, `grouped_mm`, `batched_mm`. "summed" forms
W + BA of all experts before each grouped product, as it was until 2026-11-28. All ways train the
same model in turn, round after round; seconds are the processor's. Peak: bytes of live tensors in a
step beyond those before it (moments are there), in a step of its own.
"""

import argparse
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_training
import torch
from gpu_training import IGNORED, Setup, config_of, make_optimizer, make_stage, micro_batches

from loss_fn import sft
from stageline.distributed.process_group import distributed_context
from stageline.modules import expert_weight
from stageline.modules.chunked_loss import LossByToken
from stageline.pipeline.live_bytes import PeakBytes
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.training.step import TrainStep

MIB = 2**20
# hidden, intermediate, layers, heads, key-value heads, vocabulary; as gpu_training.SHAPES
gpu_training.SHAPES["small-a3b"] = (256, 128, 2, 4, 2, 49152)
gpu_training.EXPERTS["small-a3b"] = (16, 4, 64)
WAYS = [
    (experts, chunk)
    for experts in ("eager", "batched_mm", "grouped_mm", "grouped_mm, summed")
    for chunk in (0, 256)
]


@contextmanager
def ways_of_experts(experts):
    """While open, summands of weights are formed if the way says so."""
    grouped = () if experts.endswith("summed") else expert_weight._GROUPED
    with mock.patch.object(expert_weight, "_GROUPED", grouped):
        yield


def make_step(setup, experts, context):
    """Return a training step of one stage, with weights that are the same for each way."""
    torch.manual_seed(0)
    stage = make_stage(setup, config_of(setup.size, setup.sequence), 0, 1, context.device)
    # set behind the tracing pass, which cannot look at the numbers of tokens as `eager` does
    stage.whole.config._experts_implementation = experts.partition(",")[0]
    loss_fn = sft
    if setup.logits_chunk:
        loss_fn = LossByToken(sft, whole=stage.whole, chunk=setup.logits_chunk)
    schedule = make_schedule("1f1b", num_ranks=1, stages_per_rank=None)
    runner = PipelineRunner(
        [stage], device=context.device, group=context.pp_group, schedule=schedule
    )
    return TrainStep(
        runner, make_optimizer=make_optimizer, loss_fn=loss_fn, learning_rate=lambda step: 1e-4
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=gpu_training.EXPERTS, default="small-a3b")
    parser.add_argument("--sequence", type=int, default=384)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", choices=("", "nf4", "int8"), default="")
    options = vars(parser.parse_args())
    num_rounds = options.pop("rounds")
    setup = Setup(**options, rows=1, lora=True, checkpointing=True)
    torch.set_num_threads(1)
    batches = micro_batches(setup)
    for batch in batches:  # half of the tokens are in the loss
        batch["labels"][:, : setup.sequence // 2] = IGNORED
    with distributed_context(num_ranks=1) as context:
        steps = {
            way: make_step(replace(setup, logits_chunk=way[1]), way[0], context) for way in WAYS
        }
        losses, peaks, seconds = {}, {}, {way: [] for way in WAYS}
        for way, step in steps.items():
            with ways_of_experts(way[0]):
                losses[way] = step(batches, step=0).loss
                with PeakBytes(context.device).watch() as meter:
                    step(batches, step=1)
                peaks[way] = meter.peak
        for number in range(num_rounds):
            for way, step in steps.items():
                with ways_of_experts(way[0]):
                    start = time.process_time()
                    step(batches, step=2 + number)
                    seconds[way].append(time.process_time() - start)
    print("| experts | head over | s a step | x the first | peak MiB | x the first | loss |")
    print("|---|---|---|---|---|---|---|")
    first = statistics.median(seconds[WAYS[0]]), peaks[WAYS[0]]
    for way in WAYS:
        experts, chunk = way
        median, peak = statistics.median(seconds[way]), peaks[way]
        head = f"tokens in the loss, {chunk} at a time" if chunk else "all tokens"
        cells = (experts, head, f"{median:.2f}", f"{median / first[0]:.2f}")
        cells += (f"{peak / MIB:.0f}", f"{peak / first[1]:.2f}", f"{losses[way]:.6f}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
