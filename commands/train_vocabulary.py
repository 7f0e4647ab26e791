"""The vocabulary of a training run: new tokens, the rows they need, and a head that is tied."""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from commands import say
from options.train import RunConfig
from parse_args import TrainArguments
from stageline.checkpoint.adapter import num_rows_on_disk, rows_of_adapter
from stageline.checkpoint.files import find_checkpoint
from stageline.data.batches.preflight import check_vocabulary
from stageline.data.text.tokenizers import (
    NewTokens,
    add_new_tokens,
    processor_of_weights,
    with_rowless,
)
from stageline.errors import UserError
from stageline.model_folder import load_config
from stageline.modules.new_rows import NewRows, vocab_size_of


def add_tokens(arguments: TrainArguments, processor: Any, path: str) -> NewTokens | None:
    """Add the run's new tokens to its processor, which came from `path`.

    Returns:
        These tokens and, with --vocab.resize, all tokens that the weights have no row for, or one
        that their own tokenizer has no token for.
    """
    run = arguments.run
    is_other = run.model_path is not None and Path(run.model_path) != Path(path)
    if not (run.vocab.new_tokens or run.vocab.resize or is_other):
        return None
    config = load_config(run.config_folder, trust_remote_code=run.trust_remote_code)
    num_rows = num_rows_of(run, config)
    other = processor_of_weights(
        run.model_path if is_other else None, trust_remote_code=run.trust_remote_code
    )
    tokens = None
    if run.vocab.new_tokens:
        # tokens that others forgot to make room for have no start, unless --vocab.resize gives one
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
            f"{len(more.rowless)} tokens of {path} are not in the tokenizer of {run.model_path}: "
            "their rows start as they are there, and LoRA and --parts.llm.frozen leave them so. "
            "--vocab.resize starts these rows near the mean and trains them."
        )
    return tokens


def num_rows_of(
    run: RunConfig, config: PretrainedConfig, *, new_tokens: NewTokens | None = None
) -> int | None:
    """Return the rows of embedding and head, new ones included; None: not known."""
    known = vocab_size_of(config)
    if known is None:
        return None
    found = [known, *(token + 1 for token in (new_tokens.ids if new_tokens else ()))]
    if run.model_path is not None:
        folder = find_checkpoint(run.model_path)
        found.append(num_rows_on_disk(folder, trust_remote_code=run.trust_remote_code))
    width = getattr(config.get_text_config(decoder=True), "hidden_size", None)
    for path in run.adapter_path or ():
        found += rows_of_adapter(Path(path), width)
    return max(found)


def check_tied_head(run: RunConfig, config: PretrainedConfig) -> None:
    """Refuse a learning rate for a head that is the embedding; note that freezing it is none."""
    if not getattr(config, "tie_word_embeddings", False):
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
    """Return the new tokens for a stage, if any.

    Args:
        is_known: the weights have their rows, as those of a checkpoint of this run.
    """
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
