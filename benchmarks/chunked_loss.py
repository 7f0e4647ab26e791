"""Measures the peak memory and the time of head and loss, over all tokens at once and in chunks.

    python benchmarks/chunked_loss.py
    python benchmarks/chunked_loss.py --dtype bfloat16
    python benchmarks/chunked_loss.py --device cuda --hidden 4096
    python benchmarks/chunked_loss.py --loss grpo --learnt 256 --tokens 1100 --vocabulary 152064

Claim: with --logits-chunk the logits of a micro-batch never exist, so the peak above weights,
hidden states and gradients grows with the chunk and not with the micro-batch. Each row is a fresh
process: a stage without layers to speak of makes one forward and backward pass. The peak is
VmHWM less what was resident before the pass; on a GPU it is what torch allocated.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MEGA = 1e6


def make_stage(options: argparse.Namespace) -> object:
    """A model of one narrow layer and a large head."""
    import torch
    import transformers
    from plan_memory import draw

    from pp_models import CausalLMStage

    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    dtype = getattr(torch, options.dtype)
    stage = CausalLMStage(config, stage=0, num_stages=1, dtype=dtype)
    draw(stage, device=torch.device(options.device), dtype=dtype)
    stage.logits_chunk = options.child
    return stage.train()


def resident() -> tuple[int, int]:
    """(resident now, most so far) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


def make_loss(options: argparse.Namespace, stage: object) -> Callable:
    """Over all tokens at once, or in chunks; of an answer with its figures left out."""
    import torch

    from loss_fn import sft
    from stageline.modules.chunked_loss import LossByToken
    from stageline.modules.policy_loss import PolicyOptions, policy_loss, with_stand_ins

    def grpo(logits: object, batch: dict, *, num_targets: torch.Tensor) -> torch.Tensor:
        counts = {"num_tokens": num_targets, "num_answers": torch.ones_like(num_targets)}
        chosen = PolicyOptions(importance_correction="none")
        return policy_loss(logits, with_stand_ins(batch), options=chosen, **counts)[0]

    loss_fn = sft if options.loss == "sft" else grpo
    if not options.child:
        return loss_fn
    return LossByToken(loss_fn, whole=stage.whole, chunk=options.child)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One row, in this process: bytes of the first pass, seconds of the later ones."""
    import torch

    stage = make_stage(options)
    on_gpu = options.device == "cuda"
    loss_fn = make_loss(options, stage)
    torch.manual_seed(0)
    ids = torch.randint(0, options.vocabulary, (1, options.tokens), device=options.device)
    labels = ids.clone()
    labels[:, : options.tokens - (options.learnt or options.tokens)] = -100
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    count = (labels[:, 1:] != -100).sum().float()

    # on a CPU the time of this process alone, which neighbours on the machine change little
    clock = time.perf_counter if on_gpu else time.process_time

    def one_pass() -> tuple[float, float]:
        stage.zero_grad()
        start = clock()
        loss = loss_fn(stage(ids, attention_mask=batch["attention_mask"]), batch, num_targets=count)
        loss.backward()
        value = loss.item()  # waits for a GPU
        return value, clock() - start

    before = torch.cuda.memory_allocated() if on_gpu else resident()[0]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    value, _ = one_pass()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident()[1]
    seconds = statistics.median(one_pass()[1] for _ in range(options.repeats))
    return {"bytes": peak - before, "seconds": seconds, "loss": value}


def run_child(chunk: int) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--child", str(chunk)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    """Prints a row for all tokens at once and one for each chunk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--loss", choices=("sft", "grpo"), default="sft")
    parser.add_argument("--learnt", type=int, help="tokens at the end; default: all")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 256, 64])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(measure(options)))
        return 0
    logits = options.tokens * options.vocabulary * 4 / MEGA
    print(f"vocabulary {options.vocabulary}, {options.tokens} tokens, hidden {options.hidden}")
    print(f"{options.dtype} on {options.device}; float32 logits of all tokens: {logits:.0f} MB")
    print("| chunk | peak MB | of the full one | seconds | x the full one | loss |")
    print("|---|---|---|---|---|---|")
    full = run_child(0)
    for chunk in (0, *options.chunks):
        row = run_child(chunk) if chunk else full
        memory, seconds = (row[name] / full[name] for name in ("bytes", "seconds"))
        cells = (chunk or "all", f"{row['bytes'] / MEGA:.0f}", f"{memory:.3f}")
        cells += (f"{row['seconds']:.2f}", f"{seconds:.2f}", f"{row['loss']:.6f}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
