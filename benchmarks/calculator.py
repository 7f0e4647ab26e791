"""Train a tiny model with GRPO to use a calculator, over several seeds.

    python benchmarks/calculator.py --seeds 0 1 2

Questions are products of two numbers of two digits, which the model cannot compute. A warm start
(SFT) shows it some answers with a call of the calculator and more that only guess. GRPO then
rewards right answers with `--environment calculator`. Printed are the reward of sampled answers,
the share with a call, and the reward of held-out questions, with the 95 % interval over seeds.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (ROOT / "stageline/data/text/templates/chatml.jinja").read_text()
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<calc>", "</calc>"]
WORDS = ["user", "assistant", "tool", "\n", "*", *"0123456789"]
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t by number of seeds
COMMON = """
    --device cpu --train-model llama --num-stages 1 --num-workers 0 --dataset jsonl --prompt chat
    --prompt-fn chat --image-token none --max-token-num 64 --micro-batch-size 32
    --lr-scheduler constant --save-best none --timeline-step 0 --prove-split never
"""
SFT = """
    --collate-fn sft --loss-fn sft --batch-size 32 --learning-rate 3e-3 --eval-samples 0
"""
GRPO = """
    --collate-fn grpo --loss-fn grpo --environment calculator --reward environment
    --rollouts.group_size 8 --rollouts.prompts_together 8 --rollouts.max_completion_length 32
    --batch-size 64 --weight-decay 0 --eval-samples all
"""


def write_model(folder: Path) -> None:
    """Write the configuration of a llama of two layers, and a tokenizer of one token a digit."""
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<|pad|>"))
    pattern = Regex(r"</?calc>|[a-z]+|[^a-z]")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(words),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
        tie_word_embeddings=False,
    ).save_pretrained(folder)


def write_rows(folder: Path, *, share: float) -> None:
    """Write the rows of both runs; a `share` of the warm start's answers calls the calculator."""
    draw = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(pairs)
    warm, asked = [], []
    for a, b in pairs:
        question, value = f"{a}*{b}", str(a * b)
        user = {"role": "user", "content": question}
        asked.append({"id": question, "messages": [user], "answer": value})
        called = [
            {"role": "assistant", "content": f"<calc>{question}</calc>"},
            {"role": "tool", "content": value},
            {"role": "assistant", "content": value},
        ]
        guess = [{"role": "assistant", "content": str(draw.randint(100, 9801))}]
        told = called if draw.random() < share else guess
        warm.append({"id": question, "messages": [user, *told]})
    write(folder / "warm.jsonl", warm[:4000])
    write(folder / "train.jsonl", asked[4000:-64])
    write(folder / "eval.jsonl", asked[-64:])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, *options: str | Path | int | float) -> list[dict[str, Any]]:
    """Run a training job; return the lines of its log."""
    words = [*COMMON.split(), *map(str, options), "--output-dir", str(folder)]
    command = [sys.executable, str(ROOT / "train_pp.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def calls_of(folder: Path) -> dict[int, float]:
    """Return step -> share of the answers that call the calculator first."""
    found: dict[int, list[bool]] = {}
    for line in map(json.loads, (folder / "samples.jsonl").read_text().splitlines()):
        turns = [answer["turns"] for answer in line["answers"]]
        found.setdefault(line["step"], []).extend("<calc>" in one[0] for one in turns)
    return {step: statistics.mean(own) for step, own in found.items()}


def interval(values: list[float]) -> str:
    """Return the mean, and the half width of the 95 % interval of that mean."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "runs/calculator")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--warm-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    given = parser.parse_args()
    folder, model = given.output, given.output / "model"
    write_model(model)
    write_rows(folder, share=given.share)
    rows = ("--dataset-path", folder / "warm.jsonl")
    run(
        folder / "sft",
        *SFT.split(),
        "--config-path",
        model,
        *rows,
        "--total-steps",
        given.warm_steps,
    )
    start = folder / f"sft/checkpoints/step-{given.warm_steps:08}"
    sampled, calls, held_out = [], [], []
    for seed in given.seeds:
        own = folder / f"grpo-{seed}"
        rows = (
            "--dataset-path",
            folder / "train.jsonl",
            "--dataset.test_path",
            folder / "eval.jsonl",
        )
        more = ("--seed", seed, "--total-steps", given.steps, "--eval-steps", given.every)
        rate = ("--learning-rate", given.learning_rate)
        log = run(own, *GRPO.split(), "--model-path", start, *rows, *more, *rate)
        calls.append(calls_of(own))
        sampled.append({one["step"]: one["reward"] for one in log if one["kind"] == "train"})
        held_out.append({one["step"]: one["reward"] for one in log if one["kind"] == "eval"})
        print(f"seed {seed}: {os.times().children_user:.0f} s of user time so far", flush=True)
    print("| steps | sampled answers | with a call | held out, likeliest |\n|---|---|---|---|")
    for last in range(given.every, given.steps + 1, given.every):
        steps = range(last - given.every + 1, last + 1)
        cells = [
            interval([statistics.mean(one[step] for step in steps) for one in curve])
            for curve in (sampled, calls)
        ]
        cells.append(interval([one[last] for one in held_out]))
        print(f"| {steps[0]} - {last} | {' | '.join(cells)} |")
    print(f"held out at the start: {interval([one[0] for one in held_out])}")


if __name__ == "__main__":
    main()
