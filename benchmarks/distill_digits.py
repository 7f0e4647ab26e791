"""Compare SFT of a small student with distillation from a trained teacher, on the same digits.

    python scripts/make_digits_model.py .cache/digits-model
    stageline train examples/digits.yaml --num-stages 1      # the teacher
    python benchmarks/distill_digits.py --teacher runs/digits-example/checkpoints/step-00000300

The student has two decoder layers and random weights. Rows, order, start and steps of a seed are
the same in each arm: all training rows, or the same with a wrong digit as the answer of 30 % of
them. An answer is a digit and the end token, so the share of right held-out digits is twice the
token accuracy less one (the end is always predicted after the first evaluation).
"""

import argparse
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dataset import Digits  # noqa: E402
from register import dataset_register  # noqa: E402

DISTILL = ["--loss-fn", "distill", "--loss-fn.beta", "0"]
NOISY = ["--import", __file__, "--dataset", "noisy_digits"]
ARMS = {
    "SFT": [],
    "forward KL": DISTILL,
    "SFT, 30 % wrong": NOISY,
    "forward KL, 30 % wrong": [*DISTILL, *NOISY],
}


@dataset_register("noisy_digits")
class NoisyDigits(Digits):
    """Digits whose training rows have a wrong answer in 30 % of the cases."""

    def __init__(self, *, dataset_path: str | None = None, split: str = "train") -> None:
        super().__init__(split=split)
        self.is_noisy = split == "train"

    def __getitem__(self, index: int):
        images, sample = super().__getitem__(index)
        draw = random.Random(index)
        if self.is_noisy and draw.random() < 0.3:
            digit = (int(sample["answer"]) + draw.randint(1, 9)) % 10
            sample = {**sample, "answer": str(digit)}
        return images, sample

    def fingerprint(self) -> str:
        return f"noisy {super().fingerprint()}"


def write_student(folder: Path) -> None:
    """Write the configuration of the digits model with two decoder layers."""
    from scripts.make_digits_model import make_config, make_processor, make_tokenizer
    from stageline.data.text.processor import save_processor

    tokenizer = make_tokenizer()
    config = make_config(tokenizer)
    config.text_config.num_hidden_layers = 2
    config.text_config.layer_types = config.text_config.layer_types[:2]
    config.save_pretrained(folder)
    save_processor(make_processor(tokenizer), folder)


def train(arm: str, seed: int, given: argparse.Namespace) -> dict[int, float]:
    """Run one arm; return evaluated step -> share of right held-out digits."""
    folder = given.output / "-".join([*re.findall(r"\w+", arm), str(seed)])
    teacher = [] if "distill" not in ARMS[arm] else ["--teacher.path", str(given.teacher)]
    command = [
        *(
            sys.executable,
            str(ROOT / "train_pp.py"),
            "--config",
            str(ROOT / "examples/digits.yaml"),
        ),
        *("--config-path", str(given.output / "student"), "--num-stages", "1", "--device", "cpu"),
        *("--num-workers", "0", "--total-steps", str(given.steps), "--seed", str(seed)),
        *("--eval-steps", str(given.every), "--save-best", "none", "--timeline-step", "0"),
        *("--prove-split", "never", "--output-dir", str(folder), *ARMS[arm], *teacher),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {one["step"]: 2 * one["token_accuracy"] - 1 for one in lines if one["kind"] == "eval"}


def interval(values: list[float]) -> str:
    """Return the mean and the 95 % interval of a mean of three (t of 2 degrees: 4.303)."""
    half = 4.303 * statistics.stdev(values) / len(values) ** 0.5 if len(values) == 3 else 0.0
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=ROOT / "runs/distill-digits")
    parser.add_argument("--steps", type=int, default=105)
    parser.add_argument("--every", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    given = parser.parse_args()
    write_student(given.output / "student")
    found = {}
    for arm in given.arms:
        before = os.times()
        found[arm] = [train(arm, seed, given) for seed in given.seeds]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime - before.children_user
        print(f"{arm}: {spent / len(given.seeds):.0f} s of user time a run", flush=True)
    steps = sorted(found[given.arms[0]][0])
    print("| steps | " + " | ".join(given.arms) + " |\n|" + "---|" * (1 + len(given.arms)))
    for step in steps:
        cells = [interval([run[step] for run in found[arm]]) for arm in given.arms]
        print(f"| {step} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
