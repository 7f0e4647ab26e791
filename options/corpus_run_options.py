"""The options of a run on a pre-training corpus: what a batch has of each type of text."""

from dataclasses import dataclass

from options.fields import OptionError, option

# of all other datasets, rows are drawn evenly
_ONLY_CORPUS = ("global_batch_distributed", "mixture_weights", "drop_mode")


@dataclass(kw_only=True)
class CorpusRunOptions:
    """Corpus"""

    global_batch_distributed: list[int] | None = option(
        None,
        "rows of each type in a global batch, 64,64; default: in proportion to the types' sizes",
    )
    mixture_weights: list[float] | None = option(
        None, "share of each type in all that is drawn, 0.7,0.3, instead of whole rows a batch"
    )
    drop_mode: str | None = option(
        None,
        "when an epoch ends and what fills it: first_ends_drop (the default, or 0), "
        "first_ends_fill (1), last_ends_drop (2), last_ends_fill (3)",
    )


def check_corpus_run(run: CorpusRunOptions, *, dataset_key: str, has_types: bool) -> None:
    """Refuses a mixture of a dataset without types, and two mixtures at once.

    Raises:
        OptionError: names the option.
    """
    given = [name for name in _ONLY_CORPUS if getattr(run, name) is not None]
    if given and not has_types:
        option_name = "--" + given[0].replace("_", "-")
        raise OptionError(
            f"{option_name} came with --dataset {dataset_key}. --dataset corpus was expected, "
            f"because rows of other datasets have no types to choose from: leave {option_name} "
            "out; --dataset sets has ways of its own to mix (--dataset.mix)."
        )
    if run.global_batch_distributed is not None and run.mixture_weights is not None:
        raise OptionError(
            "--global-batch-distributed and --mixture-weights were both given. One of them was "
            "expected, because both say how much of each type is drawn: leave one out."
        )
