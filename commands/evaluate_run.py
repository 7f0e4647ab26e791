"""Answers rows of a dataset, scores the answers, reports; evaluate.py has read the options."""

import functools
import json
from pathlib import Path
from typing import Any

from commands.answer_run import (
    ENGINE_FILE,
    answer_rows,
    answer_settings,
    check_model_path,
    find_place,
    is_complete,
    plan_model,
)
from parse_args import EvaluateArguments, save_config
from stageline.data.batches.step_maker import make_dataset, read_row
from stageline.data.images.image_settings import make_image_settings, using_images
from stageline.data.rows.bad_rows import BadRows, leaving_out
from stageline.evaluation.figures import format_usage, usage_of
from stageline.evaluation.predictions import PredictionFile, fingerprint
from stageline.evaluation.report import (
    Bootstrap,
    check_metric,
    compare,
    comparison_markdown,
    format_comparison,
    format_figures,
    format_report,
    make_report,
    read_other,
    report_markdown,
    write_report,
)
from stageline.evaluation.runner import EvaluationReplicas, check_ids
from stageline.plotting.pictures import caption, plot_groups, plot_predictions

NUM_PICTURES = 36


def evaluate(arguments: EvaluateArguments) -> int:
    """Answers what is not answered yet, and reports; returns the exit code."""
    run, parts = arguments.run, arguments.parts
    check_model_path(run.model_path, parts["builder"].part)
    if run.plan:
        return plan_model(arguments)
    replicas = EvaluationReplicas() if run.check_only else find_place(arguments)
    images = make_image_settings(**run.image_limits())
    with using_images(images), leaving_out(BadRows(run.skip_bad_rows)) as bad_rows:
        part = functools.partial(parts["dataset"].part, **parts["dataset"].kwargs)
        dataset = make_dataset(part, dataset_path=run.dataset_path)
    rows = range(min(len(dataset), run.limit or len(dataset)))
    check_ids(dataset, rows)
    check_metric(
        functools.partial(parts["metric"].part, **parts["metric"].kwargs),
        [read_row(dataset, row)[1] for row in rows[:2]],
    )
    if run.compare_with:  # what can't be compared is told before hours of generation
        read_other(run.compare_with, [dataset[row][1] for row in rows])
    if run.check_only:
        return 0
    folder = Path(run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if replicas.is_main:
        bad_rows.write(folder / "bad_rows.jsonl")
        save_config(arguments, folder / "config.yaml")
    settings = answer_settings(arguments)
    outcome, file = answer_rows(
        arguments,
        dataset,
        rows,
        path=folder / "predictions.jsonl",
        settings_key=fingerprint(settings),
        images=images,
        replicas=replicas,
    )
    if not replicas.is_main or not is_complete(outcome, rows, file, engine=run.engine):
        return 0
    report_on(arguments, dataset, rows, file, settings)
    return 0


def report_on(
    arguments: EvaluateArguments,
    dataset: Any,
    rows: range,
    file: PredictionFile,
    settings: dict[str, Any],
) -> None:
    """Computes the metric from the file; writes report.json, report.md and the pictures."""
    run, metric, folder = arguments.run, arguments.parts["metric"], file.path.parent
    bootstrap = Bootstrap(run.bootstrap_resamples, run.bootstrap_seed)
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
        settings={**settings, "metric": metric.key},
        samples=samples,
        bootstrap=bootstrap,
    )
    if (folder / ENGINE_FILE).is_file():  # of the last run that answered something
        report["engine"] = json.loads((folder / ENGINE_FILE).read_text(encoding="utf-8"))
    report["num_rows"] = len(dataset)  # more than samples where --limit was given
    shown, pages = [format_report(report)], [report_markdown(report)]
    if run.compare_with:
        others = metric.part(read_other(run.compare_with, samples), samples, **metric.kwargs)
        compared = compare(
            figures["per_sample"], others["per_sample"], samples, bootstrap=bootstrap
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
    plot_groups(report, folder / "groups.png")
    draw(pairs, predictions, figures["per_sample"], folder / "predictions.png")
    names = "report.json, report.md, predictions.jsonl, predictions.png and groups.png"
    print(f"{names} are in {folder}")


def draw(
    pairs: list[tuple[Any, dict]], predictions: list[dict], scores: list[float], path: Path
) -> None:
    """Some samples with their predictions; wrong ones first, since they teach most."""
    order = sorted(range(len(pairs)), key=lambda index: scores[index])[:NUM_PICTURES]
    titles = []
    for index in order:
        sample = pairs[index][1]
        answer = sample.get("answer", sample.get("caption", ""))
        question = str(sample.get("question", ""))
        titles.append(caption(question, predictions[index]["prediction"], str(answer)))
    images = [pairs[index][0][0] if pairs[index][0] else None for index in order]
    plot_predictions(images, titles, [scores[index] > 0.5 for index in order], path)
