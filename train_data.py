"""The data of a training run: datasets and processor, checked before a model is loaded; batches.

Knows the options and the contract of each register; train_pp.py puts the objects together.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Dataset, Subset

from options.run_options import RunConfig
from parse_args import TrainArguments
from stageline.data.bad_rows import BadRows, leaving_out
from stageline.data.check_batch import CheckedCollate
from stageline.data.collate import encode_for_training
from stageline.data.fingerprint import data_fingerprint
from stageline.data.groups import (
    check_batch_sizes,
    full_groups,
    group_size_of,
    some_rows,
    whole_groups,
)
from stageline.data.image_settings import make_image_settings, using_images
from stageline.data.lengths import companion, padding_argument
from stageline.data.loader import MicroBatchLoader
from stageline.data.preference import WithOthers
from stageline.data.preflight import check_vocabulary, preflight
from stageline.data.prepare_images import prepare_images
from stageline.data.preview import preview
from stageline.data.processor import get_pad_token_id, load_processor
from stageline.data.rows import make_dataset
from stageline.data.sampler import StepSampler, has_sampler, is_stream
from stageline.data.tiling import Tiling
from stageline.data.token_cache import TokenCache, fill_token_cache, use_token_cache
from stageline.data.token_key import token_key
from stageline.distributed.process_group import DistributedContext
from stageline.errors import DataError, UserError
from stageline.model_folder import load_config
from stageline.modules.chunked_loss import check_token_sum
from stageline.pipeline.schedules import Schedule
from stageline.training.loss_part import declares
from train_corpus import (
    check_tokens,
    check_tokens_taken,
    has_tokens,
    mix_types,
    mixture_report,
)
from train_vocabulary import add_tokens, check_tied_head, num_rows_of


class Data:
    """Datasets, processor and collate function of a run, checked before any model is loaded."""

    def __init__(self, arguments: TrainArguments) -> None:
        run, parts = arguments.run, arguments.parts
        path = run.processor_path or run.model_path or run.config_path
        if path is None:
            raise UserError(
                "neither --model-path nor --config-path came: a folder with config.json and a "
                "tokenizer was expected; --model-path continues from its weights, --config-path "
                "starts at random."
            )
        self.processor = load_processor(path, trust_remote_code=run.trust_remote_code)
        self.new_tokens = add_tokens(arguments, self.processor, path)
        images = make_image_settings(**run.image_limits())
        prepare_images(self.processor, images, Tiling(**run.tiling()))
        self.pad_token_id = get_pad_token_id(self.processor)
        dataset = parts["dataset"]
        part = functools.partial(dataset.part, **dataset.kwargs)
        make = functools.partial(make_dataset, part, dataset_path=run.dataset_path)
        self.bad_rows = BadRows(run.skip_bad_rows)
        self.vocab_size: int | None = None
        with leaving_out(self.bad_rows), using_images(images):
            self.train = make(split="train")
            self.test = make(split="test") if run.eval_samples else None
        mix_types(run, dataset.key, self.train)
        if self.test is not None and run.eval_samples != "all":
            self.test = some_rows(self.test, run.eval_samples)
        check_groups(arguments, self.train, self.test)
        collate, prompt_fn = parts["collate_fn"], parts["prompt_fn"]
        image_token = parts["image_token"]
        self.texts = {
            "prompt": parts["prompt"].part,
            "prompt_fn": functools.partial(prompt_fn.part, **prompt_fn.kwargs),
            "image_token": functools.partial(image_token.part, **image_token.kwargs),
        }
        self.collate: Callable = functools.partial(
            collate.part,
            **self.texts,
            processor=self.processor,
            pad_token_id=self.pad_token_id,
            max_token_num=run.max_token_num,
            num_stages=run.num_stages,
            **padding_argument(collate.part, run.pad_to_multiple_of),
            **collate.kwargs,
        )


def check_groups(arguments: TrainArguments, *datasets: Dataset | None) -> None:
    """Refuses batches that would cut groups, and a collate part without the groups it needs."""
    run, parts = arguments.run, arguments.parts
    for dataset in filter(None, datasets):
        size = group_size_of(dataset)
        check_batch_sizes(
            batch_size=run.batch_size,
            micro_batch_size=run.micro_batch_size,
            group_size=size,
            is_packed=run.packing,
        )
        if size == 1 and getattr(parts["collate_fn"].part, "needs_groups", False):
            raise UserError(
                f"--collate-fn {parts['collate_fn'].key} came with --dataset "
                f"{parts['dataset'].key}, which has no groups. A dataset with group_size was "
                "expected, because the samples of a group are compared: use --dataset groups, a "
                "dataset of your own with groups (docs/add_a_part.md), or --collate-fn sft."
            )


def check_data(arguments: TrainArguments) -> Data:
    """Builds the datasets and refuses bad rows, images and tokenizers; loads no model."""
    run = arguments.run
    if run.logits_chunk:
        check_token_sum(arguments.parts["loss_fn"].part)
    check_scores(arguments)
    data = Data(arguments)
    check_tokens_taken(arguments, data.train)
    if run.token_cache is not None:
        keep_tokens(arguments, data)
    config = load_config(run.config_path or run.model_path, trust_remote_code=run.trust_remote_code)
    check_tied_head(run, config)
    vocab_size = num_rows_of(run, config, new_tokens=data.new_tokens)
    if vocab_size is not None:
        check_vocabulary(data.processor, vocab_size)
    data.vocab_size = vocab_size
    data.collate = CheckedCollate(data.collate, vocab_size)
    # a collate part of another kind than sft judges its rows by itself
    if "overlong" in arguments.parts["collate_fn"].kwargs:
        data.train = check_rows(arguments, data, data.train, vocab_size)
        if data.test is not None:
            with telling_of("held-out rows"):
                data.test = check_rows(arguments, data, data.test, vocab_size)
    loss_fn = arguments.parts["loss_fn"]
    if declares(functools.partial(loss_fn.part, **loss_fn.kwargs), "needs_kl"):
        data.train = WithOthers(data.train)
        data.test = None if data.test is None else WithOthers(data.test)
    report = left_over_rows(run, data.train)
    if data.bad_rows.reasons:
        report += f"{len(data.bad_rows)} bad rows are left out:\n{data.bad_rows.listed()}\n"
    if os.environ.get("RANK", "0") == "0":
        print(report, end="", flush=True)
    return data


def keep_tokens(arguments: TrainArguments, data: Data) -> None:
    """Encodes all rows, or finds them encoded; from then on the collate part looks them up.

    Before any process group exists: no other rank times out while this one works.
    """
    run, part = arguments.run, arguments.parts["collate_fn"]
    cache = TokenCache(**data.texts)
    use_token_cache(data.processor, cache)
    # not of stage 0: that one warns of samples that are cut
    encode = companion(functools.partial(data.collate, stage=1), "length_of")
    if encode is None:
        encode = functools.partial(encode_for_training, processor=data.processor, **data.texts)
    for dataset in filter(None, (data.train, data.test)):
        fill_token_cache(
            run.token_cache,
            cache,
            dataset,
            encode=encode,
            key=token_key(
                **data.texts,
                processor=data.processor,
                collate=functools.partial(part.part, **part.kwargs),
                fingerprint=data_fingerprint(dataset),
            ),
            num_workers=run.token_cache_workers,
            say=print if os.environ.get("RANK", "0") == "0" else lambda line: None,
        )


def check_scores(arguments: TrainArguments) -> None:
    """Refuses a loss that predicts tokens on a model that scores them, and its accuracy.

    Raises:
        UserError: says which key or option to change.
    """
    model, loss = arguments.parts["train_model"], arguments.parts["loss_fn"]
    if getattr(loss.part, "predicts_tokens", True):
        if getattr(model.part, "gives_scores", False):
            raise UserError(
                f"--loss-fn {loss.key} came with --train-model {model.key}, which gives a score "
                "for each token and no logits. A loss over scores was expected: use --collate-fn "
                "rm with --loss-fn rm, or --train-model causal_lm."
            )
    elif arguments.run.save_best == "token_accuracy":
        raise UserError(
            f"--save-best token_accuracy came with --loss-fn {loss.key}, which predicts no tokens. "
            "Another figure was expected, because there is no such accuracy: use --save-best "
            "loss or reward_accuracy."
        )


def check_rows(
    arguments: TrainArguments, data: Data, dataset: Dataset, vocab_size: int | None
) -> Dataset:
    """The dataset without rows that are bad or too long and may be left out."""
    run = arguments.run
    if has_tokens(dataset):  # too many to walk; each micro-batch is looked at when it is made
        check_tokens(arguments, data.processor, dataset, vocab_size)
        return dataset
    report = preflight(
        dataset,
        **data.texts,
        processor=data.processor,
        max_token_num=run.max_token_num,
        overlong=arguments.parts["collate_fn"].kwargs["overlong"],
        vocab_size=vocab_size,
        bad_rows=data.bad_rows,
        seed=run.seed,
        encode=getattr(arguments.parts["collate_fn"].part, "encode", None),
    )
    size = group_size_of(dataset)
    bad = set(whole_groups(report.bad, size))
    with_them = len(bad) - len(report.bad)
    # a group that is dropped in part stays: its other rows are learnt
    dropped = [] if is_stream(dataset) else full_groups(report.dropped, size)
    left_out = bad | set(dropped)
    text = f"{report}, {with_them} more of their groups" if with_them else str(report)
    if dropped:
        text += f"\n{len(dropped)} rows are dropped, {len(dataset) - len(left_out)} are left"
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
    if not left_out:
        return dataset
    return Subset(dataset, [row for row in range(len(dataset)) if row not in left_out])


@contextlib.contextmanager
def telling_of(rows: str) -> Iterator[None]:
    """Says in the error of a row to which rows it belongs."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{rows}: {error}") from error


def left_over_rows(run: RunConfig, dataset: Dataset) -> str:
    """Says how many rows an epoch leaves out because steps are whole.

    Raises:
        UserError: there are too few rows for one step.
    """
    num_rows = len(dataset)
    if is_stream(dataset):
        return ""
    if has_sampler(dataset):
        return mixture_report(run, dataset)
    sampler = StepSampler(
        num_rows,
        step_samples=run.batch_size * run.accumulate_steps,
        dp_degree=run.dp_degree or 1,
        seed=run.seed,
        group_size=group_size_of(dataset),
    )
    rest = num_rows % (sampler.step_samples * sampler.dp_degree)
    if rest == 0:
        return ""
    return f"{rest} of {num_rows} rows are left over in each epoch (others each time)\n"


def show_samples(arguments: TrainArguments, data: Data, schedule: Schedule) -> None:
    """Prints the first samples of training as they are trained on, in one process of the run."""
    run = arguments.run
    if not run.preview or os.environ.get("RANK", "0") != "0":
        return
    loader = make_loader(
        arguments,
        data,
        _first_rank(run),
        schedule,
        data.train,
        is_evaluation=False,
    )

    def full_length(row: int) -> int:
        encoded = encode_for_training(*data.train[row], **data.texts, processor=data.processor)
        return len(encoded)

    may_cut = "overlong" in arguments.parts["collate_fn"].kwargs and not has_tokens(data.train)
    preview(
        loader,
        data.train,
        data.processor,
        count=run.preview,
        full_length=full_length if may_cut else None,
    )


def _first_rank(run: RunConfig) -> DistributedContext:
    """Where the first process of a run stands, before the processes have met."""
    counts = {"num_replicas": run.dp_degree or 1, "num_ranks": 1, "world_size": 1}
    places = dict.fromkeys(("rank", "local_rank", "dp_rank", "pp_rank"), 0)
    return DistributedContext(**counts, **places, mesh=None, device=torch.device("cpu"))


def make_loader(
    arguments: TrainArguments,
    data: Data,
    context: DistributedContext,
    schedule: Schedule,
    dataset: object,
    *,
    is_evaluation: bool,
    start_step: int = 0,
    position: object = None,
) -> MicroBatchLoader:
    """Batches of micro-batches; the same samples on every stage, pixels on the first one.

    Args:
        position: what the loader of an earlier run said of `start_step`, by `state_after`.
    """
    run = arguments.run
    return MicroBatchLoader(
        dataset,
        collate=functools.partial(data.collate, stage=context.pp_rank),
        batch_size=run.batch_size,
        micro_batch_size=run.micro_batch_size,
        accumulate_steps=1 if is_evaluation else run.accumulate_steps,
        dp_rank=context.dp_rank,
        dp_degree=context.num_replicas,
        seed=run.seed,
        num_workers=run.num_workers,
        pins=context.device.type == "cuda",
        start_step=start_step,
        position=position,
        shuffle=not is_evaluation,
        eval=is_evaluation,
        order=run.micro_batch_order,
        packing=run.max_token_num if run.packing and not is_evaluation else None,
        legal_counts=schedule.legal_micro_batches,
    )
