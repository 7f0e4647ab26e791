"""The dataset parts, (images | None, sample) per row, and the collate_fn parts.

A dataset opens images lazily: pixels are decoded later, and on the first stage only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from register import collate_fn_register, dataset_register, load_target
from stageline.data.batches.collate_part import collate_part
from stageline.errors import UserError

if TYPE_CHECKING:
    import torch

    from stageline.data.batches.collate import Item
    from stageline.data.batches.collate_part import EncodedSample
    from stageline.data.batches.plain_text import CorpusRows
    from stageline.data.text.template import MarkedWords

# imported when a part is called; by name, since jsonargparse follows an import to find options
COLLATE, PREFERENCE = "stageline.data.batches.collate", "stageline.data.batches.preference"
PLAIN_TEXT = "stageline.data.batches.plain_text"
ChatOverlong = Literal["error", "cut_prompt", "share", "drop"]
PairOverlong = Literal["error", "cut_prompt", "drop"]  # both rows of a pair keep the same prompt
PromptOverlong = Literal["error", "drop"]
TextOverlong = Literal["error", "cut", "drop"]
# keys of other registers that suit a part: of text there is no template to choose
TEXT_KEYS = {"prompt": "text", "prompt_fn": "fill", "image_token": "none", "loss_fn": "sft"}
CHAT_KEYS = {"prompt": "chat", "prompt_fn": "chat", "image_token": "auto"}

dataset_register["digits"] = "stageline.tasks.digits:Digits"
dataset_register["jsonl"] = "stageline.data.rows.json_lines:JsonLines"
dataset_register["groups"] = "stageline.data.rows.json_lines:Groups"
# what is kept of files changes no row
dataset_register.register("sets", "stageline.data.rows.sets:read_sets", without_effect=("cache",))


@dataset_register("corpus")
def corpus(
    *,
    dataset_path: str | None,
    split: str = "train",
    rows: Literal["segments", "packed"] = "segments",
    row_length: int | None = None,
    test_size: int | float | None = None,
    test_path: str | None = None,
    any_tokenizer: bool = False,
    global_batch_distributed: list[int] | None = None,
    mixture_weights: list[float] | None = None,
    drop_mode: str | None = None,
) -> CorpusRows:
    """A pre-training corpus that corpus.py wrote; goes with --collate-fn pt.

    --dataset-path is its prefix: where PREFIX.bin and PREFIX.idx lie. What a batch has of each
    type say --global-batch-distributed, --mixture-weights and --drop-mode.

    Args:
        rows: a segment a row; or rows that are filled with whole segments, none of which sees
            another, by PREFIX.pack, which is made where it is missing. Held-out rows are segments.
        row_length: tokens of a packed row; default: as PREFIX.pack has them, else --seq-length.
        test_size: so many segments of each type, or below 1 a share, are held out at its end.
        test_path: prefix of a corpus to evaluate on.
        any_tokenizer: take a corpus of another tokenizer than the run's.
    """
    from stageline.corpus.corpus_files import open_corpus
    from stageline.corpus.run_sampler import run_sampler
    from stageline.data.batches.plain_text import CorpusRows, held_out_starts, type_ranges
    from stageline.data.rows.readers import check_split

    check_split(split)
    is_test = split == "test"
    if not dataset_path:
        raise UserError(
            "--dataset corpus came without --dataset-path. Give the path of a corpus without .idx, "
            "or make one first (corpus.py write)."
        )
    if test_size is not None and test_path is not None:
        raise UserError(
            "--dataset.test_size and --dataset.test_path were both given. Leave one out."
        )
    if is_test and test_size is None and test_path is None:
        raise UserError(
            "there are no held-out rows. Give --dataset.test_size or --dataset.test_path, or "
            "--eval-samples 0 to train without evaluations."
        )
    if test_size is not None and not test_size > 0:
        raise UserError(
            f"--dataset.test_size {test_size}. A number of segments, or a share between 0 and 1, "
            "is needed: correct it, or leave it out."
        )
    if rows == "packed" and test_size is not None:
        raise UserError(
            "--dataset.test_size came with --dataset.rows packed: packed rows hold segments of the "
            "whole corpus. Give --dataset.test_path."
        )
    prefix = test_path if is_test and test_path is not None else dataset_path
    opened = open_corpus(prefix)
    ranges = type_ranges(opened.type_starts)
    if test_size is not None:
        starts = held_out_starts(opened, test_size)
        cut = zip(ranges, starts, strict=True)
        ranges = [(at, stop) if is_test else (first, at) for (first, stop), at in cut]
    packed = None
    if rows == "packed" and not is_test:
        packed = _packed(prefix, row_length)
        ranges = type_ranges(packed.type_starts)
    draw = functools.partial(
        run_sampler, counts=global_batch_distributed, weights=mixture_weights, drop_mode=drop_mode
    )
    return CorpusRows(
        opened,
        ranges,
        source=str(prefix),
        packed=packed,
        make_sampler=None if is_test else draw,
        fingerprint_of=None if any_tokenizer else _fingerprint,
    )


def _fingerprint(tokenizer: Any) -> str:
    from stageline.corpus.encoder import tokenizer_fingerprint

    return tokenizer_fingerprint(tokenizer)


def _packed(prefix: str, row_length: int | None) -> Any:
    """The packed rows of a corpus; one process of a machine makes them where they are missing."""
    from filelock import FileLock

    from stageline.corpus.pack import PackedRows, pack_corpus

    if Path(f"{prefix}.pack").exists():  # perhaps where nobody may write a lock
        rows = PackedRows(prefix)
        return rows if row_length in (None, rows.row_length) else pack_corpus(prefix, row_length)
    with FileLock(f"{prefix}.pack.lock"):
        return pack_corpus(prefix, row_length)


@collate_fn_register("sft", default_keys=CHAT_KEYS)
@collate_part(encode=f"{COLLATE}:encode_sft", pack=f"{COLLATE}:collate_packed_sft")
def sft(
    samples: Sequence[Item],
    *,
    num_stages: int,
    pad_to_multiple_of: int = 1,
    overlong: ChatOverlong = "error",
    **common: Any,
) -> dict[str, torch.Tensor]:
    """Supervised fine-tuning: the template's answer is learnt; rows are padded on the right.

    Args:
        overlong: what to do with a sample of more than --max-token-num tokens: refuse it, cut
            the beginning of its prompt's text, let prompt and answer share the room, where both
            lose their ends (docs/data_formats.md), or drop it.
    """
    return load_target(f"{COLLATE}:collate_sft")(
        samples, pad_to_multiple_of=pad_to_multiple_of, overlong=overlong, **common
    )


def _encode_contrastive(
    images: Any,
    sample: dict[str, Any],
    *,
    marked: str | list[str] = "directions",
    **common: Any,
) -> EncodedSample:
    encode = load_target(f"{COLLATE}:encode_marked")
    return encode(images, sample, words=_words(marked), **common)


@collate_fn_register("contrastive", needs_groups=True)
@collate_part(encode=_encode_contrastive)
def contrastive(
    samples: Sequence[Item],
    *,
    num_stages: int,
    pad_to_multiple_of: int = 1,
    overlong: ChatOverlong = "error",
    marked: Literal["directions", "clock", "none"] | list[str] = "directions",
    **common: Any,
) -> dict[str, torch.Tensor]:
    """As sft, of whole groups (anchor, positive, negatives), with words of interest marked.

    Args:
        overlong: as in sft; a group with a dropped sample is not compared.
        marked: words of interest in the answers: left,right,"upper left", 左 or the name of a list,
            directions, clock or none; names may stand among words.
    """
    return load_target(f"{COLLATE}:collate_contrastive")(
        samples,
        words=_words(marked),
        pad_to_multiple_of=pad_to_multiple_of,
        overlong=overlong,
        **common,
    )


def _words(marked: str | list[str]) -> MarkedWords:
    return _compiled(marked if isinstance(marked, str) else tuple(marked))


@functools.cache
def _compiled(marked: str | tuple[str, ...]) -> MarkedWords:
    from stageline.data.text.template import MarkedWords

    return MarkedWords(marked)


@collate_fn_register("dpo", default_keys=CHAT_KEYS | {"loss_fn": "dpo"})
@collate_part(encode=f"{PREFERENCE}:encode_pair")
def dpo(
    samples: Sequence[Item],
    *,
    num_stages: int,
    pad_to_multiple_of: int = 1,
    overlong: PairOverlong = "error",
    **common: Any,
) -> dict[str, torch.Tensor]:
    """Preferences: each sample becomes two rows, its prompt with `chosen` and with `rejected`.

    Args:
        overlong: as in sft; both rows are cut or dropped alike.
    """
    return load_target(f"{PREFERENCE}:collate_pairs")(
        samples, pad_to_multiple_of=pad_to_multiple_of, overlong=overlong, **common
    )


@collate_fn_register("kto", default_keys=CHAT_KEYS | {"loss_fn": "kto"})
@collate_part(encode=f"{PREFERENCE}:encode_answer")
def kto(
    samples: Sequence[Item],
    *,
    num_stages: int,
    pad_to_multiple_of: int = 1,
    overlong: PairOverlong = "error",
    **common: Any,
) -> dict[str, torch.Tensor]:
    """Answers that are wanted (`label` true) or not; the last answer of each sample is learnt.

    Args:
        overlong: as in sft.
    """
    return load_target(f"{PREFERENCE}:collate_answers")(
        samples, pad_to_multiple_of=pad_to_multiple_of, overlong=overlong, **common
    )


@collate_fn_register("grpo", gives_prompts=True, default_keys=CHAT_KEYS | {"loss_fn": "grpo"})
@collate_part(
    encode="stageline.data.batches.prompts:encode_prompt",
    pack="stageline.data.batches.prompts:collate_packed_answers",
)
def grpo(
    samples: Sequence[Item],
    *,
    num_stages: int,
    max_completion_length: int,
    pad_to_multiple_of: int = 1,
    overlong: PromptOverlong = "error",
    **common: Any,
) -> dict[str, torch.Tensor]:
    """Prompts that the model answers before each step; rows need no answer but for their rewards.

    Args:
        overlong: what to do with a prompt that leaves no room for the longest answer within
            --max-token-num: refuse it, or drop it.
    """
    return load_target("stageline.data.batches.prompts:collate_answers")(
        samples,
        max_completion_length=max_completion_length,
        pad_to_multiple_of=pad_to_multiple_of,
        overlong=overlong,
        **common,
    )


@collate_fn_register("pt", takes_tokens=True, default_keys=TEXT_KEYS)
@collate_part(encode=f"{PLAIN_TEXT}:encode_text", pack=f"{PLAIN_TEXT}:collate_packed_text")
def pt(
    samples: Sequence[Item],
    *,
    num_stages: int,
    pad_to_multiple_of: int = 1,
    overlong: TextOverlong = "error",
    **common: Any,
) -> dict[str, torch.Tensor]:
    """Pre-training on plain text: every token of the field `text` is learnt, and EOS behind it.

    Of --dataset corpus it takes the tokens as they are.

    Args:
        overlong: what to do with a text of more than --max-token-num tokens: refuse it, keep its
            beginning (without EOS), or drop it.
    """
    return load_target(f"{PLAIN_TEXT}:collate_text")(
        samples, pad_to_multiple_of=pad_to_multiple_of, overlong=overlong, **common
    )


@collate_fn_register("rm", default_keys=CHAT_KEYS | {"loss_fn": "rm"})
@collate_part(encode=f"{PREFERENCE}:encode_scored_pair")
def rm(
    samples: Sequence[Item],
    *,
    num_stages: int,
    pad_to_multiple_of: int = 1,
    overlong: PairOverlong = "error",
    **common: Any,
) -> dict[str, torch.Tensor]:
    """Pairs for a reward model: two rows a sample, the chosen answer and then the rejected one.

    A field `margin` says by how much the chosen one is to win. --micro-batch-size counts samples.

    Args:
        overlong: as in sft, for each of the two; a pair with a dropped row counts for nothing.
    """
    return load_target(f"{PREFERENCE}:collate_rewards")(
        samples, pad_to_multiple_of=pad_to_multiple_of, overlong=overlong, **common
    )
