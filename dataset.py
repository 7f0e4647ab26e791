"""Dataset components, (images | None, sample) per row, and collate_fn components.

A dataset opens images lazily: pixels are decoded later, and on the first stage only.
"""

import functools
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Literal

import numpy
import torch
from PIL import Image

from register import collate_fn_register, dataset_register
from stageline.corpus.corpus_files import open_corpus
from stageline.corpus.encoder import tokenizer_fingerprint
from stageline.corpus.pack import open_packed
from stageline.corpus.run_sampler import run_sampler
from stageline.data.batches import preference, prompts
from stageline.data.batches.batch import Images, MicroBatch, Sample, sample_name
from stageline.data.batches.collate import (
    Item,
    collate_encoded,
    collate_packed_sft,
    collate_sft,
    encode_for_training,
    encode_sft,
)
from stageline.data.batches.collate_part import ROLES, EncodedSample, all_encoded, collate_part
from stageline.data.batches.plain_text import (
    CorpusRows,
    collate_packed_text,
    collate_text,
    encode_text,
    held_out_starts,
    type_ranges,
)
from stageline.data.rows.json_lines import Groups, JsonLines
from stageline.data.rows.readers import check_split
from stageline.data.rows.sets import read_sets
from stageline.data.text.limit import ChatOverlong, TextOverlong
from stageline.data.text.template import MarkedWords
from stageline.errors import DataError, UserError

PairOverlong = Literal["error", "cut_prompt", "drop"]  # both rows of a pair keep the same prompt
# keys of other registries that suit a component: plain text needs no chat template
TEXT_KEYS = {"prompt": "text", "prompt_fn": "fill", "image_token": "none", "loss_fn": "sft"}
CHAT_KEYS = {"prompt": "chat", "prompt_fn": "chat", "image_token": "auto"}

dataset_register["jsonl"] = JsonLines
dataset_register["groups"] = Groups
# cached files change no row
dataset_register.register("sets", read_sets, without_effect=("cache",))

DIGIT_QUESTIONS = (
    "Which digit is this?",
    "What digit do you see?",
    "Which number is written here?",
    "Read the digit in the picture.",
)
NUM_TEST_DIGITS = 360


@dataset_register("digits")
class Digits:
    """scikit-learn's handwritten digits, 8x8 pixels enlarged; 1,437 to train, 360 held out.

    The split is fixed and keeps the share of each digit.

    Args:
        dataset_path: not used; the images come with scikit-learn.
        image_size: width and height of the pictures.
    """

    def __init__(
        self,
        *,
        dataset_path: str | None = None,
        split: Literal["train", "test"] = "train",
        image_size: int = 32,
    ) -> None:
        check_split(split)
        self._pixels, self._labels, train, test = _digits()
        self.rows = train if split == "train" else test
        self._image_size = image_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[Image.Image], dict[str, Any]]:
        row = int(self.rows[index])
        small = Image.fromarray(self._pixels[row]).convert("RGB")
        size = (self._image_size, self._image_size)
        question, digit = DIGIT_QUESTIONS[row % len(DIGIT_QUESTIONS)], str(self._labels[row])
        sample = {"id": f"digits-{row}", "question": question, "answer": digit, "group": digit}
        return [small.resize(size, Image.Resampling.BICUBIC)], {**sample, "num_choices": 10}

    def describe(self, index: int) -> str:
        return f"digits row {self.rows[index]}"

    def fingerprint(self) -> str:
        """Return a SHA-256 of scikit-learn's pixels, the image size and the rows of this split."""
        digest = sha256(f"digits {self._image_size} ".encode())
        for array in (self._pixels, self._labels, self.rows):
            digest.update(array.tobytes())
        return digest.hexdigest()


@functools.cache
def _digits() -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Return pixels [1797, 8, 8] as bytes, labels [1797], and the rows of both splits.

    A hash of the row's number draws the test rows of each digit: equal in every library version.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels, labels = (digits.images * (255 / 16)).round().astype(numpy.uint8), digits.target
    shares = numpy.bincount(labels) * NUM_TEST_DIGITS / len(labels)
    wanted = numpy.floor(shares).astype(int)
    largest_remainders = numpy.argsort(wanted - shares, kind="stable")
    wanted[largest_remainders[: NUM_TEST_DIGITS - wanted.sum()]] += 1
    chosen: list[int] = []
    for digit, number in enumerate(wanted):
        rows = numpy.flatnonzero(labels == digit).tolist()
        chosen += sorted(rows, key=lambda row: sha256(f"digits {row}".encode()).digest())[:number]
    test = numpy.sort(numpy.array(chosen))
    return pixels, labels, numpy.setdiff1d(numpy.arange(len(pixels)), test), test


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

    --dataset-path is its prefix: the path of PREFIX.bin and PREFIX.idx without suffix.
    --global-batch-distributed, --mixture-weights and --drop-mode set each type's rows in a batch.

    Args:
        rows: segments = a segment a row; packed = rows filled with whole segments that do not
            attend to each other, from PREFIX.pack (made if missing). Held-out rows are segments.
        row_length: tokens of a packed row; default: those of PREFIX.pack, else --seq-length.
        test_size: segments held out at the end of each type; below 1 a share of them.
        test_path: prefix of a corpus to evaluate on.
        any_tokenizer: accept a corpus of another tokenizer than the run's.
    """
    check_split(split)
    is_test = split == "test"
    if not dataset_path:
        raise UserError(
            "--dataset corpus requires --dataset-path. Give the path of a corpus without .idx, or "
            "make one first (corpus.py write)."
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
            f"--dataset.test_size is {test_size}. Give a number of segments or a share between 0 "
            "and 1, or leave it out."
        )
    if rows == "packed" and test_size is not None:
        raise UserError(
            "--dataset.test_size does not go with --dataset.rows packed, whose rows hold segments "
            "of the whole corpus. Give --dataset.test_path."
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
        packed = open_packed(prefix, row_length)
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
        fingerprint_of=None if any_tokenizer else tokenizer_fingerprint,
    )


@collate_fn_register("sft", default_keys=CHAT_KEYS)
@collate_part(encode=encode_sft, pack=collate_packed_sft)
def sft(samples: Sequence[Item], *, overlong: ChatOverlong = "error", **common: Any) -> MicroBatch:
    """Supervised fine-tuning: the template's answer is in the loss; rows are padded on the right.

    Args:
        overlong: handling of a sample of more than --max-token-num tokens: refuse it, cut the
            beginning of its prompt's text, share the tokens between prompt and answer, which both
            lose their ends (docs/data_formats.md), or drop it.
    """
    return collate_sft(samples, overlong=overlong, **common)


_marked_words = functools.cache(MarkedWords)


def encode_contrastive(
    images: Images, sample: Sample, *, marked: str | list[str] = "directions", **common: Any
) -> EncodedSample:
    """Encode a sample like `encode_sft`, with the tokens of some words marked."""
    words = _marked_words(marked if isinstance(marked, str) else tuple(marked))
    encode = functools.partial(encode_for_training, words=words)
    return encode_sft(images, sample, encode=encode, **common)


@collate_fn_register("contrastive", needs_groups=True)
@collate_part(encode=encode_contrastive)
def contrastive(
    samples: Sequence[Item],
    *,
    overlong: ChatOverlong = "error",
    marked: Literal["directions", "clock", "none"] | list[str] = "directions",
    **common: Any,
) -> MicroBatch:
    """Like sft, in whole groups (anchor, positive, negatives), with words of interest marked.

    `loss_marks` [B, T] bool: supervised tokens that cover a character of one of the words.
    `loss_groups` [B] int64: number of the group within the micro-batch; its rows are the anchor,
    the positive and the negatives, in this order.

    Args:
        overlong: as in sft; a group with a dropped sample is not compared.
        marked: words of interest in the answers: left,right,"upper left", 左 or the name of a list,
            directions, clock or none; names may stand among words.
    """
    groups = group_numbers([sample for _, sample in samples])
    encoded = all_encoded(samples, encode_contrastive, marked=marked, overlong=overlong, **common)
    batch = collate_encoded(encoded, **common)
    marks_BT = torch.zeros_like(batch["labels"], dtype=torch.bool)
    for index, one in enumerate(encoded):
        found = torch.tensor(one.rows[0].is_marked, dtype=torch.bool)  # an empty sample was dropped
        marks_BT[index, : len(found)] = found
    batch["loss_marks"] = marks_BT
    batch["loss_groups"] = torch.tensor(groups, dtype=torch.int64)
    return batch


def group_numbers(samples: Sequence[Sample]) -> list[int]:
    """Return the number of each sample's group, from 0.

    Raises:
        DataError: a group is not whole: names the sample, and what was expected in its place.
    """

    def not_whole(sample: Sample, expected: str) -> DataError:
        return DataError(
            f"{sample_name(sample)}: group not whole: it has contrast_group "
            f"{sample.get('contrast_group')!r} and role {sample.get('role')!r} in the place of "
            f"{expected}. Use a dataset with group_size (`dataset` groups), and correct its rows: "
            "anchor, positive, negatives."
        )

    # a group may appear twice, to fill up the last steps of an evaluation
    starts = [index for index, sample in enumerate(samples) if sample.get("role") == "anchor"]
    if starts[:1] != [0]:
        raise not_whole(samples[0], "the anchor (sample 1) of a new group")
    size = [*starts, len(samples)][1]
    if size < 3:
        raise not_whole(samples[size - 1], "an anchor, a positive and at least one negative")
    for index, sample in enumerate(samples):
        place = index % size
        anchor = samples[index - place]
        group, role = sample.get("contrast_group"), sample.get("role")
        expected = ROLES[min(place, 2)]
        if role != expected or group is None or group != anchor.get("contrast_group"):
            wanted = f"{anchor.get('contrast_group')!r}" if place else "a new group"
            raise not_whole(sample, f"the {expected} (sample {place + 1} of {size}) of {wanted}")
    if len(samples) % size:
        missing = size - len(samples) % size
        raise not_whole(samples[-1], f"{missing} more behind it, since groups have {size} samples")
    return [index // size for index in range(len(samples))]


@collate_fn_register("dpo", default_keys=CHAT_KEYS | {"loss_fn": "dpo"})
@collate_part(encode=preference.encode_pair)
def dpo(samples: Sequence[Item], *, overlong: PairOverlong = "error", **common: Any) -> MicroBatch:
    """Preferences: each sample becomes two rows, its prompt with `chosen` and with `rejected`.

    Args:
        overlong: as in sft; both rows are cut or dropped alike.
    """
    return preference.collate_pairs(samples, overlong=overlong, **common)


@collate_fn_register("kto", default_keys=CHAT_KEYS | {"loss_fn": "kto"})
@collate_part(encode=preference.encode_answer)
def kto(samples: Sequence[Item], *, overlong: PairOverlong = "error", **common: Any) -> MicroBatch:
    """Desirable (`label` true) or undesirable answers; the loss is on the last one of a sample.

    Args:
        overlong: as in sft.
    """
    return preference.collate_answers(samples, overlong=overlong, **common)


@collate_fn_register("rm", default_keys=CHAT_KEYS | {"loss_fn": "rm"})
@collate_part(encode=preference.encode_scored_pair)
def rm(samples: Sequence[Item], *, overlong: PairOverlong = "error", **common: Any) -> MicroBatch:
    """Pairs for a reward model: two rows a sample, the chosen answer and then the rejected one.

    A field `margin` is subtracted from the score difference in the loss. --micro-batch-size counts
    samples.

    Args:
        overlong: as in sft, for each of the two; a pair with a dropped row is left out.
    """
    return preference.collate_rewards(samples, overlong=overlong, **common)


@collate_fn_register("grpo", gives_prompts=True, default_keys=CHAT_KEYS | {"loss_fn": "grpo"})
@collate_part(encode=prompts.encode_prompt, pack=prompts.collate_packed_answers)
def grpo(
    samples: Sequence[Item],
    *,
    max_completion_length: int,
    overlong: Literal["error", "drop"] = "error",
    **common: Any,
) -> MicroBatch:
    """Prompts that the model answers before each step; rows need no answer but for their rewards.

    Args:
        overlong: what to do with a prompt that leaves no room for the longest answer within
            --max-token-num: refuse it, or drop it.
    """
    return prompts.collate_answers(
        samples, max_completion_length=max_completion_length, overlong=overlong, **common
    )


@collate_fn_register("pt", takes_tokens=True, default_keys=TEXT_KEYS)
@collate_part(encode=encode_text, pack=collate_packed_text)
def pt(samples: Sequence[Item], *, overlong: TextOverlong = "error", **common: Any) -> MicroBatch:
    """Pre-training on plain text: every token of the field `text`, and EOS, is in the loss.

    It takes the tokens of --dataset corpus as they are.

    Args:
        overlong: handling of a text of more than --max-token-num tokens: refuse it, keep its
            beginning (without EOS), or drop it.
    """
    return collate_text(samples, overlong=overlong, **common)
