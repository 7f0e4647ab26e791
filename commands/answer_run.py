"""Answer samples by the options of a run, for evaluate.py and infer.py."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from commands.decode_run import open_decoding
from commands.stages import dtype_of, prepare, texts_of
from options.answer import device_memory
from options.fields import handed_to, option_fields, spelled
from options.model import adapter_arguments
from options.parts import takes
from parse_args import Arguments, save_config
from stageline.checkpoint.plain_folder import folder_facts, plain_folder
from stageline.data.batches.batch import encode_sample
from stageline.data.rows.bad_rows import BadRows, leaving_out
from stageline.distributed.process_group import meet, take_own_devices
from stageline.errors import DataError, RemoteError, UserError
from stageline.evaluation import predictions
from stageline.evaluation.report import check_same_samples
from stageline.inference.model_cutter import Wanted
from stageline.inference.vllm_engine import VllmEngine, check_vllm
from stageline.planner.estimate import Load

WAIT = timedelta(minutes=10)  # for the other processes of a run
EXPORTED = "~/.cache/stageline/exported"  # vLLM reads models from here
ENGINE_FILE = "engine.json"
ENGINES = ("pipeline", "vllm")  # they answer many samples at once
# a model component may ask for these, in addition to images and prompts
HANDED_OVER = ("samples", "batch_size")


@contextmanager
def opened(
    config: Arguments, replicas: predictions.EvaluationReplicas
) -> Iterator[tuple[Any, Any, dict[str, Any]] | None]:
    """Open what answers: a model here, a pipeline of stages, vLLM, or an endpoint.

    Yields:
        The argument of a model component, its processor, and where it runs: engine.json, next to
        the predictions, has that, since answers of different engines are equal up to rounding. None
        in a process that only computes, once it is done.
    """
    run = config.run
    if run.engine == "pipeline":
        with open_decoding(run) as engine:
            if engine is None:
                yield None
                return
            facts: dict[str, Any] = {
                "num_stages": engine.chain.num_stages,
                "max_running": engine.limits.max_rows,
                "num_groups": engine.limits.num_groups or "auto",
            }
            yield engine, engine.processor, facts
    elif run.engine == "vllm":  # reads a plain folder; answers and scores like an engine
        check_vllm()  # before an export
        folder = plain_folder(
            run.model_path,
            cache=EXPORTED,
            adapter_paths=run.adapter_path or (),
            adapter_weights=run.adapter_weights,
            trust_remote_code=run.trust_remote_code,
        )
        vllm = VllmEngine(
            folder,
            dtype=dtype_of(run),
            num_devices=run.num_devices,
            seed=run.seed,
            max_length=run.max_length,
            images_per_prompt=run.images.max_count,
            trust_remote_code=run.trust_remote_code,
        )
        facts = {"tensor_parallel_size": vllm.num_devices, "folder": str(folder)}
        yield vllm, vllm.processor, facts
    else:  # the builder makes a model over some devices, or an endpoint
        where = {"index": replicas.index, "count": replicas.count}
        take_own_devices(run.device, run.num_devices, **where)
        model, processor, device_map = build_model(config)
        facts = {"device_map": {name: str(place) for name, place in device_map.items()}}
        yield model, processor, facts


def build_model(config: Arguments) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model, processor and device_map of the builder component."""
    return config.parts["builder"].part(config.run.model_path, **_builder_arguments(config))


def plan_model(config: Arguments) -> int:
    """Print what the builder component would place on which device; return the exit code."""
    builder = config.parts["builder"]
    plan = builder.facts.plan
    if plan is None:
        raise UserError(
            f"--builder {builder.key} has no plan to show. Use --builder auto, or drop --plan."
        )
    print(plan(config.run.model_path, **_builder_arguments(config)))
    return 0


def _builder_arguments(config: Arguments) -> dict[str, Any]:
    run, builder = config.run, config.parts["builder"]
    placement: dict[str, Any] = {"visual_gpu_ratio": run.visual_gpu_ratio}
    if takes(builder.part, "placement") == "no":  # it counts layers
        placement = {"visual_gpu_ratio": run.visual_gpu_ratio or 0.0}
    else:
        size = run.plan_for
        load = Load(rows=getattr(run, "batch_size", 1), length=size.length, images=size.images)
        placement["placement"] = Wanted(memory=device_memory(run), load=load)
    return {
        **handed_to("builder", run),
        **placement,
        "dtype": dtype_of(run),
        **adapter_arguments(run),
        **builder.kwargs,
    }


def answer_settings(config: Arguments) -> dict[str, Any]:
    """Return all that changes an answer: not where files are written, nor on how many devices.

    Nor does the engine, as long as the likeliest tokens are taken.
    """
    run = config.run
    left_out = {
        spelled(name)[2:]
        for name, item in option_fields(run).items()
        if not item.metadata["shapes_answers"]
    }
    left_out.add("metric")
    if run.engine in ("device_map", "api") or run.temperature == 0:
        left_out.add("engine")
    for name, chosen in config.parts.items():
        left_out |= {spelled(f"{name}.{option}")[2:] for option in chosen.facts.without_effect}
    told = config.as_config()
    return {name: value for name, value in told.items() if name not in left_out}


@dataclass(frozen=True)
class Answered:
    """Samples with all their answers: `rows` of a dataset."""

    dataset: Any
    rows: range
    file: predictions.PredictionFile
    settings: dict[str, Any]


def answer_samples(
    config: Arguments,
    open_dataset: Callable[[], Any],
    *,
    check: Callable[[Any, range], None] = lambda dataset, rows: None,
) -> Answered | None:
    """Answer what is not answered yet, into predictions.jsonl of the run folder.

    `check` refuses samples before a model is loaded.

    Returns:
        None after a plan or a check, where answers are missing, or another process has them.
    """
    run = config.run
    if run.plan:
        plan_model(config)
        return None

    # the samples
    with leaving_out(BadRows(run.skip_bad_rows)) as bad_rows:
        dataset = open_dataset()
    rows = range(min(len(dataset), run.limit or len(dataset)))
    predictions.check_ids(dataset, rows)
    check(dataset, rows)
    if run.check_only:
        return None

    # the replica of this process, of those that `start_processes` has started
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    num_stages = world_size // run.num_replicas
    replicas = predictions.EvaluationReplicas(
        index=rank // num_stages,
        count=run.num_replicas,
        is_first=rank % num_stages == 0,
        store=meet(rank, world_size, WAIT) if world_size > 1 else None,
    )

    # the file of predictions, and what it does not have yet
    folder = Path(run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "predictions.jsonl"
    settings = answer_settings(config)
    # training may have changed the weights of a folder since the last call
    folders = [Path(one) for one in (run.model_path, *(run.adapter_path or ())) if one]
    weights = [folder_facts(one) for one in folders if one.is_dir()]
    key = predictions.fingerprint({**settings, "weights": weights})
    if replicas.is_main:
        bad_rows.write(folder / "bad_rows.jsonl")
        save_config(config, folder / "config.yaml")
        predictions.merge_shards(path)  # a killed run leaves shards behind
        replicas.tell("merged")
    replicas.wait_for([0], "merged")
    file, outcome = predictions.PredictionFile(path, settings_key=key), predictions.Outcome()
    samples = {row: dataset[row][1] for row in rows}
    check_same_samples(file.records, list(samples.values()), path=file.path)
    missing = [row for row in rows if str(samples[row]["id"]) not in file.records]
    if not missing and replicas.is_main:
        print(f"{file.path} holds all {len(rows)} predictions already")

    # each replica answers its share
    several = replicas.count > 1
    share = replicas.share(missing) if several else rows
    if missing and (share or run.engine == "pipeline"):  # all its processes take part
        own = file
        if several and share:
            own = predictions.PredictionFile(
                predictions.shard_path(path, replicas.index), settings_key=key
            )
        with opened(config, replicas) as found:
            if found is not None:
                model, processor, facts = found
                if replicas.is_main:
                    facts = {"engine": run.engine, "dtype": run.precision, **facts}
                    text = json.dumps({**facts, "num_replicas": replicas.count}, indent=2) + "\n"
                    (folder / ENGINE_FILE).write_text(text, encoding="utf-8")
                    if "device_map" in facts:
                        print(f"devices: {sorted(set(facts['device_map'].values()))}")
                to = {"model": model, "processor": processor, "is_shown": replicas.is_main}
                outcome = ask(config, dataset, share, own, **to)
    if missing and several:
        replicas.tell("answered")
        if replicas.is_main:
            replicas.wait_for(range(replicas.count), "answered")
            predictions.merge_shards(path)
            file = predictions.PredictionFile(path, settings_key=key)
            left = [one for row in missing if (one := str(samples[row]["id"])) not in file.records]
            failed = {one: file.errors[one] for one in left if one in file.errors}
            outcome = predictions.Outcome([one for one in left if one not in failed], failed)

    if not replicas.is_main:
        return None
    if outcome.failed:
        sample_id, why = next(iter(outcome.failed.items()))
        kind = DataError if run.engine in ENGINES else RemoteError
        raise kind(
            f"{len(outcome.failed)} of {len(rows)} samples got no answer, such as {sample_id}: "
            f"{why.rstrip('.')}. Start again with the same options: {file.path} has the other "
            "answers."
        )
    if outcome.pending:
        print(
            f"{len(outcome.pending)} of {len(rows)} samples wait for their answers: submit the "
            "request files, then run again with --model.answers_path FILE"
        )
        return None
    return Answered(dataset, rows, file, settings)


def ask(
    config: Arguments,
    dataset: Any,
    rows: Any,
    file: predictions.PredictionFile,
    *,
    model: Any,
    processor: Any,
    is_shown: bool,
) -> predictions.Outcome:
    """Ask the model component for the given rows; engines batch many samples by themselves."""
    run, parts = config.run, config.parts
    part, is_engine = parts["model"].part, run.engine in ENGINES
    prepare(config, processor, model)
    texts = {**texts_of(parts), "prompt_fn": fill_function(config)}
    options = {**handed_to("model", run), **parts["model"].kwargs}

    def num_tokens(rendered: Any, images: Any) -> int:
        return len(encode_sample(rendered, images, processor=processor, name=rendered.name))

    asking = predictions.Asking(
        run.batch_size,
        length_of=None if processor is None or is_engine else num_tokens,
        has_own_batches=is_engine,
        for_generation=parts["model"].facts.for_generation,
        hands_over=frozenset(name for name in HANDED_OVER if takes(part, name) != "no"),
        is_shown=is_shown,
    )
    answer = functools.partial(part, model, processor, **options)
    return predictions.predict(
        dataset, rows, answer=answer, texts=texts, processor=processor, file=file, asking=asking
    )


def fill_function(config: Arguments) -> Callable:
    """Return the prompt_fn component, with examples for each sample where asked for."""
    run, parts = config.run, config.parts
    fill = parts["prompt_fn"].bound
    if not getattr(run, "num_fewshot", 0):
        return fill
    for name, argument in (("prompt_fn", "examples"), ("dataset", "split")):
        if takes(parts[name].part, argument) == "no":
            raise UserError(
                f"--num-fewshot {run.num_fewshot} requires {spelled(name)} with {argument}, which "
                f"{parts[name].key} has not. Choose such a component, or drop --num-fewshot."
            )
    fewshot = predictions.FewShot(
        parts["dataset"].bound(dataset_path=run.dataset_path, split=run.fewshot.split),
        count=run.num_fewshot,
        seed=run.fewshot.seed,
        per_sample=run.fewshot.per_sample,
    )

    def fill_with_examples(sample: Any, prompt: str, **options: Any) -> Any:
        return fill(sample, prompt, examples=fewshot.of(sample), **options)

    return fill_with_examples
