"""Evaluate a model by generation: predictions, figures and pictures of one dataset.

Stop it at any time: started again with the same options it continues.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands import start
from commands.stages import start_processes
from parse_args import EvaluateArguments, parse_evaluate_args

if TYPE_CHECKING:
    from commands.answer_run import Answered

SHELF = ("models", "train_model", "prompt", "prompt_fn", "dataset", "metric")
NUM_PICTURES = 36


def main() -> int:
    """Answer what is not answered yet, and report; return the exit code."""
    config = start_processes(start(parse_evaluate_args, *SHELF))
    from commands.answer_run import answer_samples  # after the options: --help answers at once
    from stageline.data.batches.step_maker import make_dataset, read_row
    from stageline.evaluation.report import check_metric, read_other

    run, parts = config.run, config.parts

    def check(dataset: Any, rows: range) -> None:
        check_metric(parts["metric"].bound, [read_row(dataset, row)[1] for row in rows[:2]])
        if run.compare_with:  # this fails before hours of generation, not after
            read_other(run.compare_with, [dataset[row][1] for row in rows])

    part = parts["dataset"].bound
    open_dataset = functools.partial(make_dataset, part, dataset_path=run.dataset_path)
    answered = answer_samples(config, open_dataset, check=check)
    if answered is not None:
        report_on(config, answered)
    return 0


def report_on(config: EvaluateArguments, answered: Answered) -> None:
    """Compute the metric from the file; write report.json, report.md and the pictures."""
    from commands.answer_run import ENGINE_FILE
    from stageline.evaluation import report as reports
    from stageline.evaluation.figures import usage_of
    from stageline.plotting.pictures import groups_figure, save_figure
    from stageline.tables import format_table, markdown_table

    # figures
    run, metric = config.run, config.parts["metric"]
    dataset, rows, file = answered.dataset, answered.rows, answered.file
    folder = file.path.parent
    bootstrap = reports.Bootstrap(run.bootstrap.resamples, run.bootstrap.seed)
    pairs = [dataset[row] for row in rows]
    samples = [sample for _, sample in pairs]
    predictions = [file.records[str(sample["id"])] for sample in samples]
    figures = metric.part(predictions, samples, **metric.kwargs)
    if usage := usage_of(predictions):
        figures["usage"] = usage
        print(", ".join(f"{name} {value}" for name, value in usage.items()))

    # the report names the model, the data and the date
    data = config.parts["dataset"]
    split = data.kwargs.get("split")
    read = [data.key, run.dataset_path, split and f"split {split}"]
    read.append(f"{len(rows)} of {len(dataset)} rows")
    about = {
        "model": run.model_path and str(Path(run.model_path).resolve()),
        "adapter": run.adapter_path,
        "data": ", ".join(str(one) for one in read if one),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }

    # the report
    report = reports.make_report(
        figures,
        settings={**answered.settings, "metric": metric.key},
        samples=samples,
        bootstrap=bootstrap,
        about={name: str(value) for name, value in about.items() if value},
    )
    if (folder / ENGINE_FILE).is_file():  # the last run that made predictions wrote it
        report["engine"] = json.loads((folder / ENGINE_FILE).read_text(encoding="utf-8"))
    report["num_rows"] = len(dataset)  # more than samples where --limit was given
    shown, pages = [reports.format_report(report)], [reports.report_markdown(report)]
    if run.compare_with:
        other = reports.read_other(run.compare_with, samples)
        compared = reports.compare(
            figures["per_sample"],
            metric.part(other, samples, **metric.kwargs)["per_sample"],
            samples,
            bootstrap=bootstrap,
            lower_is_better=bool(figures.get("lower_is_better")),
        )
        report["comparison"] = {"with": run.compare_with, **compared}
        table = reports.comparison_table(compared)
        shown.append(format_table(table))
        pages.append(f"## Compared with {run.compare_with}\n\n{markdown_table(table)}\n")
    if others := reports.format_figures(figures):
        shown.append(others)
    reports.write_report(report, folder / "report.json")
    (folder / "report.md").write_text("\n".join(pages), encoding="utf-8")
    print("\n\n".join(shown))
    if (figure := groups_figure(report)) is not None:
        save_figure(figure, folder / "groups.png", dpi=110)
    draw(pairs, predictions, figures, folder / "predictions.png")
    written = "report.json, report.md, predictions.jsonl, predictions.png and groups.png"
    print(f"{written} are in {folder}")


def draw(
    pairs: list[tuple[Any, dict]], predictions: list[dict], figures: dict[str, Any], path: Path
) -> None:
    """Draw some samples with their predictions; wrong ones first, since they teach most."""
    from stageline.evaluation.report import is_graded
    from stageline.plotting.pictures import plot_predictions

    scores, has_grades = figures["per_sample"], is_graded(figures)
    order = sorted(range(len(pairs)), key=lambda index: scores[index])[:NUM_PICTURES]
    rows = [(*pairs[index], predictions[index]["prediction"]) for index in order]
    correct = [None if has_grades else scores[index] > 0.5 for index in order]
    summary = f"{len(order)} of {len(scores)} samples, the lowest scores first"
    if not has_grades:
        summary += f"; {sum(score <= 0.5 for score in scores)} of all are wrong"
    plot_predictions(rows, path, correct=correct, summary=summary)
