"""The data of a training run, checked before a model is loaded: datasets, vocabulary, batches."""

import dataclasses
import functools
import hashlib
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, Subset
from transformers import PretrainedConfig

from commands import is_first, say
from commands.stages import prepare, texts_of
from commands.train import RunPlan
from options.fields import given_options, handed_to, spelled
from options.parts import ChosenPart, takes
from options.train import RunConfig, check_warmup
from parse_args import TrainArguments
from stageline.checkpoint.adapter import base_of, num_rows_on_disk, rows_of_adapter
from stageline.checkpoint.files import find_checkpoint, weights_fingerprint
from stageline.data.batches import sampler
from stageline.data.batches.collate import encode_sft
from stageline.data.batches.collate_part import as_collate_part
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.batches.preference import WithOthers
from stageline.data.batches.preflight import CheckedCollate, check_vocabulary, preflight
from stageline.data.batches.preview import preview
from stageline.data.batches.step_maker import make_dataset
from stageline.data.rows.bad_rows import BadRows, leaving_out
from stageline.data.text.processor import get_pad_token_id, get_tokenizer, load_processor
from stageline.data.text.tokenizers import (
    NewTokens,
    add_new_tokens,
    processor_of_weights,
    with_rowless,
)
from stageline.device import is_accelerator
from stageline.distributed.process_group import DistributedContext, LargestOfReplicas
from stageline.errors import DataError, UserError
from stageline.model_folder import files_fingerprint, load_config
from stageline.modules.new_rows import NewRows, vocab_size_of
from stageline.pipeline.schedules import Schedule
from stageline.training.turns import OpenedRows


def mixture_of(run: RunConfig, part: ChosenPart) -> dict[str, Any]:
    """Return what a dataset gets of how types are mixed; refuse it for one without types."""
    given = handed_to("dataset", run)
    for name in given:
        if takes(part.part, name) == "no":
            raise UserError(
                f"{spelled(name)} does not go with --dataset {part.key}. Drop it, or use --dataset "
                "corpus (sets mixes by --dataset.mix)."
            )
    return given


def tokens_in(dataset: Dataset) -> Any:
    """Return the dataset whose samples are token ids already; None: they are texts."""
    inner = dataset.dataset if isinstance(dataset, Subset) else dataset
    return inner if getattr(inner, "has_tokens", False) else None


def answers_of(config: TrainArguments) -> int:
    """Return how many answers a row gets in a step; 1 where it has its own."""
    is_answered = config.parts["loss_fn"].facts.samples_answers
    return config.run.rollouts.group_size if is_answered else 1


def epoch_sampler(run: RunConfig, dataset: Any, *, answers: int = 1) -> Any:
    """Return the sampler of training rows, each with `answers`; its length is an epoch's steps."""
    common: dict[str, Any] = {
        "step_samples": run.batch_size * run.accumulate_steps // answers,
        "dp_degree": run.dp_degree or 1,
        "seed": run.seed,
    }
    if sampler.has_sampler(dataset):
        place = {"dp_rank": 0, "shuffle": True, "start_step": 0, "position": None}
        return dataset.make_sampler(batch_size=run.batch_size, **place, **common)
    common |= {"pads": run.rows.last == "pad", "group_size": sampler.group_size_of(dataset)}
    return sampler.StepSampler(len(dataset), **common)


def epoch_steps(run: RunConfig, dataset: Any, *, answers: int = 1) -> int:
    """Return the optimizer steps of an epoch; refuse a stream, which has no epochs."""
    if not sampler.is_stream(dataset):
        return max(1, len(epoch_sampler(run, dataset, answers=answers))) * run.rollouts.inner_steps
    asked = "--num-train-epochs" if run.num_train_epochs is not None else "epoch"
    raise UserError(
        f"{asked} requires a dataset that is not streamed. Give --total-steps, and numbers of "
        "steps for --save-steps and --eval-steps."
    )


class Data:
    """Datasets, processor and collate function of a run, checked before any model is loaded."""

    def __init__(self, config: TrainArguments) -> None:
        run, parts = config.run, config.parts
        path = run.processor_path or run.model_path or run.config_path
        if path is None:
            raise UserError(
                "--model-path and --config-path are missing. Give a folder with config.json: "
                "--model-path starts from its weights, --config-path at random."
            )
        self.processor = load_processor(path, trust_remote_code=run.trust_remote_code)
        self.new_tokens = add_tokens(config, self.processor, path)
        prepare(config, self.processor)
        self.pad_token_id = get_pad_token_id(self.processor)
        part = functools.partial(parts["dataset"].bound, **mixture_of(run, parts["dataset"]))
        make = functools.partial(make_dataset, part, dataset_path=run.dataset_path)
        self.bad_rows = BadRows(run.skip_bad_rows)
        self.vocab_size: int | None = None
        with leaving_out(self.bad_rows):
            self.train = make(split="train")
            self.test = make(split="test") if run.eval_samples else None
        if self.test is not None and run.eval_samples != "all":
            self.test = sampler.some_rows(self.test, run.eval_samples)
        if (environment := parts.get("environment")) is not None:
            self.train = OpenedRows(self.train, environment.bound)
            self.test = None if self.test is None else OpenedRows(self.test, environment.bound)
        collate = parts["collate_fn"]
        self.texts = texts_of(parts)
        multiple = run.rows.pad_to_multiple_of
        options = {
            **self.texts,
            "processor": self.processor,
            "pad_token_id": self.pad_token_id,
            "max_token_num": run.max_token_num,
            "num_stages": run.num_stages,
            **({"pad_to_multiple_of": multiple} if multiple > 1 else {}),
            **(handed_to("collate_fn", run) if collate.facts.gives_prompts else {}),
            **collate.kwargs,
        }
        self.collate = as_collate_part(collate.part).bind(**options)
        # a plain function limits lengths as collate_sft does, or judges its rows by itself
        encode = self.collate.encode
        self.knows_rows = encode is not None or "overlong" in collate.kwargs
        if encode is None:
            encode = functools.partial(encode_sft, **options)
        # not of stage 0: that one warns of samples that are cut
        self.encode = functools.partial(encode, stage=1)


def add_tokens(config: TrainArguments, processor: Any, path: str) -> NewTokens | None:
    """Add the run's new tokens to its processor, which is of the folder `path`.

    Returns:
        These tokens and, with --vocab.resize, all that the weights have no row for, or a row that
        is of no token of their own tokenizer.
    """
    run = config.run
    is_other = run.model_path is not None and Path(run.model_path) != Path(path)
    if not (run.vocab.new_tokens or run.vocab.resize or is_other):
        return None
    model_config = load_config(run.config_folder, trust_remote_code=run.trust_remote_code)
    num_rows = num_rows_of(run, model_config)
    tokens, other = None, None
    if is_other and run.model_path:
        other = processor_of_weights(run.model_path, trust_remote_code=run.trust_remote_code)
    if run.vocab.new_tokens:
        # tokens beyond the embedding have no start value, unless --vocab.resize adds rows
        if num_rows is not None and not run.vocab.resize:
            check_vocabulary(processor, num_rows)
        tokens = add_new_tokens(processor, run.vocab.new_tokens, weights_processor=other)
    if num_rows is None:
        return tokens
    more = with_rowless(processor, tokens, num_rows, weights_processor=other)
    if run.vocab.resize or more is None or not more.rowless:
        return more
    if max(more.rowless) < num_rows:  # else `check_vocabulary` refuses them
        say(
            f"{len(more.rowless)} tokens of {path} are not in the tokenizer of {run.model_path}. "
            "--vocab.resize starts their rows near the mean and trains them."
        )
    return tokens


def num_rows_of(
    run: RunConfig, model_config: PretrainedConfig, *, new_tokens: NewTokens | None = None
) -> int | None:
    """Return the rows of embedding and head, new ones included; None: not known."""
    known = vocab_size_of(model_config)
    if known is None:
        return None
    found = [known, *(token + 1 for token in (new_tokens.ids if new_tokens else ()))]
    if run.model_path is not None:
        folder = find_checkpoint(run.model_path)
        found.append(num_rows_on_disk(folder, trust_remote_code=run.trust_remote_code))
    width = getattr(model_config.get_text_config(decoder=True), "hidden_size", None)
    for path in run.adapter_path or ():
        found += rows_of_adapter(Path(path), width)
    return max(found)


def check_tied_head(run: RunConfig, model_config: PretrainedConfig) -> None:
    """Refuse a learning rate for a head that is the embedding; note that freezing it is none."""
    if not getattr(model_config, "tie_word_embeddings", False):
        return
    why = "the head shares the weight of the embedding, which is of the language model"
    if run.parts.lm_head.lr is not None:
        raise UserError(
            f"--parts.lm_head.lr {run.parts.lm_head.lr:g}: {why}, and one weight has one rate. Use "
            "--parts.llm.lr."
        )
    trains = not (run.parts.llm.frozen or run.llm_lora_num or run.vocab.train_new)
    if run.parts.lm_head.frozen and trains:
        say(f"--parts.lm_head.frozen freezes nothing: {why}. --parts.llm.frozen does.")


def rows_option(
    run: RunConfig, new_tokens: NewTokens | None, *, is_known: bool = False
) -> dict[str, Any]:
    """Return the new tokens for a stage; `is_known`: the weights have their rows."""
    if new_tokens is None:
        return {}
    fresh = frozenset() if is_known else new_tokens.fresh
    rows = NewRows(
        new_tokens.ids,
        new_tokens.pieces,
        fresh,
        train_alone=run.vocab.train_new,
        noisy=new_tokens.rowless,
        seed=run.seed,
        multiple=run.vocab.multiple if run.vocab.resize else 1,
    )
    return {"new_rows": rows}


START, FILES, TEXTS = "start weights", "files of model and tokenizer", "texts of templates"
READ_ANEW = (START, FILES, TEXTS)


def read_anew(config: TrainArguments, data: Data) -> dict[str, object]:
    """Return fingerprints of the weights, files and templates that all processes of a run read."""
    run, answers = config.run, bool(config.parts["loss_fn"].facts.samples_answers)
    answers = answers or run.teacher.lmbda > 0
    processor = run.processor_path or run.model_path or run.config_folder
    folders = run.config_folder, processor, *(run.adapter_path or ())
    paths = filter(None, (run.teacher.path, run.teacher.table))
    teacher = [weights_fingerprint(Path(path)) for path in paths]
    owners = data.processor, get_tokenizer(data.processor)
    texts = [data.texts["prompt"], *(getattr(one, "chat_template", None) for one in owners)]
    return {
        START: start_weights(run),
        FILES: [*(files_fingerprint(one, answers=answers) for one in folders), *teacher],
        TEXTS: hashlib.sha256(repr(texts).encode()).hexdigest(),
    }


def start_weights(run: RunConfig) -> list[str]:
    """Return fingerprints of the start weights, including the base of an adapter."""
    paths = [Path(path) for path in (run.model_path, *(run.adapter_path or ())) if path]
    return [weights_fingerprint(path) for path in dict.fromkeys([*paths, *map(base_of, paths[:1])])]


def check_data(config: TrainArguments) -> Data:
    """Build the datasets and refuse bad rows, images and tokenizers; load no model."""
    run, parts = config.run, config.parts
    dataset, collate, loss = (parts[name] for name in ("dataset", "collate_fn", "loss_fn"))
    if "logits_chunk" in given_options(run) and run.logits_chunk:  # else as the loss allows
        check_token_sum(loss)
    check_scores(config)
    data = Data(config)

    # groups stay whole in batches
    for one in filter(None, (data.train, data.test)):
        size = sampler.group_size_of(one)
        num_prompts = run.batch_size * run.accumulate_steps // run.rollouts.group_size
        if loss.facts.samples_answers and num_prompts % size:
            raise UserError(
                f"{num_prompts} prompts a step do not fit the dataset's groups of {size} rows. "
                f"Make --batch-size a multiple of {size * run.rollouts.group_size}."
            )
        if not loss.facts.samples_answers:
            sampler.check_batch_sizes(
                batch_size=run.batch_size,
                micro_batch_size=run.micro_batch_size,
                group_size=size,
                is_packed=run.packing,
            )
        if size == 1 and collate.facts.needs_groups:
            raise UserError(
                f"--collate-fn {collate.key} needs groups, and --dataset {dataset.key} has no "
                "groups. Use --dataset groups, or --collate-fn sft."
            )

    # rows of token ids are not tokenized, and drawn rows have no last ones
    if tokens_in(data.train) is not None:
        if not collate.facts.takes_tokens:
            raise UserError(
                f"--collate-fn {collate.key} takes no token ids, which --dataset {dataset.key} "
                "gives. Use --collate-fn pt."
            )
        if run.packing and getattr(data.train, "packed", None) is not None:
            raise UserError("--packing and --dataset.rows packed exclude each other. Drop one.")
    if run.rows.last == "pad" and (
        sampler.is_stream(data.train) or sampler.has_sampler(data.train)
    ):
        raise UserError(
            f"--rows.last pad has no effect on --dataset {dataset.key}, a stream or drawn by "
            "types. Drop it, or fill types up with --drop-mode first_ends_fill or last_ends_fill."
        )

    # the vocabulary, then each row
    model_config = load_config(run.config_folder, trust_remote_code=run.trust_remote_code)
    check_tied_head(run, model_config)
    data.vocab_size = num_rows_of(run, model_config, new_tokens=data.new_tokens)
    if data.vocab_size is not None:
        check_vocabulary(data.processor, data.vocab_size)
    if run.teacher.path is not None:
        teacher = load_config(run.teacher.path, trust_remote_code=run.trust_remote_code)
        if vocab_size_of(teacher) != data.vocab_size:
            raise UserError(
                f"the teacher {run.teacher.path} has a vocabulary of {vocab_size_of(teacher)} "
                f"tokens, the model that trains {data.vocab_size}. Use a teacher of the same "
                "family and vocabulary size."
            )
    data.collate = CheckedCollate(data.collate, data.vocab_size)
    if data.knows_rows:
        data.train = check_rows(config, data, data.train, "train data")
        if data.test is not None:
            try:
                data.test = check_rows(config, data, data.test, "eval data")
            except DataError as error:
                raise DataError(f"held-out rows: {error}") from error
    if asks_for(loss, loss.facts.needs_kl):
        data.train = WithOthers(data.train)
        data.test = None if data.test is None else WithOthers(data.test)
    report = left_over_rows(run, data.train, answers=answers_of(config))
    if data.bad_rows.reasons:
        report += f"{len(data.bad_rows)} bad rows are left out:\n{data.bad_rows.listed()}\n"
    if report:
        say(report.removesuffix("\n"))
    return data


def settle_steps(config: RunPlan, data: Data) -> RunPlan:
    """Return the plan with the steps of its epochs and its warm-up share; print how many."""
    run, told = config.run, []
    found: dict[str, Any] = {}
    if run.num_train_epochs is not None or "epoch" in (run.save_steps, run.eval_steps):
        epoch = epoch_steps(run, data.train, answers=answers_of(config))
        told.append(f"an epoch is {epoch:,} steps")
        if run.num_train_epochs is not None:
            # 0.1 x 30 is a little more than 3; answers that some steps share are used up
            turns = math.ceil(round(run.num_train_epochs * epoch / run.rollouts.inner_steps, 6))
            found["total_steps"] = turns * run.rollouts.inner_steps
            one = "epoch" if run.num_train_epochs == 1 else "epochs"
            told.append(f"{run.num_train_epochs:g} {one} = {found['total_steps']:,} steps")
    if run.warmup_ratio is not None:
        total = found.get("total_steps", run.total_steps)
        found["warmup_steps"] = math.ceil(round(run.warmup_ratio * total, 6))
        told.append(f"warm-up is {found['warmup_steps']:,} of {total:,} steps")
    for name, value in found.items():
        if getattr(run, name) not in (value, getattr(RunConfig, name)):
            told.append(f"in place of {spelled(name)} {getattr(run, name)} of the file")
    run = dataclasses.replace(run, **found)
    check_warmup(run)
    if told:
        say(", ".join(told))
    return dataclasses.replace(config, run=run)


def asks_for(part: ChosenPart, answer: bool | Callable[..., bool]) -> bool:
    """Return whether a fact holds, which is a bool or a function of the component's options."""
    return bool(answer(**part.kwargs) if callable(answer) else answer)


def check_token_sum(loss: ChosenPart) -> None:
    """Refuse chunks of logits for a loss that is not a sum over target tokens."""
    if not (loss.facts.is_token_sum or loss.facts.reads_by_token):
        raise UserError(
            f"--logits-chunk needs a sum over target tokens, is_token_sum=True. Drop it, or "
            f"register --loss-fn {loss.key} as one."
        )


def check_scores(config: TrainArguments) -> None:
    """Refuse a loss that predicts tokens on a model that scores them, and its accuracy."""
    model, loss = config.parts["train_model"], config.parts["loss_fn"]
    if loss.facts.predicts_tokens:
        if model.facts.gives_scores:
            raise UserError(
                f"--loss-fn {loss.key} needs logits, and --train-model {model.key} gives scores. "
                "Use --loss-fn rm, or --train-model causal_lm."
            )
    elif config.run.save_best == "token_accuracy":
        raise UserError(
            f"--save-best token_accuracy needs tokens, and --loss-fn {loss.key} predicts none. Use "
            "--save-best loss or reward_accuracy."
        )


def check_rows(config: TrainArguments, data: Data, dataset: Any, label: str) -> Any:
    """Return the dataset without rows that are bad or too long and may be left out."""
    run = config.run
    limits: dict[str, Any] = {
        "processor": data.processor,
        "max_token_num": run.max_token_num,
        "vocab_size": data.vocab_size,
        "overlong": config.parts["collate_fn"].kwargs.get("overlong", "error"),
    }
    if (tokens := tokens_in(dataset)) is not None:  # many rows; micro-batches are checked later
        say(f"{label}: {tokens.check(**limits)}")
        return dataset
    report = preflight(
        dataset, **data.texts, **limits, bad_rows=data.bad_rows, seed=run.seed, encode=data.encode
    )
    size = sampler.group_size_of(dataset)
    bad = set(sampler.whole_groups(report.bad, size))
    with_them = len(bad) - len(report.bad)
    # a partly dropped group stays, because its other rows are in the loss
    dropped = [] if sampler.is_stream(dataset) else sampler.full_groups(report.dropped, size)
    left_out = bad | set(dropped)
    text = f"{report}, {with_them} more of their groups" if with_them else str(report)
    if dropped:
        text += f"\n{len(dropped)} rows are dropped, {len(dataset) - len(left_out)} are left"
    say(f"{label}: {text}")
    if not left_out:
        return dataset
    return Subset(dataset, [row for row in range(len(dataset)) if row not in left_out])


def left_over_rows(run: RunConfig, dataset: Any, *, answers: int = 1) -> str:
    """Return a line on how many rows an epoch leaves out; of drawn types their own report."""
    num_rows = len(dataset)
    if sampler.is_stream(dataset):
        return ""
    steps = epoch_sampler(run, dataset, answers=answers)
    if sampler.has_sampler(dataset):
        return steps.report() if hasattr(steps, "report") else ""
    step_rows = steps.step_samples * steps.dp_degree
    rest = num_rows % step_rows
    if rest == 0:
        return ""
    if steps.pads:
        more = len(steps) * step_rows - num_rows
        return f"each epoch repeats {more} of {num_rows} rows, different ones each time\n"
    told = f"each epoch leaves out {rest} of {num_rows} rows, different ones each time"
    return f"{told} (--rows.last pad uses all)\n"


def show_samples(config: TrainArguments, data: Data, schedule: Schedule) -> None:
    """Print the first samples of training as they are trained on, in one process of the run."""
    run = config.run
    if not run.preview or not is_first():
        return
    first = DistributedContext(num_replicas=run.dp_degree or 1)

    def full_length(row: int) -> int:
        encoded = data.encode(*data.train[row])
        return max(map(len, encoded.whole)) if encoded.is_cut else 0

    may_cut = data.knows_rows and tokens_in(data.train) is None
    preview(
        make_loader(config, data, first, schedule, data.train, is_evaluation=False),
        data.train,
        data.processor,
        count=run.preview,
        full_length=full_length if may_cut else None,
    )


def make_loader(
    config: TrainArguments,
    data: Data,
    context: DistributedContext,
    schedule: Schedule,
    dataset: object,
    *,
    is_evaluation: bool,
    **place: Any,
) -> MicroBatchLoader:
    """Return batches of micro-batches: the same samples on every stage, pixels on the first one.

    `place` is where to start, start_step and position, and the `facts` of micro-batches.
    """
    run = config.run
    is_packed = run.packing and not is_evaluation
    agree = None
    if is_packed and context.num_replicas > 1 and context.mesh is not None:
        # the other replicas send their numbers
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        agree = LargestOfReplicas(
            name[0],
            rank=context.dp_rank,
            size=context.num_replicas,
            seconds=max(600.0, run.hang_timeout + 120.0),
        )
    return MicroBatchLoader(
        dataset,
        **shared_loading(run, data, context, is_evaluation=is_evaluation),
        batch_size=run.batch_size,
        micro_batch_size=run.micro_batch_size,
        accumulate_steps=1 if is_evaluation else run.accumulate_steps,
        pins=any(map(is_accelerator, context.devices)),
        order=run.rows.order,
        packing=run.max_token_num if is_packed else None,
        legal_counts=schedule.legal_micro_batches,
        agree=agree,
        **place,
    )


def shared_loading(
    run: RunConfig, data: Data, context: DistributedContext, *, is_evaluation: bool
) -> dict[str, Any]:
    """Return the arguments that loaders of rows and of prompts have in common."""
    return {
        "collate": functools.partial(data.collate, stage=context.pp_rank),
        **{"dp_rank": context.dp_rank, "dp_degree": context.num_replicas},
        **{"seed": run.seed, "num_workers": run.num_workers, "pads": run.rows.last == "pad"},
        **{"shuffle": not is_evaluation, "eval": is_evaluation},
    }
