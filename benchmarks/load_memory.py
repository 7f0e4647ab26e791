"""Measures the peak host memory of one rank while it loads its stage of a sharded checkpoint.

    python benchmarks/load_memory.py
    python benchmarks/load_memory.py --dtype float32     # the checkpoint is bfloat16: casts

Claim: peak resident memory stays below 1.2 x the own stage's bytes + the import footprint. Each
stage is loaded in a fresh process, and every weight is read before the peak is. The import
footprint is the peak of the same process with a model of the same class of 0.1 MB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LIMIT = 1.2
MEGA = 1e6

SHAPES = {
    # 0.94 GB in bfloat16, the head and the embeddings 65 MB each
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    # 0.6 GB in bfloat16; experts are one file entry each on disk and fused in memory
    "mixtral": {
        "vocab_size": 16000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 20,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
    },
}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}


def read_peak() -> int:
    """Peak resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmHWM"].split()[0]) * 1024


def make_checkpoint(family: str, folder: Path, *, is_tiny: bool) -> None:
    """Writes a random bfloat16 checkpoint in shards of 200 MB."""
    import torch
    import transformers

    classes = {"llama": transformers.LlamaConfig, "mixtral": transformers.MixtralConfig}
    shape = SHAPES[family] | (TINY if is_tiny else {})
    config = classes[family](**shape, tie_word_embeddings=False)
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole.save_pretrained(folder, max_shard_size="200MB")


def load_stage(folder: Path, stage: int, num_stages: int, dtype_name: str) -> dict[str, int]:
    """Loads one stage in this process and reports bytes."""
    import torch
    from transformers import AutoConfig

    from pp_models import CausalLMStage
    from stageline.checkpoint.load import load_split_model

    torch.set_num_threads(1)
    dtype = getattr(torch, dtype_name)
    config = AutoConfig.from_pretrained(folder)
    model = CausalLMStage(config, stage=stage, num_stages=num_stages, dtype=dtype)
    load_split_model(model, folder, device="cpu", dtype=dtype)
    checksum = sum(float(parameter.sum()) for parameter in model.parameters())
    assert checksum == checksum, "a weight is NaN"
    peak = read_peak()
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"own": own, "peak": peak}


def run_child(*arguments: str) -> str:
    """Runs this file in a fresh process; what it printed last."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or [""])[-1]


def run_stage(folder: Path, stage: int, num_stages: int, dtype_name: str) -> dict[str, int]:
    """`load_stage` in a fresh process."""
    arguments = ("--child", str(folder), str(stage), str(num_stages), "--dtype", dtype_name)
    return json.loads(run_child(*arguments))


def measure(options: argparse.Namespace, folder: Path, tiny: Path) -> float:
    """Prints one line per stage; returns the largest factor."""
    footprint = run_stage(tiny, 0, 1, options.dtype)["peak"]
    files = sorted(folder.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    print(f"{options.family}: {total / MEGA:.0f} MB on disk in {len(files)} files, read as "
          f"{options.dtype}")  # fmt: skip
    print("| stages | stage | own MB | import MB | peak MB | (peak - import) / own |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for num_stages in options.stages:
        for stage in range(num_stages):
            found = run_stage(folder, stage, num_stages, options.dtype) | {"import": footprint}
            factor = (found["peak"] - footprint) / found["own"]
            worst = max(worst, factor)
            megas = [f"{found[name] / MEGA:.0f}" for name in ("own", "import", "peak")]
            print(f"| {num_stages} | {stage} | {' | '.join(megas)} | {factor:.3f} |", flush=True)
    return worst


def main() -> int:
    """Makes a checkpoint in a temporary folder and measures every stage of every split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, stage, num_stages = options.child
        print(json.dumps(load_stage(Path(folder), int(stage), int(num_stages), options.dtype)))
        return 0
    if options.make:
        make_checkpoint(options.family, Path(options.make), is_tiny=options.tiny)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        whole, tiny = Path(folder) / "whole", Path(folder) / "tiny"
        run_child("--make", str(whole), "--family", options.family)
        run_child("--make", str(tiny), "--family", options.family, "--tiny")
        worst = measure(options, whole, tiny)
    verdict = "holds" if worst <= LIMIT else "is missed"
    print(f"largest factor {worst:.3f}; the limit of {LIMIT} {verdict}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
