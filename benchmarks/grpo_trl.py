"""GRPO here and in trl's GRPOTrainer: the same model, rows, rewards and threads, one process each.

Seconds of a step, tokens a second and peak memory, of both in turn, several times; of a step here
also what they went to.
Usage: python benchmarks/grpo_trl.py [--layers 4 --hidden 256 --steps 8 --rounds 3 --beta 0.04]
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
GROUP, ROWS, LONGEST, MICRO = 8, 32, 64, 8
REWARD = '''
from register import reward_register


@reward_register("letters")
def letters(prompts, completions, samples):
    """A spread over answers of a random model."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
'''


def make(folder: Path, layers: int, hidden: int) -> None:
    """A random llama with its tokenizer, and 64 rows."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(1)
    config = tiny_config(
        "llama",
        tied=False,
        vocab_size=len(tokenizer),
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=hidden // 8,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "model")
    rows = [{"id": str(i), "question": f"What is {i} plus {i}?", "answer": "x"} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "parts.py").write_text(REWARD)


def theirs(folder: Path, steps: int, beta: float) -> None:
    """trl's trainer; prints a line of JSON for each step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["question"]} for row in rows])

    class Clock(TrainerCallback):
        def on_step_begin(self, *given, **more):
            self.began = time.perf_counter()

        def on_step_end(self, *given, **more):
            print(json.dumps({"seconds": time.perf_counter() - self.began}), flush=True)

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ROWS // MICRO,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        max_steps=steps,
        learning_rate=1e-5,
        beta=beta,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **more: [sum(map(ord, t)) % 7 / 7 for t in completions],
        args=config,
        train_dataset=data,
        callbacks=[Clock()],
    )
    trainer.train()
    lengths = [
        one["completions/mean_length"] for one in trainer.state.log_history if "reward" in one
    ]
    print(json.dumps({"lengths": lengths}), flush=True)


def ours(folder: Path, steps: int, beta: float = 0.0) -> list[str]:
    """The command of the same run here."""
    words = (
        f"--import {folder}/parts.py --train-model causal_lm --model-path {folder}/model "
        f"--dataset jsonl --dataset-path {folder}/rows.jsonl --prompt question --prompt-fn fill "
        f"--image-token none --collate-fn grpo --reward letters --rollouts.group_size {GROUP} "
        f"--batch-size {ROWS} --micro-batch-size {MICRO} --rollouts.max_completion_length "
        f"{LONGEST} "
        f"--max-token-num 128 --learning-rate 1e-5 --lr-scheduler constant --weight-decay 0 "
        f"--total-steps {steps} --eval-samples 0 --num-stages 1 --device cpu --timeline-step 0 "
        f"--rollouts.kl_beta {beta} --prove-split never --output-dir {folder}/ours"
    )
    return [sys.executable, str(ROOT / "train_pp.py"), *words.split()]


def measured(words: list[str]) -> tuple[str, float]:
    """What a command prints, and its peak memory in MiB."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, words
    return out, usage.ru_maxrss / 1024


def main() -> None:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the divergence")
    parser.add_argument("--theirs", type=Path)
    given = parser.parse_args()
    if given.theirs:
        theirs(given.theirs, given.steps, given.beta)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, given.layers, given.hidden)
        for _ in range(given.rounds):
            words = [sys.executable, __file__, "--theirs", name]
            words += ["--steps", str(given.steps), "--beta", str(given.beta)]
            out, memory = measured(words)
            found = [json.loads(line) for line in re.findall(r'^\{"[sl].*', out, re.MULTILINE)]
            seconds = [one["seconds"] for one in found if "seconds" in one][1:]
            tokens = ROWS * statistics.mean(found[-1]["lengths"][1:])
            tell("trl", seconds, tokens, memory)
            _, memory = measured(ours(folder, given.steps, given.beta))
            lines = map(json.loads, (folder / "ours" / "log.jsonl").read_text().splitlines())
            steps = [one for one in lines if one["kind"] == "train"][-given.steps :][1:]
            tokens = ROWS * statistics.mean(one["answer_tokens"] for one in steps)
            tell("stageline", [one["seconds"] for one in steps], tokens, memory)
            names = ("decode", "reward_wait", "start", "old")
            spent = {
                name: statistics.median(one.get(f"{name}_seconds", 0.0) for one in steps)
                for name in names
            }
            rest = statistics.median(one["seconds"] for one in steps) - sum(spent.values())
            print(
                f"    decoding {spent['decode']:.2f} s, rewards {spent['reward_wait']:.3f} s, "
                f"log-probabilities {spent['start'] + spent['old']:.2f} s, training {rest:.2f} s"
            )
            shutil.rmtree(folder / "ours")


def tell(name: str, seconds: list[float], tokens: float, memory: float) -> None:
    """One run."""
    step = statistics.median(seconds)
    print(
        f"{name}: {step:.2f} s a step, {tokens:.0f} answer tokens, {tokens / step:.0f} tokens/s, "
        f"peak {memory:.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
