"""What a training run does with a pre-training corpus: its mixture, its checks, what it says of it.

Knows the options; train_data.py uses it. Asks datasets for what they offer, not for their class.
"""

import os
from typing import Any

from torch.utils.data import Dataset, Subset

from options.corpus_run_options import check_corpus_run
from options.run_options import RunConfig
from parse_args import TrainArguments
from stageline.data.sampler import has_sampler
from stageline.errors import UserError


def mix_types(run: RunConfig, dataset_key: str, dataset: Dataset) -> None:
    """Tells a dataset that draws its own rows how to mix types.

    Raises:
        OptionError: a mixture was given, and the dataset has no types.
    """
    mixing = getattr(dataset, "mixing", None)
    check_corpus_run(run, dataset_key=dataset_key, has_types=mixing is not None)
    if mixing is not None:
        mixing["counts"] = run.global_batch_distributed
        mixing["weights"] = run.mixture_weights
        mixing["drop_mode"] = run.drop_mode


def has_tokens(dataset: Dataset) -> bool:
    """Whether the samples of a dataset are token ids already."""
    inner = dataset.dataset if isinstance(dataset, Subset) else dataset
    return bool(getattr(inner, "has_tokens", False))


def check_tokens_taken(arguments: TrainArguments, dataset: Dataset) -> None:
    """Refuses to tokenize or render what is token ids already.

    Raises:
        UserError: says which option to change.
    """
    if not has_tokens(dataset):
        return
    run, parts = arguments.run, arguments.parts
    collate, came = parts["collate_fn"], f"came with --dataset {parts['dataset'].key}"
    if not getattr(collate.part, "takes_tokens", False):
        raise UserError(
            f"--collate-fn {collate.key} {came}, whose samples are token ids. A collate_fn part "
            "that takes them was expected, because there is no text to fill a template with: use "
            "--collate-fn pt."
        )
    if run.token_cache is not None:
        raise UserError(
            f"--token-cache {came}, whose samples are token ids. Text was expected, because there "
            "is nothing to keep: leave it out."
        )
    if run.packing and getattr(dataset, "packed", None) is not None:
        raise UserError(
            f"--packing {came} and --dataset.rows packed. One of them was expected, because such "
            "rows are full already: leave --packing out."
        )


def check_tokens(
    arguments: TrainArguments, processor: Any, dataset: Dataset, vocab_size: int | None
) -> None:
    """Lets a dataset of tokens compare itself with the run; prints what it says of itself."""
    run = arguments.run
    inner = dataset.dataset if isinstance(dataset, Subset) else dataset
    line = inner.check(
        processor=processor,
        max_token_num=run.max_token_num,
        vocab_size=vocab_size,
        overlong=arguments.parts["collate_fn"].kwargs.get("overlong", "error"),
    )
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def mixture_report(run: RunConfig, dataset: Any) -> str:
    """What an epoch has of each type, of a dataset that draws its own rows.

    Raises:
        UserError: the options of the mixture do not go together.
    """
    assert has_sampler(dataset)
    sampler = dataset.make_sampler(
        batch_size=run.batch_size,
        step_samples=run.batch_size * run.accumulate_steps,
        dp_rank=0,
        dp_degree=run.dp_degree or 1,
        seed=run.seed,
        shuffle=True,
        start_step=0,
        position=None,
    )
    told = getattr(sampler, "report", None)
    return "" if told is None else told()
