"""Make preference pairs: the answer of the data is chosen, the model's own is rejected.

data/manpages_preference.jsonl has the answers of SmolLM2-135M-Instruct, greedy, 40 tokens.
"""

import argparse
import json
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", help="questions with answers: data/manpages_instruct.jsonl")
    parser.add_argument("predictions", help="predictions.jsonl of an evaluation over them")
    parser.add_argument("target", help="file of the pairs: data/manpages_preference.jsonl")
    main(**vars(parser.parse_args()))
