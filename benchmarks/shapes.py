"""Real tokens a second of three shapes of the same samples, in turn, on two stages.

Fixed: each row padded to --max-token-num. Own: sorted micro-batches, each padded to itself.
Packed: several samples a row. LoRA on the data of scripts/train_smollm2_lora.sh with its limits;
forward and backward without the optimizer. Figures: benchmarks/shapes_cpu_DATE.md.
Usage: shapes.py MODEL_FOLDER [--max-token-num 160] [--rounds 3]
"""

import argparse
import functools
import itertools
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

from dataset import sft as collate_fn
from loss_fn import sft
from pp_models import CausalLMStage
from prompt_fn import chat, none
from register import import_shelf, prompt_register
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.rows.json_lines import JsonLines
from stageline.data.text.processor import load_processor
from stageline.pipeline.live_bytes import tensor_bytes
from stageline.pipeline.runner import PipelineRunner
from stageline.training.loss_part import count_targets
from tests.helpers.ranks import run_ranks

DATA = Path(__file__).resolve().parents[1] / "data/manpages_instruct.jsonl"
BATCH = 16


def loaders(arguments, tokenizer):
    """The same rows in the same steps, in three shapes."""
    tokens = arguments.max_token_num
    import_shelf("prompt")
    collate = functools.partial(
        collate_fn,
        prompt=prompt_register["chat"],
        prompt_fn=chat,
        image_token=none,
        processor=tokenizer,
        pad_token_id=tokenizer.pad_token_id,
        max_token_num=tokens,
        stage=0,
        num_stages=2,
    )
    dataset = JsonLines(dataset_path=str(DATA), split="train")
    make = functools.partial(MicroBatchLoader, dataset, batch_size=BATCH, seed=0)
    whole_rows = functools.partial(collate, pad_to_multiple_of=tokens)
    return {
        "fixed": make(collate=whole_rows, micro_batch_size=2, order="given"),
        "own": make(collate=collate, micro_batch_size=2),
        "packed": make(
            collate=collate,
            micro_batch_size=1,
            packing=tokens,
            legal_counts=functools.partial(max, 2),
        ),
    }


def measure(rank, arguments):
    """What each shape took: seconds a step, and its micro-batches."""
    partition = [int(count) for count in arguments.layers.split(",")]
    model, tokenizer, _ = CausalLMStage.build(
        config_path=None,
        processor_path=None,
        checkpoint_path=arguments.model,
        stage=rank,
        num_stages=2,
        partition=partition,
        llm_lora_num=1,
        lora_rank=16,
        lora_alpha=32,
        frozen_lm_head=True,
    )
    runner = PipelineRunner(model, device=torch.device("cpu"), schedule="1f1b")
    steps = {
        name: list(itertools.islice(loader, arguments.rounds))
        for name, loader in loaders(arguments, tokenizer).items()
    }
    seconds, busy, losses = ({name: [] for name in steps} for _ in range(3))
    for index in range(arguments.rounds + 1):
        order = list(steps) if index % 2 else list(steps)[::-1]
        for name in order:
            batches = steps[name][max(index - 1, 0)]
            loss_fn = functools.partial(sft, num_targets=torch.tensor(count_targets(batches)))
            model.zero_grad()
            dist.barrier()
            start, own_start = time.perf_counter(), time.process_time()
            loss = runner.step(batches, loss_fn=loss_fn)
            own_seconds = time.process_time() - own_start
            dist.barrier()
            if index:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
                busy[name].append(own_seconds)
                losses[name].append(loss.item())
    return {
        name: {**facts(model, steps[name], seconds[name]), "busy": busy[name], "loss": losses[name]}
        for name in steps
    }


def facts(model, steps, seconds):
    """Figures of one shape."""
    shapes = [tuple(batch["input_ids"].shape) for step in steps for batch in step]
    border = sum(tensor_bytes(model.get_example_output(*shape)) for shape in shapes)
    real = [sum(int(batch["attention_mask"].sum()) for batch in step) for step in steps]
    return {
        "seconds": seconds,
        "tokens_per_second": [tokens / time for tokens, time in zip(real, seconds, strict=True)],
        "real_tokens": sum(real),
        "computed_tokens": sum(rows * width for rows, width in shapes),
        "micro_batches_per_step": [len(step) for step in steps],
        "border_megabytes_per_step": border / len(steps) / 1e6,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="folder of SmolLM2-135M-Instruct (prepare_smollm2.py)")
    parser.add_argument("--layers", default="18,12", help="layers per stage")
    parser.add_argument("--max-token-num", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    load_processor(arguments.model)  # a wrong folder is refused here
    first, last = run_ranks(measure, 2, arguments, timeout=3000)
    for name, figures in first.items():
        figures["loss"] = last[name]["loss"]
        # processor seconds of both stages: what a machine with other load still tells
        figures["busy"] = [a + b for a, b in zip(figures["busy"], last[name]["busy"], strict=True)]
        for key in ("seconds", "busy"):
            ratios = zip(figures[key], first["fixed"][key], strict=True)
            figures[f"{key}_fixed_to_this"] = statistics.median(
                fixed / own for own, fixed in ratios
            )
    print(json.dumps(first, indent=1))


if __name__ == "__main__":
    main()
