"""Answer prompts that have no gold answer: of a file, of the command line, or of a dataset.

python -m stageline infer --model-path my_model --text "What does ls do?" --prompts more.txt

Writes predictions.jsonl as evaluate.py does, and continues where it was stopped. Few answers are
printed as well.
"""

from typing import Any

from commands import start
from commands.stages import start_processes
from parse_args import parse_infer_args

SHELF = ("models", "train_model", "prompt", "prompt_fn", "dataset")


def main() -> int:
    """Answer; return the exit code."""
    config = start_processes(start(parse_infer_args, *SHELF))
    from commands.answer_run import answer_samples  # after the options: --help answers at once
    from stageline.data.rows.json_lines import PromptRows

    run = config.run

    def open_prompts() -> Any:
        if "dataset" in config.parts:
            return config.parts["dataset"].bound(dataset_path=run.dataset_path)
        return PromptRows(run.text or (), path=run.prompts)

    answered = answer_samples(config, open_prompts)
    if answered is None:
        return 0
    rows, file = answered.rows, answered.file
    if len(rows) <= run.print_answers:
        for row in rows:
            sample = answered.dataset[row][1]
            question = str(sample.get("question", sample["id"]))
            print(f"\n> {question}\n{file.records[str(sample['id'])]['prediction']}")
        print()
    print(f"{len(rows)} answers are in {file.path}")
    return 0
