"""A run that answers, from its options: what evaluate.py and infer.py share."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from answer_engines import Opened, opened
from options.command_line import typed
from options.decode_options import DecodeOptions
from options.fewshot_options import NAMES
from options.part_options import takes
from parse_args import Arguments
from stageline.data.batch import encode_sample
from stageline.data.image_settings import ImageSettings
from stageline.data.prepare_images import prepare_images
from stageline.data.tiling import Tiling, match_config
from stageline.errors import DataError, RemoteError, UserError
from stageline.evaluation.fewshot import FewShot
from stageline.evaluation.predictions import PredictionFile
from stageline.evaluation.replicas import Replicas
from stageline.evaluation.runner import Asking, Outcome, predict
from stageline.evaluation.same_samples import check_same_samples
from stageline.evaluation.shards import merge_shards, shard_path

ENGINE_FILE = "engine.json"
# what a model part may ask for besides images and prompts
HANDED_OVER = ("samples", "batch_size")


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
    """All that changes an answer; where files are written and on how many devices does not.

    Nor does the engine, as long as the likeliest tokens are taken.
    """
    left_out = {
        *("output-dir", "limit", "batch-size", "num-devices", "visual-gpu-ratio", "metric"),
        *("image-cache", "image-cache-gib", "max-image-pixels", "max-images-per-sample"),
        *("device-memory", "plan-length", "plan-images"),
        *("compare-with", "bootstrap-resamples", "bootstrap-seed", "skip-bad-rows"),
        *("prompts", "text", "print-answers"),  # the samples themselves are compared
        *(typed(item.name)[2:] for item in dataclasses.fields(DecodeOptions)),
    }
    run = arguments.run
    if not getattr(run, "num_fewshot", 0):
        left_out |= set(NAMES)
    if run.max_length is not None:  # the only one of these that may end an answer
        left_out.discard("max-length")
    if run.engine in ("device_map", "api") or run.temperature == 0:
        left_out.add("engine")
    for name, chosen in arguments.parts.items():
        without_effect = getattr(chosen.part, "without_effect", ())
        left_out |= {typed(f"{name}.{option}")[2:] for option in without_effect}
    config = arguments.as_config()
    return {name: value for name, value in config.items() if name not in left_out}


def answer_rows(
    arguments: Arguments,
    dataset: Any,
    rows: range,
    *,
    path: Path,
    settings_key: str,
    images: ImageSettings,
    replicas: Replicas,
) -> tuple[Outcome, PredictionFile]:
    """Answers what the file of predictions does not hold yet, each replica its share.

    Returns in every process; the file is whole in the main one.
    """
    if replicas.is_main:
        merge_shards(path)  # of a run that was killed
        replicas.tell("merged")
    replicas.wait_for_main("merged")
    file = PredictionFile(path, settings_key=settings_key)
    samples = {row: dataset[row][1] for row in rows}
    check_same_samples(file.records, list(samples.values()), path=file.path)
    missing = [row for row in rows if str(samples[row]["id"]) not in file.records]
    if not missing:
        if replicas.is_main:
            print(f"{file.path} holds all {len(rows)} predictions already")
        return Outcome(), file
    several = replicas.count > 1
    share = replicas.share(missing) if several else rows
    own, outcome = file, Outcome()
    if several and share:
        own = PredictionFile(shard_path(path, replicas.index), settings_key=settings_key)
    if share or arguments.run.engine == "pipeline":  # its processes come together
        with opened(arguments, replicas) as found:
            if found is not None:
                write_engine(arguments, found, replicas, path.parent / ENGINE_FILE)
                outcome = ask(arguments, dataset, share, own, found, images, replicas)
    if not several:
        return outcome, file
    replicas.tell("answered")
    if not replicas.is_main:
        return outcome, own
    replicas.wait_for_all("answered")
    merge_shards(path)
    file = PredictionFile(path, settings_key=settings_key)
    return outcome_of(file, [str(samples[row]["id"]) for row in missing]), file


def outcome_of(file: PredictionFile, sample_ids: list[str]) -> Outcome:
    """What became of samples that several replicas were asked."""
    left = [sample_id for sample_id in sample_ids if sample_id not in file.records]
    failed = {sample_id: file.errors[sample_id] for sample_id in left if sample_id in file.errors}
    return Outcome([sample_id for sample_id in left if sample_id not in failed], failed)


def ask(
    arguments: Arguments,
    dataset: Any,
    rows: Any,
    file: PredictionFile,
    found: Opened,
    images: ImageSettings,
    replicas: Replicas,
) -> Outcome:
    """Asks the model part for the given rows."""
    run, parts = arguments.run, arguments.parts
    processor, part = found.processor, parts["model"].part
    tiling = Tiling(**run.tiling())
    prepare_images(processor, images, tiling)
    if tiling.is_given and found.config is not None:
        match_config(found.config, processor)
    texts = {
        "prompt": parts["prompt"].part,
        "prompt_fn": fill_function(arguments),
        "image_token": functools.partial(parts["image_token"].part, **parts["image_token"].kwargs),
    }
    answer = functools.partial(
        part,
        found.model,
        processor,
        max_new_tokens=run.max_new_tokens,
        temperature=run.temperature,
        seed=run.seed,
        **parts["model"].kwargs,
    )
    is_measured = processor is not None and not found.has_own_batches
    asking = Asking(
        run.batch_size,
        length_of=functools.partial(num_tokens, processor=processor) if is_measured else None,
        has_own_batches=found.has_own_batches,
        for_generation=getattr(part, "for_generation", True),
        hands_over=frozenset(name for name in HANDED_OVER if takes(part, name) != "no"),
        is_shown=replicas.is_main,
    )
    return predict(
        dataset, rows, answer=answer, texts=texts, processor=processor, file=file, asking=asking
    )


def fill_function(arguments: Arguments) -> Callable:
    """The prompt_fn part with its options, and with examples for each sample where asked for.

    Raises:
        UserError: a part shows no examples, or the dataset part has no splits.
    """
    run, parts = arguments.run, arguments.parts
    chosen = parts["prompt_fn"]
    fill = functools.partial(chosen.part, **chosen.kwargs)
    if not getattr(run, "num_fewshot", 0):
        return fill
    for name, argument in (("prompt_fn", "examples"), ("dataset", "split")):
        if takes(parts[name].part, argument) == "no":
            raise UserError(
                f"--num-fewshot {run.num_fewshot} came with --{typed(name)[2:]} {parts[name].key}, "
                f"which takes no {argument}. A part with it was expected, because examples are "
                "drawn from a split and written by the prompt_fn: choose such a part, or leave "
                "--num-fewshot out."
            )
    kwargs = {**parts["dataset"].kwargs, "split": run.fewshot_split}
    fewshot = FewShot(
        parts["dataset"].part(dataset_path=run.dataset_path, **kwargs),
        count=run.num_fewshot,
        seed=run.fewshot_seed,
        per_sample=run.fewshot_per_sample,
    )

    def fill_with_examples(sample: Any, prompt: str, **options: Any) -> Any:
        return fill(sample, prompt, examples=fewshot.of(sample), **options)

    return fill_with_examples


def num_tokens(rendered: Any, images: Any, *, processor: Any) -> int:
    """The length of a prompt, its pictures included."""
    return len(encode_sample(rendered, images, processor=processor, name=rendered.name))


def write_engine(
    arguments: Arguments, found: Opened, replicas: Replicas, path: Path
) -> dict[str, Any]:
    """Says what answers, in engine.json and on the screen of the main process."""
    run = arguments.run
    facts = {
        "engine": run.engine,
        "dtype": run.precision,
        "num_replicas": replicas.count,
        **found.facts,
    }
    if replicas.is_main:
        path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        devices = found.facts.get("device_map")
        if devices is not None:
            print(f"devices: {sorted(set(devices.values()))}")
    return facts


def is_complete(outcome: Outcome, rows: range, file: PredictionFile, *, engine: str) -> bool:
    """Whether every row has its answer; says so where some come later.

    Raises:
        RemoteError, DataError: some could not be had, from elsewhere or here.
    """
    if outcome.failed:
        sample_id, why = next(iter(outcome.failed.items()))
        kind = DataError if engine in ("pipeline", "vllm") else RemoteError
        raise kind(
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
