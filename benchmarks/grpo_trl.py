"""GRPO here and in trl's GRPOTrainer: the same model, rows, rewards and threads, one process each.

Prints the processor's seconds of a step, by what they went to, wall seconds and peak memory, of
both in turn, several times, then the median ratios. On a machine that does other things too the
processor's seconds are comparable, and wall seconds are not.
Usage: python benchmarks/grpo_trl.py [--layers 4 --hidden 256 --steps 8 --rounds 3 --beta 0.04]
       python benchmarks/grpo_trl.py --model .cache/smollm2 --rows 16 --length 32
       python benchmarks/grpo_trl.py --prompt 200  # tokens that are added to each prompt
"""

import argparse
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
GROUP, ROWS, LONGEST, MICRO = 8, 32, 64, 8
PARTS = ("decode", "rewards", "log-probs")
REWARD = '''
from register import reward_register
from stageline.training.rollouts import Rollouts, StageAnswers
from stageline.training.step import TrainStep
from benchmarks.grpo_trl import Clock

clock = Clock()
clock.watch(StageAnswers, "__call__", "decode")
clock.watch(Rollouts, "_judged", "rewards")
clock.watch(Rollouts, "_log_probs", "log-probs")
clock.watch(TrainStep, "__call__", "", then=clock.step_ends)


@reward_register("letters")
def letters(prompts, completions, samples):
    """A spread over answers of a random model."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
'''


def make(folder: Path, layers: int, hidden: int, *, prompt: int = 0) -> None:
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
        max_position_embeddings=256 + prompt,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "model")
    more = " and" * prompt
    questions = [f"What is {i} plus {i}?{more}" for i in range(64)]
    rows = [{"id": str(i), "question": q, "answer": "x"} for i, q in enumerate(questions)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "parts.py").write_text(REWARD)


class Clock:
    """The seconds of a step, of the wall and of the processor, and of some functions in it."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.began = (time.perf_counter(), time.process_time())

    def watch(
        self,
        owner: type,
        name: str,
        part: str,
        *,
        counts: Callable[[], bool] = lambda: True,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Count the processor's seconds of a method, and call something after it."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, counted = time.process_time(), part and counts()
            found = function(*args, **kwargs)
            if counted:
                self.spent[part] += time.process_time() - began
            then()
            return found

        setattr(owner, name, timed)

    def step_ends(self) -> None:
        """Print the seconds since the last step ended."""
        now = (time.perf_counter(), time.process_time())
        wall, cpu = (new - old for new, old in zip(now, self.began, strict=True))
        found = {"wall": wall, "step": cpu, **self.spent, "train": cpu - sum(self.spent.values())}
        print("\n" + json.dumps(found), flush=True)
        self.spent, self.began = dict.fromkeys(PARTS, 0.0), now


def theirs(folder: Path, given: argparse.Namespace) -> None:
    """trl's trainer; prints a line of JSON for each step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    # the template `question`, so that both read the same prompts
    texts = [f"Question: {row['question']}\nAnswer:" for row in rows]
    data = Dataset.from_list([{"prompt": text} for text in texts])
    clock = Clock()
    clock.watch(GRPOTrainer, "_generate", "decode")
    clock.watch(GRPOTrainer, "_calculate_rewards", "rewards")
    clock.watch(
        GRPOTrainer,
        "_get_per_token_logps_and_entropies",
        "log-probs",
        counts=lambda: not torch.is_grad_enabled(),
    )

    class StepEnds(TrainerCallback):
        def on_step_end(self, *given, **more):
            clock.step_ends()

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=given.rows // MICRO,
        num_generations=GROUP,
        max_completion_length=given.length,
        max_steps=given.steps,
        learning_rate=1e-5,
        beta=given.beta,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(given.model or folder / "model"),
        reward_funcs=lambda completions, **more: [sum(map(ord, t)) % 7 / 7 for t in completions],
        args=config,
        train_dataset=data,
        callbacks=[StepEnds()],
    )
    trainer.train()
    lengths = [
        one["completions/mean_length"] for one in trainer.state.log_history if "reward" in one
    ]
    print(json.dumps({"lengths": lengths}), flush=True)


def ours(
    folder: Path,
    steps: int,
    beta: float = 0.0,
    *,
    model: Path | None = None,
    rows: int = ROWS,
    length: int = LONGEST,
    root: Path = ROOT,
    prompt: int = 0,
) -> list[str]:
    """The command of the same run here, or in another checkout."""
    words = (
        f"--import {folder}/parts.py --train-model causal_lm "
        f"--model-path {model or folder / 'model'} "
        f"--dataset jsonl --dataset-path {folder}/rows.jsonl --prompt question --prompt-fn fill "
        f"--image-token none --collate-fn grpo --reward letters --rollouts.group_size {GROUP} "
        f"--batch-size {rows} --micro-batch-size {MICRO} "
        f"--rollouts.max_completion_length {length} "
        f"--max-token-num {64 + prompt + length} --learning-rate 1e-5 --lr-scheduler constant "
        f"--weight-decay 0 --total-steps {steps} --eval-samples 0 --num-stages 1 --device cpu "
        f"--optimizer.fused true --timeline-step 0 --rollouts.kl_beta {beta} --prove-split never "
        f"--output-dir {folder}/ours"
    )
    return [sys.executable, str(root / "train_pp.py"), *words.split()]


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
    """Prints a line for each run, then the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--model", type=Path, help="folder of a model (default: a random one)")
    parser.add_argument("--rows", type=int, default=ROWS, help="completions of a step")
    parser.add_argument("--length", type=int, default=LONGEST, help="longest completion")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the divergence")
    parser.add_argument("--before", type=Path, help="folder of another checkout, run as well")
    parser.add_argument("--prompt", type=int, default=0, help="tokens added to each prompt")
    parser.add_argument("--theirs", type=Path)
    given = parser.parse_args()
    if given.theirs:
        theirs(given.theirs, given)
        return
    roots = {"before": given.before, "stageline": ROOT} if given.before else {"stageline": ROOT}
    ratios = {name: {"step": [], "wall": [], "peak": []} for name in roots}
    sizes = {
        "model": given.model,
        "rows": given.rows,
        "length": given.length,
        "prompt": given.prompt,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, given.layers, given.hidden, prompt=given.prompt)
        for _ in range(given.rounds):
            command = [sys.executable, __file__, "--theirs", name, *sys.argv[1:]]
            out, peak = measured(command)
            lengths = json.loads(re.findall(r'^\{"l.*', out, re.MULTILINE)[-1])["lengths"]
            other = told("trl", out, peak, statistics.mean(lengths[1:]))
            for own_name, root in roots.items():
                out, peak = measured(ours(folder, given.steps, given.beta, root=root, **sizes))
                lines = map(json.loads, (folder / "ours" / "log.jsonl").read_text().splitlines())
                lengths = [one["answer_tokens"] for one in lines if one["kind"] == "train"]
                own = told(own_name, out, peak, statistics.mean(lengths[1:]))
                for figure, found in ratios[own_name].items():
                    found.append(own[figure] / other[figure])
                shutil.rmtree(folder / "ours")
    for name, own in ratios.items():
        medians = (f"{one} {statistics.median(found):.3f}" for one, found in own.items())
        print(f"{name}, of trl's: {', '.join(medians)}")


def told(name: str, out: str, peak: float, length: float) -> dict[str, float]:
    """Print one run; return medians of its steps but the first."""
    steps = [json.loads(line) for line in re.findall(r'^\{"wall.*', out, re.MULTILINE)][1:]
    found = {name: statistics.median(one[name] for one in steps) for name in steps[0]}
    split = ", ".join(f"{name} {found[name]:.3f}" for name in (*PARTS, "train"))
    print(
        f"{name}: {found['step']:.3f} s a step ({split}), wall {found['wall']:.2f} s, "
        f"{length:.1f} tokens an answer, peak {peak:.0f} MiB",
        flush=True,
    )
    return {**found, "peak": peak}


if __name__ == "__main__":
    main()
