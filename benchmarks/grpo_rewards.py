"""What a slow reward costs a step of GRPO: asked once a step, lot by lot, and a step ahead.

Seconds of a step of each, in turn, several times; the reward sleeps, as one that asks elsewhere.
Usage: python benchmarks/grpo_rewards.py [--judge 2 --steps 6 --rounds 2]
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

from grpo_trl import make, measured, ours

PARTS = '''
import time

from register import reward_register


def slow(prompts, completions, samples):
    """Takes {seconds} s for the {rows} answers of a step, a share of it for a share of them."""
    time.sleep({seconds} * len(completions) / {rows})
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


reward_register("steps")(slow)
reward_register("lots", takes_lots=True)(slow)
'''
ROWS, GROUP, LOT = 32, 8, 1
WAYS = {
    "no time, once a step": (0, "steps", 0),
    "once a step": (1, "steps", 0),
    "lot by lot": (1, "lots", 0),
    "once a step, a step ahead": (1, "steps", 1),
    "lot by lot, a step ahead": (1, "lots", 1),
}


def main() -> None:
    """Prints a row of a table for each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--judge", type=float, default=2.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, given.layers, given.hidden)
        for number in range(given.rounds):
            for way, (share, key, ahead) in WAYS.items():
                text = PARTS.format(seconds=given.judge * share, rows=ROWS)
                (folder / "parts.py").write_text(text)
                more = ["--reward", key, "--rollouts.ahead", str(ahead)]
                measured(
                    [*ours(folder, given.steps), *more, "--rollouts.prompts_together", str(LOT)]
                )
                tell(f"{number + 1} | {way}", folder / "ours" / "log.jsonl")
                shutil.rmtree(folder / "ours")


def tell(name: str, log: Path) -> None:
    """Medians of all steps but the first and the last, which draw for two steps and for none."""
    steps = [one for one in map(json.loads, log.read_text().splitlines()) if one["kind"] == "train"]
    figures = ["decode", "old", "reward", "reward_wait"]
    found = [
        [one["seconds"], *(one.get(f"{figure}_seconds", 0.0) for figure in figures)]
        for one in steps[1:-1]
    ]
    print(f"| {name} | " + " | ".join(f"{statistics.median(v):.2f}" for v in zip(*found)) + " |")


if __name__ == "__main__":
    main()
