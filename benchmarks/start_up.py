"""Seconds until an answer: help, a slip in a key, the first step; of several checkouts in turn.

python benchmarks/start_up.py --trees . /path/to/other/checkout --rounds 3 \
    --digits .cache/digits-model --smollm2 .cache/smollm2

User seconds count all processes of a command; `import torch` alone stands beside them. The first
step is that of the digits job and of the SmolLM2 recipe on two ranks; the clock stops when the log
has it. Prints a table in Markdown: medians, and ratios to the last checkout.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEYS = "--prompt-fn fill --image-token auto --collate-fn sft --num-stages 2 --device cpu"
DIGITS = (
    f"--train-model internvl --dataset digits --prompt digits {KEYS} --batch-size 64 "
    "--micro-batch-size 16 --max-token-num 64 --config-path"
)
SMOLLM2 = (
    "--train-model llama --dataset jsonl --prompt chat --prompt-fn chat --image-token none "
    "--collate-fn sft --num-stages 2 --partition 18,12 --device cpu --llm-lora-num 1 "
    "--parts.lm_head.frozen --batch-size 16 --micro-batch-size 2 --max-token-num 160 "
    f"--dataset-path {ROOT / 'data/manpages_instruct.jsonl'} --model-path"
)


def measure(tree: Path, words: list[str], *, first_step: bool) -> tuple[float, float]:
    """(user seconds, seconds by the clock) of a command, or by the clock until its first step."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    folder, start = Path(tempfile.mkdtemp()), time.perf_counter()
    if first_step:
        words = [*words, "--total-steps", "1", "--eval-samples", "0", "--prove-split", "never"]
        words += ["--output-dir", str(folder / "run")]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    seconds = 0.0
    log = folder / "run/log.jsonl"
    while process.poll() is None and first_step and not seconds:
        if log.exists() and any(_is_step(line) for line in log.read_text().splitlines()):
            seconds = time.perf_counter() - start
        time.sleep(0.02)
    process.wait()
    seconds = seconds or time.perf_counter() - start
    shutil.rmtree(folder)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, seconds


def _is_step(line: str) -> bool:
    return line.endswith("}") and json.loads(line).get("kind") == "train"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trees", type=Path, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--digits", type=Path, help="folder of the digits job's model")
    parser.add_argument("--smollm2", type=Path, help="folder of the recipe's model")
    options = parser.parse_args()
    jobs = {"--help": ["--help"], "a slip": ["--train-model", "intervnl"]}
    if options.digits:
        jobs["first step, digits"] = [*DIGITS.split(), str(options.digits.absolute())]
    if options.smollm2:
        jobs["first step, SmolLM2"] = [*SMOLLM2.split(), str(options.smollm2.absolute())]
    trees = [tree.absolute() for tree in options.trees]
    found: dict[tuple[str, Path], list[tuple[float, float]]] = {}
    torch_alone = [measure(trees[0], ["-c", "import torch"], first_step=False)[0] for _ in range(3)]
    print(f"`import torch` alone: {statistics.median(torch_alone):.2f} user seconds\n")
    for job, words in jobs.items():
        is_step = job.startswith("first")
        for number in range(options.rounds):
            for tree in trees if number % 2 else reversed(trees):
                one = measure(tree, [str(tree / "train_pp.py"), *words], first_step=is_step)
                found.setdefault((job, tree), []).append(one)
    print("| job | checkout | user s | to the last | seconds | to the last |")
    print("|---" * 6 + "|")
    for job in jobs:
        medians = {
            tree: [statistics.median(column) for column in zip(*found[job, tree], strict=True)]
            for tree in trees
        }
        last = medians[trees[-1]]
        for tree, (user, clock) in medians.items():
            ratios = f"{user / last[0]:.2f} | {clock:.2f} | {clock / last[1]:.2f}"
            print(f"| {job} | {tree.name} | {user:.2f} | {ratios} |")


if __name__ == "__main__":
    main()
