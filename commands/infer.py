"""Answers prompts that have no gold answer: of a file, of the command line, or of a dataset.

python infer.py --model-path my_model --text "What does ls do?" --prompts more.txt

Writes predictions.jsonl as evaluate.py does, and goes on where it was stopped. Few answers are
printed as well.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from commands import importing, start
from commands.stages import start_processes
from parse_args import InferArguments, parse_infer_args

if TYPE_CHECKING:
    from commands.answer_run import Answered

SHELF = ("models", "pp_models", "prompt", "prompt_fn", "dataset")


def main() -> int:
    """Answers; returns the exit code."""
    arguments = start_processes(start(parse_infer_args, *SHELF))
    with importing():  # after the options: --help answers at once
        from commands.answer_run import answer_samples

    answered = answer_samples(arguments, functools.partial(open_prompts, arguments))
    if answered is not None:
        show(arguments, answered)
    return 0


def open_prompts(arguments: InferArguments) -> Any:
    """What is asked."""
    from stageline.data.rows.json_lines import PromptRows

    run = arguments.run
    if "dataset" in arguments.parts:
        dataset = arguments.parts["dataset"]
        return dataset.part(dataset_path=run.dataset_path, **dataset.kwargs)
    return PromptRows(run.text or (), path=run.prompts)


def show(arguments: InferArguments, answered: Answered) -> None:
    """Prints the answers, if they are few."""
    file = answered.file
    if len(answered.rows) <= arguments.run.print_answers:
        for row in answered.rows:
            sample = answered.dataset[row][1]
            question = str(sample.get("question", sample["id"]))
            print(f"\n> {question}\n{file.records[str(sample['id'])]['prediction']}")
        print()
    print(f"{len(answered.rows)} answers are in {file.path}")
