"""Bytes of QLoRA on experts under `--engine streaming`: what is planned, and what is taken.

    python benchmarks/streaming_experts.py           # Qwen3-30B-A3B as a whole, and 3 layers run
    python benchmarks/streaming_experts.py --tiny    # the same on a small shape, in seconds

The plan counts meta tensors. A random bfloat16 checkpoint of a few layers is loaded in a fresh
process, layer by layer, and trained for a step. "peak of loading" is the peak resident set less
that of the same process with a tiny model; "card" is the peak of the engine's own allocator: two
layers' weights and gradients, without activations.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers

from benchmarks.load_memory import read_peak
from loss_fn import sft
from pp_models import CausalLMStage
from stageline.modules.chunked_loss import LossByToken
from stageline.modules.methods import Methods
from stageline.modules.quantised import Quantization
from stageline.streaming.host_weights import host_bytes, make_host_weights
from stageline.streaming.lanes import Lane
from stageline.streaming.plan import costs_of
from stageline.streaming.runner import StreamingRunner, even_plan
from stageline.training.loss_part import LossPart
from stageline.training.step import TrainStep

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
SMALL = {"vocab_size": 512, "hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8}
SMALL |= {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SETTINGS = {"llm_lora_num": 1, "lora_rank": 16, "frozen_lm_head": True, "logits_chunk": 256}
SETTINGS["lora_target"] = ["q_proj", "v_proj", "experts.gate_up_proj", "experts.down_proj"]


def config_of(num_layers, *, is_tiny):
    """The shape of Qwen3-30B-A3B; None: with all its layers."""
    config = transformers.AutoConfig.from_pretrained(ROOT / "data/configs/Qwen3-30B-A3B")
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    for name, value in SMALL.items() if is_tiny else ():
        setattr(config, name, value)
    return config


def build(folder, kind, *, count, place, device):
    """Return one of as many stages as there are layers; on meta without weights."""
    quantization = Quantization(kind.split()[0], double=kind.endswith("double"))
    options = {"methods": Methods(quantization=quantization), "dtype": torch.bfloat16, **SETTINGS}
    paths = {"config_path": str(folder), "processor_path": None}
    paths["checkpoint_path"] = None if device == "meta" else str(folder)
    options |= {"stage": place, "num_stages": count, "device": device, "is_piece": True}
    return CausalLMStage.build(**paths, **options)[0].train()


def planned(folder, kind):
    """Return bytes of the host and of a card; all layers but the first and the last are alike."""
    count = transformers.AutoConfig.from_pretrained(folder).num_hidden_layers
    three = [build(folder, kind, count=count, place=i, device="meta") for i in (0, 1, count - 1)]
    first, middle, last = make_host_weights(three)
    hosted = [first, *[middle] * (count - 2), last]
    costs = costs_of(hosted)
    return {
        "weights": sum(home.parameter.nbytes for each in hosted for home in each.homes),
        "host": sum(host_bytes([each], torch.float32) for each in hosted),
        "card": max(
            one.backward_bytes + other.backward_bytes
            for one, other in zip(costs, costs[1:], strict=False)
        ),
    }


def taken(folder, kind, num_tokens):
    """Load all layers and train a step in this process; return bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    count = transformers.AutoConfig.from_pretrained(folder).num_hidden_layers
    stages = [build(folder, kind, count=count, place=i, device="cpu") for i in range(count)]
    found, last = {"peak of loading": read_peak()}, stages[-1]
    lane = Lane.cpu()
    runner = StreamingRunner(stages, lanes=[lane], seed=0, plan=even_plan(count, 1))
    ids = torch.randint(5, last.config.vocab_size, (1, num_tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    step = TrainStep(
        runner,
        make_optimizer=lambda named: torch.optim.AdamW(named.values(), lr=1e-4),
        loss_fn=LossPart(LossByToken(sft, whole=last.whole, chunk=last.logits_chunk)),
        learning_rate=lambda step: 1e-4,
        max_grad_norm=1.0,
        make_weights=runner.make_weights,
    )
    loss = step([batch] * 2, step=0).loss
    assert loss == loss, "the loss is NaN"
    hosted = runner.pipe._hosted_layers
    homes = [home for each in hosted for home in each.homes]
    found["weights"] = sum(home.parameter.nbytes for home in homes)
    tensors = [each for home in homes for each in (home.master, home.back, home.total, home.spare)]
    tensors += [each for one in hosted for each in one.staged.values()]
    found["host"] = found["weights"] + sum(each.nbytes for each in tensors if each is not None)
    return found | {"card": lane.pool.peak_bytes}


def child(*words):
    """Run this file in a fresh process; return the figures that it printed last."""
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", default=["nf4", "nf4 double", "int8"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(taken(*options.child, options.tokens)))
        return
    if options.make:
        config = config_of(options.layers, is_tiny=options.tiny)
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        whole.save_pretrained(options.make, max_shard_size="1GB")
        print("{}")
        return
    with tempfile.TemporaryDirectory() as folder:
        full, part, small = (Path(folder) / name for name in ("full", "part", "small"))
        config_of(None, is_tiny=options.tiny).save_pretrained(full)
        child("--make", part, "--layers", options.layers, *(["--tiny"] if options.tiny else []))
        child("--make", small, "--layers", 3, "--tiny")
        print("| kind | layers | bytes of | planned GiB | taken GiB | taken / planned |")
        print("|---|---|---|---|---|---|")
        for kind in options.kinds:
            for name, value in planned(full, kind).items():
                print(f"| {kind} | all | {name} | {value / GIB:.2f} | | |", flush=True)
            plan = planned(part, kind)
            found = child("--child", part, kind, "--tokens", options.tokens)
            known = child("--child", small, kind, "--tokens", options.tokens)["peak of loading"]
            found["peak of loading"] -= known
            plan["peak of loading"] = plan["weights"]
            for name, value in plan.items():
                ratio = f"{found[name] / GIB:.3f} | {found[name] / value:.3f}"
                print(f"| {kind} | {options.layers} | {name} | {value / GIB:.3f} | {ratio} |")


if __name__ == "__main__":
    main()
