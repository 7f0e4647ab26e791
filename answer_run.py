"""A run that answers, from its options: what evaluate.py and infer.py share."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from options.command_line import typed
from options.lora_options import adapter_arguments
from parse_args import Arguments
from placement_run import placement_arguments, show_plan
from stageline.data.image_settings import ImageSettings
from stageline.data.prepare_images import prepare_images
from stageline.data.tiling import Tiling, match_config
from stageline.errors import RemoteError, UserError
from stageline.evaluation.predictions import PredictionFile
from stageline.evaluation.runner import Outcome, predict
from stageline.evaluation.same_samples import check_same_samples

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_model_path(model_path: str | None, builder: Callable) -> None:
    """Refuses a missing --model-path, where the builder part takes one: its first argument."""
    first = next(iter(inspect.signature(builder).parameters.values()))
    if model_path is None and first.default is first.empty:
        raise UserError(
            "--model-path is missing. A folder with config.json and weights, or an adapter folder, "
            "was expected, because it is what answers: give the checkpoint of a run, such as "
            "runs/digits/checkpoints/step-00000400."
        )


def answer_settings(arguments: Arguments) -> dict[str, Any]:
    """All that changes an answer; where files are written and on how many devices does not."""
    left_out = {
        *("output-dir", "limit", "batch-size", "num-devices", "visual-gpu-ratio", "metric"),
        *("image-cache", "image-cache-gib", "max-image-pixels", "max-images-per-sample"),
        *("device-memory", "plan-length", "plan-images"),
        *("compare-with", "bootstrap-resamples", "bootstrap-seed", "skip-bad-rows"),
        *("prompts", "text", "print-answers"),  # the samples themselves are compared
    }
    for name, chosen in arguments.parts.items():
        without_effect = getattr(chosen.part, "without_effect", ())
        left_out |= {typed(f"{name}.{option}")[2:] for option in without_effect}
    config = arguments.as_config()
    return {name: value for name, value in config.items() if name not in left_out}


def answer_rows(
    arguments: Arguments,
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
    model, processor, device_map = build_model(arguments)
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


def build_model(arguments: Arguments) -> tuple[Any, Any, dict[str, Any]]:
    """What the builder part makes: model, processor and device_map."""
    builder = arguments.parts["builder"]
    return builder.part(arguments.run.model_path, **_builder_arguments(arguments))


def plan_model(arguments: Arguments) -> int:
    """Prints what would lie on which device; returns the exit code."""
    check_model_path(arguments.run.model_path, arguments.parts["builder"].part)
    show_plan(arguments.parts["builder"], arguments.run.model_path, **_builder_arguments(arguments))
    return 0


def _builder_arguments(arguments: Arguments) -> dict[str, Any]:
    run, builder = arguments.run, arguments.parts["builder"]
    return {
        **placement_arguments(run, builder.part),
        "dtype": DTYPES[run.precision],
        "num_devices": run.num_devices,
        "device": run.device,
        **adapter_arguments(run),
        "trust_remote_code": run.trust_remote_code,
        **builder.kwargs,
    }


def is_complete(outcome: Outcome, rows: range, file: PredictionFile) -> bool:
    """Whether every row has its answer; says so where some come later.

    Raises:
        RemoteError: some could not be had.
    """
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
    return not outcome.pending
