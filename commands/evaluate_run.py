"""Answers rows of a dataset, scores the answers, reports; evaluate.py has read the options."""

import functools
import json
import time
from pathlib import Path
from typing import Any

from commands.answer_run import ENGINE_FILE, Answered, answer_samples
from parse_args import EvaluateArguments
from stageline.data.batches.step_maker import make_dataset, read_row
from stageline.evaluation.figures import format_usage, usage_of
from stageline.evaluation.report import (
    Bootstrap,
    check_metric,
    compare,
    comparison_markdown,
    format_comparison,
    format_figures,
    format_report,
    is_graded,
    make_report,
    read_other,
    report_markdown,
    write_report,
)

NUM_PICTURES = 36


def evaluate(arguments: EvaluateArguments) -> int:
    """Answers what is not answered yet, and reports; returns the exit code."""
    run, parts = arguments.run, arguments.parts
    part = parts["dataset"].bound

    def check(dataset: Any, rows: range) -> None:
        metric = parts["metric"].bound
        check_metric(metric, [read_row(dataset, row)[1] for row in rows[:2]])
        if run.compare_with:  # what can't be compared is told before hours of generation
            read_other(run.compare_with, [dataset[row][1] for row in rows])

    open_dataset = functools.partial(make_dataset, part, dataset_path=run.dataset_path)
    answered = answer_samples(arguments, open_dataset, check=check)
    if answered is not None:
        report_on(arguments, answered)
    return 0


def report_on(arguments: EvaluateArguments, answered: Answered) -> None:
    """Computes the metric from the file; writes report.json, report.md and the pictures."""
    run, metric = arguments.run, arguments.parts["metric"]
    dataset, rows, file = answered.dataset, answered.rows, answered.file
    folder = file.path.parent
    bootstrap = Bootstrap(run.bootstrap.resamples, run.bootstrap.seed)
    pairs = [dataset[row] for row in rows]
    samples = [sample for _, sample in pairs]
    predictions = [file.records[str(sample["id"])] for sample in samples]
    figures = metric.part(predictions, samples, **metric.kwargs)
    usage = usage_of(predictions)
    if usage:
        figures["usage"] = usage
        print(format_usage(usage))
    report = make_report(
        figures,
        settings={**answered.settings, "metric": metric.key},
        samples=samples,
        bootstrap=bootstrap,
        about=describe(arguments, answered),
    )
    if (folder / ENGINE_FILE).is_file():  # of the last run that answered something
        report["engine"] = json.loads((folder / ENGINE_FILE).read_text(encoding="utf-8"))
    report["num_rows"] = len(dataset)  # more than samples where --limit was given
    shown, pages = [format_report(report)], [report_markdown(report)]
    if run.compare_with:
        others = metric.part(read_other(run.compare_with, samples), samples, **metric.kwargs)
        compared = compare(
            figures["per_sample"],
            others["per_sample"],
            samples,
            bootstrap=bootstrap,
            lower_is_better=bool(figures.get("lower_is_better")),
        )
        report["comparison"] = {"with": run.compare_with, **compared}
        shown.append(format_comparison(compared))
        pages.append(comparison_markdown(report["comparison"]))
    others = format_figures(figures)
    if others:
        shown.append(others)
    write_report(report, folder / "report.json")
    (folder / "report.md").write_text("\n".join(pages), encoding="utf-8")
    print("\n\n".join(shown))
    from stageline.plotting.pictures import plot_groups  # slow to import; one rank needs it

    plot_groups(report, folder / "groups.png")
    draw(pairs, predictions, figures, folder / "predictions.png")
    names = "report.json, report.md, predictions.jsonl, predictions.png and groups.png"
    print(f"{names} are in {folder}")


def draw(
    pairs: list[tuple[Any, dict]], predictions: list[dict], figures: dict[str, Any], path: Path
) -> None:
    """Some samples with their predictions; wrong ones first, since they teach most."""
    from stageline.plotting.pictures import caption, plot_predictions, shown, wrong_first

    scores, has_grades = figures["per_sample"], is_graded(figures)
    order = sorted(range(len(pairs)), key=lambda index: scores[index])[:NUM_PICTURES]
    images, titles, ids = [], [], []
    for index in order:
        pictures, sample = pairs[index]
        picture, question, answer = shown(sample, pictures)
        images.append(picture)
        titles.append(caption(question, predictions[index]["prediction"], answer))
        ids.append(str(sample["id"]))
    correct = [None if has_grades else scores[index] > 0.5 for index in order]
    summary = wrong_first(sum(score <= 0.5 for score in scores), len(scores), len(order))
    if has_grades:
        summary = f"{len(scores)} samples, those of the lowest scores first"
    plot_predictions(images, titles, correct, path, ids=ids, summary=summary)


def describe(arguments: EvaluateArguments, answered: Answered) -> dict[str, str]:
    """What was evaluated, on what and when, as the report says it."""
    run, parts = arguments.run, arguments.parts
    place = run.model_path or ""  # of an API none
    config = Path(place, "config.json")
    known = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    names = known.get("architectures") or [known.get("model_type") or place or run.engine or "?"]
    split = parts["dataset"].kwargs.get("split")
    data = [parts["dataset"].key, run.dataset_path, split and f"split {split}"]
    rows = f"{len(answered.rows)} of {len(answered.dataset)} rows"
    about = {
        "model": ", ".join(names),
        "checkpoint": str(Path(place).resolve()) if config.is_file() else place,
        "adapter": run.adapter_path,
        "data": ", ".join(str(one) for one in [*data, rows] if one),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }
    return {name: str(value) for name, value in about.items() if value}
