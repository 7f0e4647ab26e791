"""Make preference pairs and labelled answers from questions and a model's answers.

Usage: make_preference_data.py QUESTIONS PREDICTIONS data/manpages_preference.jsonl

QUESTIONS is data/manpages_instruct.jsonl: its answer is chosen, the model's own is rejected.
PREDICTIONS is the predictions.jsonl of an evaluation over these questions; for the shipped file
that of SmolLM2-135M-Instruct, greedy, 40 tokens.
"""

import json
import sys
from pathlib import Path


def rows_of(path: str) -> list[dict]:
    """Return the rows of a JSON-lines file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def main(questions: str, predictions: str, target: str) -> None:
    said = {row["id"]: row["prediction"].strip() for row in rows_of(predictions)}
    pairs = []
    for row in rows_of(questions):
        rejected = said.get(row["id"])
        if rejected and rejected != row["answer"]:
            pairs.append(
                {
                    "id": row["id"],
                    "messages": [{"role": "user", "content": row["question"]}],
                    "chosen": [{"role": "assistant", "content": row["answer"]}],
                    "rejected": [{"role": "assistant", "content": rejected}],
                }
            )
    with Path(target).open("w", encoding="utf-8") as file:
        for pair in pairs:
            file.write(json.dumps(pair, ensure_ascii=False) + "\n")
    print(f"{len(pairs)} pairs are in {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
