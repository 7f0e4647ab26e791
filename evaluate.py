"""Evaluates a model by generation: predictions, figures and pictures of one dataset.

Stop it at any time: started again with the same options it goes on where it was.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from options.command_line import typed
from options.lora_options import adapter_arguments
from parse_args import EvaluateArguments, parse_evaluate_args, save_config
from register import freeze_registers, import_shelf
from stageline.data.bad_rows import BadRows, leaving_out
from stageline.data.image_settings import ImageSettings, make_image_settings, using_images
from stageline.data.prepare_images import prepare_images
from stageline.data.tiling import Tiling, match_config
from stageline.distributed.failure import run_entry
from stageline.errors import RemoteError, UserError
from stageline.evaluation.bootstrap import Bootstrap
from stageline.evaluation.compare import (
    compare,
    comparison_markdown,
    format_comparison,
    read_other,
)
from stageline.evaluation.predictions import PredictionFile, fingerprint
from stageline.evaluation.report import (
    format_report,
    make_report,
    report_markdown,
    write_report,
)
from stageline.evaluation.runner import Outcome, check_ids, predict
from stageline.evaluation.same_samples import check_same_samples
from stageline.evaluation.usage import format_usage, usage_of
from stageline.plotting.groups import plot_groups
from stageline.plotting.pictures import caption, plot_predictions

SHELF = ("models", "prompt", "prompt_fn", "dataset", "metric")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUM_PICTURES = 36


def main() -> int:
    import_shelf(*(() if "--list" in sys.argv else SHELF))  # the list shows everything
    arguments = parse_evaluate_args()
    freeze_registers()
    run, parts = arguments.run, arguments.parts
    if run.model_path is None and needs_folder(parts["builder"].part):
        raise UserError(
            "--model-path is missing. A folder with config.json and weights, or an adapter folder, "
            "was expected, because it is what is evaluated: give the checkpoint of a run, such as "
            "runs/digits/checkpoints/step-00000400."
        )
    images = make_image_settings(**run.image_limits())
    with using_images(images), leaving_out(BadRows(run.skip_bad_rows)) as bad_rows:
        dataset = parts["dataset"].part(dataset_path=run.dataset_path, **parts["dataset"].kwargs)
    rows = range(min(len(dataset), run.limit or len(dataset)))
    check_ids(dataset, rows)
    if run.compare_with:  # what can't be compared is told before hours of generation
        read_other(run.compare_with, [dataset[row][1] for row in rows])
    if run.check_only:
        return 0
    folder = Path(run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    bad_rows.write(folder / "bad_rows.jsonl")
    save_config(arguments, folder / "config.yaml")
    settings = answer_settings(arguments)
    file = PredictionFile(folder / "predictions.jsonl", settings_key=fingerprint(settings))
    outcome = answer_rows(arguments, dataset, rows, file, images)
    if outcome.failed:
        sample_id, why = next(iter(outcome.failed.items()))
        raise RemoteError(
            f"{len(outcome.failed)} of {len(rows)} samples got no answer, such as {sample_id}: "
            f"{why}. The answers that came are in {file.path}: start again with the same options "
            "and only the others are asked for."
        )
    if outcome.pending:
        print(
            f"{len(outcome.pending)} of {len(rows)} samples wait for their answers: hand the "
            "request files in, and run again with --model.answers_path and what comes back"
        )
        return 0
    report_on(arguments, dataset, rows, file, settings)
    return 0


def needs_folder(builder: Callable) -> bool:
    """Whether a builder part cannot do without --model-path: its first argument."""
    first = next(iter(inspect.signature(builder).parameters.values()))
    return first.default is first.empty


def answer_settings(arguments: EvaluateArguments) -> dict[str, Any]:
    """All that changes an answer; where files are written and on how many devices does not."""
    left_out = {
        *("output-dir", "limit", "batch-size", "num-devices", "visual-gpu-ratio", "metric"),
        *("image-cache", "image-cache-gib", "max-image-pixels", "max-images-per-sample"),
        *("compare-with", "bootstrap-resamples", "bootstrap-seed", "skip-bad-rows"),
    }
    for name, chosen in arguments.parts.items():
        without_effect = getattr(chosen.part, "without_effect", ())
        left_out |= {typed(f"{name}.{option}")[2:] for option in without_effect}
    config = arguments.as_config()
    return {name: value for name, value in config.items() if name not in left_out}


def answer_rows(
    arguments: EvaluateArguments,
    dataset: Any,
    rows: range,
    file: PredictionFile,
    images: ImageSettings,
) -> Outcome:
    """Loads the model and answers what the file does not hold yet."""
    run, parts = arguments.run, arguments.parts
    samples = [dataset[row][1] for row in rows]
    check_same_samples(file.records, samples, path=file.path)
    if all(str(sample["id"]) in file.records for sample in samples):
        print(f"{file.path} holds all {len(rows)} predictions already")
        return Outcome()
    model, processor, device_map = parts["builder"].part(
        run.model_path,
        visual_gpu_ratio=run.visual_gpu_ratio,
        dtype=DTYPES[run.precision],
        num_devices=run.num_devices,
        device=run.device,
        trust_remote_code=run.trust_remote_code,
        **adapter_arguments(run),
        **parts["builder"].kwargs,
    )
    tiling = Tiling(**run.tiling())
    prepare_images(processor, images, tiling)
    if tiling.is_given:
        match_config(model.config, processor)
    print(f"devices: {sorted({str(device) for device in device_map.values()})}")
    texts = {
        "prompt": parts["prompt"].part,
        "prompt_fn": functools.partial(parts["prompt_fn"].part, **parts["prompt_fn"].kwargs),
        "image_token": functools.partial(parts["image_token"].part, **parts["image_token"].kwargs),
    }
    answer = functools.partial(
        parts["model"].part,
        model,
        processor,
        max_new_tokens=run.max_new_tokens,
        temperature=run.temperature,
        seed=run.seed,
        **parts["model"].kwargs,
    )
    return predict(
        dataset,
        rows,
        answer=answer,
        texts=texts,
        processor=processor,
        file=file,
        batch_size=run.batch_size,
    )


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


if __name__ == "__main__":
    run_entry(main)
