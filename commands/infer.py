"""Answers prompts that have no gold answer: of a file, of the command line, or of a dataset.

python infer.py --model-path my_model --text "What does ls do?" --prompts more.txt

Writes predictions.jsonl as evaluate.py does, and goes on where it was stopped. Few answers are
printed as well.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from options.answer_args import InferArguments, parse_infer_args
from parse_args import save_config
from register import freeze_registers, import_shelf

if TYPE_CHECKING:
    from stageline.evaluation.predictions import PredictionFile

SHELF = ("models", "pp_models", "prompt", "prompt_fn", "dataset")


def main() -> int:
    """Answers; returns the exit code."""
    import_shelf(*(() if "--list" in sys.argv else SHELF))  # the list shows everything
    arguments = parse_infer_args()
    freeze_registers()
    # after the options: --help answers at once
    from commands.answer_run import (
        answer_rows,
        answer_settings,
        check_model_path,
        find_place,
        is_complete,
        plan_model,
    )
    from stageline.data.images.image_settings import make_image_settings, using_images
    from stageline.data.rows.bad_rows import BadRows, leaving_out
    from stageline.evaluation.predictions import fingerprint
    from stageline.evaluation.runner import EvaluationReplicas, check_ids

    run = arguments.run
    check_model_path(run.model_path, arguments.parts["builder"].part)
    if run.plan:
        return plan_model(arguments)
    replicas = EvaluationReplicas() if run.check_only else find_place(arguments)
    images = make_image_settings(**run.image_limits())
    with using_images(images), leaving_out(BadRows(run.skip_bad_rows)) as bad_rows:
        dataset = open_prompts(arguments)
    rows = range(min(len(dataset), run.limit or len(dataset)))
    check_ids(dataset, rows)
    if run.check_only:
        return 0
    folder = Path(run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if replicas.is_main:
        bad_rows.write(folder / "bad_rows.jsonl")
        save_config(arguments, folder / "config.yaml")
    outcome, file = answer_rows(
        arguments,
        dataset,
        rows,
        path=folder / "predictions.jsonl",
        settings_key=fingerprint(answer_settings(arguments)),
        images=images,
        replicas=replicas,
    )
    if replicas.is_main and is_complete(outcome, rows, file, engine=run.engine):
        show(arguments, dataset, rows, file)
    return 0


def open_prompts(arguments: InferArguments) -> Any:
    """What is asked."""
    from stageline.data.rows.json_lines import PromptRows

    run = arguments.run
    if "dataset" in arguments.parts:
        dataset = arguments.parts["dataset"]
        return dataset.part(dataset_path=run.dataset_path, **dataset.kwargs)
    return PromptRows(run.text or (), path=run.prompts)


def show(arguments: InferArguments, dataset: Any, rows: range, file: PredictionFile) -> None:
    """Prints the answers, if they are few."""
    if len(rows) <= arguments.run.print_answers:
        for row in rows:
            sample = dataset[row][1]
            question = str(sample.get("question", sample["id"]))
            print(f"\n> {question}\n{file.records[str(sample['id'])]['prediction']}")
        print()
    print(f"{len(rows)} answers are in {file.path}")
