"""Training speed on one GPU: Llama shapes, one or several virtual stages on it, in turn.

Prints tokens/s, peak memory and the model's share of the device's own matmul speed (MFU against a
measured ceiling, not a data sheet). Usage:

    python benchmarks/gpu_training.py --size 1b --sequence 2048 --stages 1,2,4
    python benchmarks/gpu_training.py --size 7b --sequence 2048 --stages 1,2 --lora
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig

from loss_fn import sft
from optimizer import adamw
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.distributed.process_group import distributed_context
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.training.optimizers import optimizer_groups
from stageline.training.step import TrainStep

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads
    "tiny": (64, 128, 8, 4, 2),
    "1b": (2048, 8192, 16, 32, 8),
    "7b": (4096, 11008, 32, 32, 32),
}
VOCABULARY = 32000
LORA = {"llm_lora_num": 1, "lora_rank": 16, "frozen_lm_head": True}


def config_of(size: str, sequence: int):
    hidden, intermediate, layers, heads, key_value_heads = SHAPES[size]
    return AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
    )


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """The device's own operations a second, on the best of a few large square matrices."""
    sizes = (4096, 8192, 12288) if device.type == "cuda" else (512,)
    return max(_matmul_speed(size, device, dtype) for size in sizes)


def _matmul_speed(size: int, device: torch.device, dtype: torch.dtype) -> float:
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(12):
        _wait(device)
        start = time.perf_counter()
        for _ in range(10):
            left @ right
        _wait(device)
        seconds.append((time.perf_counter() - start) / 10)
    return 2 * size**3 / statistics.median(seconds[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def operations_per_token(config, num_matrix_weights: int, sequence: int, *, lora: bool) -> float:
    """2 a weight forward, 2 for the input's gradient, 2 for the weight's; and causal attention.

    A recomputed forward pass does not count, nor does a weight gradient that LoRA does not need.
    """
    passes = 2 if lora else 3
    attention = 2 * 2 * config.num_hidden_layers * config.hidden_size * sequence / 2
    return 2 * passes * num_matrix_weights + 3 * attention


def micro_batches(count: int, rows: int, sequence: int):
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (rows, sequence), generator=generator)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return made


def measure(options, context, config, num_stages: int, ceiling: float) -> dict[str, object]:
    device, dtype = context.device, torch.bfloat16 if context.device.type == "cuda" else None
    name = "1f1b" if num_stages == 1 else options.schedule
    schedule = make_schedule(
        name, num_ranks=1, stages_per_rank=num_stages if num_stages > 1 else None
    )
    stages = []
    for index in range(num_stages):
        stage = CausalLMStage(
            config,
            stage=index,
            num_stages=num_stages,
            dtype=dtype or torch.float32,
            **(LORA if options.lora else {}),
        )
        init_split_model(stage, seed=0, device=device, dtype=dtype or torch.float32)
        stage.frozen()
        stage.train()
        if options.checkpointing:
            stage.enable_gradient_checkpointing()
        stages.append(stage)
    runner = PipelineRunner(stages, device=device, schedule=schedule)
    train_step = TrainStep(
        runner,
        make_optimizer=lambda parameters: adamw(
            optimizer_groups(parameters, weight_decay=0.0), learning_rate=1e-5, weight_decay=0.0
        ),
        loss_fn=functools.partial(sft),
        learning_rate=lambda step: 1e-5,
    )
    batches = micro_batches(options.micro_batches, options.rows, options.sequence)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for step in range(options.steps + 2):
        _wait(device)
        start = time.perf_counter()
        result = train_step(batches, step=step)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[2:])
    tokens = options.micro_batches * options.rows * options.sequence
    weights = sum(p.numel() for s in stages for n, p in s.named_parameters() if p.ndim == 2)
    weights -= config.vocab_size * config.hidden_size  # embeddings are looked up, not multiplied
    operations = operations_per_token(config, weights, options.sequence, lora=options.lora)
    return {
        "size": options.size,
        "trains": "LoRA" if options.lora else "all",
        "stages": num_stages,
        "schedule": name,
        "tokens/s": round(tokens / median),
        "ms/step": round(1000 * median, 1),
        "MFU %": round(100 * operations * tokens / median / ceiling, 1),
        "peak GiB": round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
        if device.type == "cuda"
        else None,
        "loss": round(result.loss, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--schedule", default="interleaved_1f1b", help="for several stages")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    config = config_of(options.size, options.sequence)
    with distributed_context(num_ranks=1) as context:
        dtype = torch.bfloat16 if context.device.type == "cuda" else torch.float32
        ceiling = matmul_ceiling(context.device, dtype)
        print(json.dumps({"device": str(context.device), "matmul TFLOP/s": ceiling / 1e12}))
        for num_stages in map(int, options.stages.split(",")):
            print(json.dumps(measure(options, context, config, num_stages, ceiling)), flush=True)
            if context.device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
