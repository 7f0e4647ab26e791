"""Training speed on GPUs: Llama shapes, one or several virtual stages on a card, in turn.

Prints tokens/s, peak memory beside the planner's, and the model's share of the device's own matmul
speed (MFU against a measured ceiling, not a data sheet). Below torchrun each process is a replica.
Usage:

    python benchmarks/gpu_training.py --size 1b --sequence 2048 --stages 1,2,4 [--padded]
    python benchmarks/gpu_training.py --size 8b --sequence 4096 --rows 1 --stages 1 --lora
    torchrun --nproc-per-node 2 benchmarks/gpu_training.py --size 1b --stages 1 --shard
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from plan_memory import draw, expected, pieces_of
from transformers import AutoConfig

from commands.train_engines import settle_allocators
from loss_fn import sft
from optimizer import adamw
from pp_models import CausalLMStage
from stageline.distributed.process_group import distributed_context
from stageline.modules.chunked_loss import LossByToken
from stageline.modules.methods import Methods
from stageline.modules.quantised import Quantization, plain_shape
from stageline.modules.recompute import compile_layers
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.training.optimizers import optimizer_groups
from stageline.training.replicas import Replicas, ShardedReplicas
from stageline.training.step import TrainStep

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "tiny": (64, 128, 8, 4, 2, 512),
    "1b": (2048, 8192, 16, 32, 8, 32000),
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "8b": (4096, 14336, 32, 32, 8, 128256),  # Llama 3
    "tiny-a3b": (64, 64, 2, 4, 2, 512),
    "a3b": (2048, 768, 6, 32, 4, 151936),  # Qwen3-30B-A3B, 6 of its 48 layers
    "30b-a3b": (2048, 768, 48, 32, 4, 151936),
}
A3B = (128, 8, 128)  # experts, experts of a token, numbers of a head
EXPERTS = {"tiny-a3b": (4, 2, 32), "a3b": A3B, "30b-a3b": A3B}
LORA = {"llm_lora_num": 1, "lora_rank": 16, "frozen_lm_head": True}
LORA_ON_EXPERTS = {**LORA, "lora_target": [r".*experts\.[a-z_]*proj", "q_proj", "v_proj"]}
IGNORED = -100  # the label of padding


@dataclass(frozen=True)
class Setup:
    """What is trained how.

    Attributes:
        rows: of a micro-batch.
        num_stages: on each card.
        schedule: for several stages.
        padded: rows have lengths of their own, from half of `sequence` to all of it.
        shard: replicas share the weights out (FSDP2).
        compiled: torch.compile for each layer.
        profiled: the profiler looks at a step after the timed ones.
        quantization: nf4 or int8 for the frozen base below LoRA; "": none.
        eager: experts one after the other, not by grouped products.
        logits_chunk: tokens whose logits exist at a time; 0: all of a micro-batch, and a plan.
    """

    size: str = "1b"
    sequence: int = 2048
    rows: int = 4
    micro_batches: int = 8
    steps: int = 5
    num_stages: int = 1
    schedule: str = "interleaved_1f1b"
    lora: bool = False
    checkpointing: bool = False
    padded: bool = False
    shard: bool = False
    compiled: bool = False
    profiled: bool = False
    quantization: str = ""
    eager: bool = False
    logits_chunk: int = 0

    @property
    def options(self) -> dict[str, object]:
        """Return the options of a stage that say what trains."""
        lora = LORA_ON_EXPERTS if self.size in EXPERTS else LORA
        found: dict[str, object] = dict(lora) if self.lora else {}
        if self.quantization:
            found["methods"] = Methods(quantization=Quantization(self.quantization, double=True))
        return found


def config_of(size: str, sequence: int):
    hidden, intermediate, layers, heads, key_value_heads, vocabulary = SHAPES[size]
    experts = {}
    if size in EXPERTS:
        num_experts, chosen, head_dim = EXPERTS[size]
        experts = {"num_experts": num_experts, "num_experts_per_tok": chosen}
        experts |= {"moe_intermediate_size": intermediate, "head_dim": head_dim}
    return AutoConfig.for_model(
        "qwen3_moe" if experts else "llama",
        **experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
    )


def type_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def matmul_ceiling(device: torch.device, size: str) -> float:
    """The device's own operations a second, on the best of a few large square matrices."""
    sides = (4096, 8192, 12288) if device.type == "cuda" and not size.startswith("tiny") else (256,)
    return max(_matmul_speed(side, device, type_of(device)) for side in sides)


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
    width = config.num_attention_heads * config.head_dim
    attention = 2 * 2 * config.num_hidden_layers * width * sequence / 2
    return 2 * passes * num_matrix_weights + 3 * attention


def chosen_share(config) -> float:
    """Return the share of the experts that a token passes."""
    return getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)


def micro_batches(setup: Setup, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    vocabulary = SHAPES[setup.size][-1]
    made = []
    for _ in range(setup.micro_batches):
        shape = (setup.rows, setup.sequence)
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        lengths = torch.full((setup.rows, 1), setup.sequence)
        if setup.padded:
            least = setup.sequence // 2
            lengths = torch.randint(least, setup.sequence + 1, lengths.shape, generator=generator)
        mask = (torch.arange(setup.sequence) < lengths).long()
        labels = ids.masked_fill(mask == 0, IGNORED)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def make_optimizer(parameters):
    groups = optimizer_groups(parameters, weight_decay=0.0)
    return adamw(groups, learning_rate=1e-5, weight_decay=0.0)


def make_stage(setup: Setup, config, stage: int, num_stages: int, device: torch.device):
    """Return one stage with random weights, in training mode."""
    dtype = type_of(device)
    made = CausalLMStage(config, stage=stage, num_stages=num_stages, dtype=dtype, **setup.options)
    draw(made, device=device, dtype=dtype)
    made.methods.quantise(made, device=device)
    made.frozen()
    made.logits_chunk = setup.logits_chunk
    if setup.checkpointing:
        made.enable_gradient_checkpointing()
    if setup.compiled:
        compile_layers(made.layer_list())
    return made.train()


def planned_peak(setup: Setup, config, schedule, batch, device: torch.device) -> int:
    """Bytes that the planner expects of the card."""
    options = {**setup.options, "gradient_checkpointing": setup.checkpointing}
    with pieces_of(config, options, type_of(device)) as make:
        expectation = expected(
            make,
            schedule,
            batch,
            device=device,
            make_optimizer=lambda parameters: make_optimizer(parameters) if parameters else None,
            num_micro_batches=setup.micro_batches,
        )
    return expectation.memory[0].peak


def run(setup: Setup, context, config, schedule) -> tuple[float, list, list, str]:
    """Return the median seconds of a step, the stages, the losses, and where a step's time goes."""
    device = context.device
    stages = [
        make_stage(setup, config, stage, schedule.num_stages, device)
        for stage in range(schedule.num_stages)
    ]
    replicas = Replicas(context.dp_group)
    if setup.shard:
        replicas = ShardedReplicas(stages, mesh=context.mesh["dp"])
    loss_fn = sft
    if setup.logits_chunk:
        loss_fn = LossByToken(sft, whole=stages[-1].whole, chunk=setup.logits_chunk)
    train_step = TrainStep(
        PipelineRunner(stages, device=device, group=context.pp_group, schedule=schedule),
        make_optimizer=make_optimizer,
        loss_fn=loss_fn,
        learning_rate=lambda step: 1e-5,
        replicas=replicas,
    )
    if device.type == "cuda":  # weights in few bits were drawn in 16 bits
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    batches = micro_batches(setup, seed=context.dp_rank)
    seconds, losses = [], []
    for step in range(setup.steps + 2):
        _wait(device)
        start = time.perf_counter()
        losses.append(train_step(batches, step=step).loss)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    kernels = ""
    if setup.profiled:
        try:
            kernels = where_time_goes(train_step, batches[:2], device, step=setup.steps + 2)
        except Exception as error:  # the timed steps are worth more
            traceback.print_exc()
            kernels = f"no profile: {type(error).__name__}: {error}"
    return statistics.median(seconds[2:]), stages, losses, kernels


KERNELS = {  # kind -> parts of the names of its kernels; the first kind that has one counts
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "sdpa", "softmax_warp"),
    "matrices": ("gemm", "cutlass", "cublas", "nvjet", "wgmma", "xmma", "gemv", "splitk"),
    "loss and logits": ("cross_entropy", "nll", "log_softmax", "logsoftmax", "cunn_softmax"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "copies and casts": ("memcpy", "memset", "copy_"),
    "reductions": ("reduce",),
}


def where_time_goes(train_step, batches, device: torch.device, *, step: int) -> str:
    """Profile one step on a GPU: print the table of kernels, return seconds and shares by kind."""
    from torch.profiler import ProfilerActivity, profile

    def timed(number: int) -> float:
        start = time.perf_counter()
        train_step(batches, step=number)
        _wait(device)
        return time.perf_counter() - start

    timed(step)
    seconds = timed(step + 1)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timed(step + 2)
    averages = profiler.key_averages()
    table = averages.table(
        sort_by="self_device_time_total", row_limit=45, max_name_column_width=110
    )
    print(table)
    shares: Counter[str] = Counter()
    count = 0
    for kernel in averages:
        if kernel.self_device_time_total > 0:
            name = kernel.key.lower()
            kinds = (kind for kind, parts in KERNELS.items() if any(part in name for part in parts))
            shares[next(kinds, "elementwise and others")] += kernel.self_device_time_total
            count += kernel.count
    total = shares.total()
    if not total:
        return f"{seconds:.3f} s a step of {len(batches)} micro-batches; the profiler saw no kernel"
    told = ", ".join(f"{kind} {100 * micro / total:.0f} %" for kind, micro in shares.most_common())
    return (
        f"{seconds:.3f} s a step of {len(batches)} micro-batches, {total / 1e6:.3f} s of it in "
        f"{count} kernels and copies: {told}"
    )


def measure(setup: Setup, context, ceiling: float, *, plans: bool = True) -> dict[str, object]:
    """The figures of one way to train; `plans`: what memory the planner expects, too."""
    device, config = context.device, config_of(setup.size, setup.sequence)
    config._experts_implementation = "eager" if setup.eager else None
    is_cuda, num_stages = device.type == "cuda", setup.num_stages
    name = "1f1b" if num_stages == 1 else setup.schedule
    schedule = make_schedule(
        name, num_ranks=1, stages_per_rank=num_stages if num_stages > 1 else None
    )
    batches = micro_batches(setup)
    planned = None  # on a CPU nothing tells the peak to compare it with
    if is_cuda:
        if plans and not setup.shard and not setup.logits_chunk:
            planned = planned_peak(setup, config, schedule, batches[0], device)
        gc.collect()  # what was trained before
    median, stages, losses, kernels = run(setup, context, config, schedule)
    tokens = context.num_replicas * sum(int(each["attention_mask"].sum()) for each in batches)
    weights = sum(
        plain_shape(p).numel() * (chosen_share(config) if ".experts." in n else 1)
        for s in stages
        for n, p in s.named_parameters()
        if len(plain_shape(p)) > 1
    )
    weights -= config.vocab_size * config.hidden_size  # embeddings are looked up, not multiplied
    operations = operations_per_token(config, weights, setup.sequence, lora=setup.lora)
    return {
        "size": setup.size,
        "trains": "LoRA" if setup.lora else "all",
        "stages": num_stages,
        "schedule": name,
        "replicas": context.num_replicas,
        "tokens/s": round(tokens / median),
        "ms/step": round(1000 * median, 1),
        "MFU %": round(100 * operations * tokens / median / ceiling / context.num_replicas, 1),
        "peak GiB": gib(torch.cuda.max_memory_allocated(device)) if is_cuda else None,
        "planned GiB": planned and gib(planned),
        "loss": round(losses[-1], 4),
        **({"kernels": kernels} if setup.profiled else {}),
    }


def gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--schedule", default="interleaved_1f1b", help="for several stages")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quantization", choices=("", "nf4", "int8"), default="")
    for name in ("lora", "checkpointing", "padded", "shard", "compiled", "profiled", "eager"):
        parser.add_argument(f"--{name}", action="store_true")
    options = vars(parser.parse_args())
    stages = [int(count) for count in options.pop("stages").split(",")]
    settle_allocators()
    with distributed_context(num_ranks=1) as context:
        ceiling = matmul_ceiling(context.device, options["size"])
        facts = {"device": str(context.device), "matmul TFLOP/s": ceiling / 1e12}
        for count in stages:
            found = measure(replace(Setup(**options), num_stages=count), context, ceiling)
            if context.is_main:
                print(json.dumps(facts | found), flush=True)


if __name__ == "__main__":
    main()
