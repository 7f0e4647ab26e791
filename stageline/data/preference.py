"""Makes one micro-batch of preferences; the bodies of the `dpo` and `kto` collate parts.

A sample of `dpo` becomes two rows next to each other, [c0, r0, c1, r1, ...]: the prompt with the
chosen and with the rejected answer. A sample of `kto` is one answer that is wanted or not; beside
the rows go others, the same prompts with answers that belong elsewhere, from which the step
estimates how far the model is from the reference. Shapes: B rows, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Subset

from stageline.data.batch import Images, Sample, sample_name
from stageline.data.collate import collate_encoded, encode_for_training, encode_limited
from stageline.data.encode import Encoded
from stageline.data.limit import Overlong, limit_length
from stageline.data.pairs import bad_row, both_answers, is_answer, unlearnt
from stageline.errors import DataError

Samples = Sequence[tuple[Images, Sample]]
OTHER = "other_row"  # field with (images, sample) of another row, whose answer is borrowed
KL_PREFIX = "loss_kl_"
PAIR_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
ANSWER_COLUMN = "ref_logps"
_TEXTS = ("prompt", "prompt_fn", "image_token", "processor")


# -- pairs -----------------------------------------------------------------------------------


def encode_pair(images: Images, sample: Sample, **texts: Any) -> list[Encoded]:
    """The chosen and the rejected row of a sample, of any length.

    Raises:
        DataError: an answer is missing, or has no supervised token.
    """
    return [encode_for_training(images, one, **texts) for one in both_answers(sample)]


def limited_pair(
    images: Images,
    sample: Sample,
    *,
    pad_token_id: int,
    max_token_num: int,
    stage: int,
    overlong: Overlong = "error",
    **texts: Any,
) -> list[Encoded]:
    """The two rows of a sample, of at most `max_token_num` tokens.

    Both are changed alike: the same tokens of the prompt are cut from both, or both are dropped.
    """
    pair = encode_pair(images, sample, **texts)
    longest = max(map(len, pair))
    if longest <= max_token_num:
        return pair
    limited = list(map(_cuttable_in_prompt, pair))
    # the longer one first: if it is refused, the numbers are those of the limit
    for index in sorted((0, 1), key=lambda index: -len(pair[index])):
        limited[index] = limit_length(
            limited[index],
            max_token_num=len(pair[index]) - (longest - max_token_num),
            overlong=overlong,
            name=sample_name(sample),
            pad_token_id=pad_token_id,
            warn=stage == 0,
        )
    return limited


def length_pair(
    images: Images, sample: Sample, *, pad_to_multiple_of: int = 1, **common: Any
) -> int:
    """Tokens of the longer row of a sample; `common` is what `collate_pairs` takes too."""
    return max(map(len, limited_pair(images, sample, **common)))


def collate_pairs(
    samples: Samples, *, pad_to_multiple_of: int = 1, **common: Any
) -> dict[str, torch.Tensor]:
    """As `collate_sft`, of pairs, with `loss_pairs` and `loss_is_chosen`, both [B].

    Rows that bring their log-probabilities under the reference, as trl writes them, give
    `loss_reference` [B].
    """
    pairs = [limited_pair(images, sample, **common) for images, sample in samples]
    rows = [row for pair in pairs for row in pair]
    twice = [one for one in samples for _ in range(2)]
    batch = collate_encoded(rows, twice, pad_to_multiple_of=pad_to_multiple_of, **common)
    numbers = torch.arange(len(rows))
    batch["loss_pairs"] = numbers // 2
    batch["loss_is_chosen"] = numbers % 2 == 0
    return _add_columns(batch, [sample for _, sample in samples], PAIR_COLUMNS)


def _cuttable_in_prompt(row: Encoded) -> Encoded:
    """Nothing behind the first supervised token may go: it differs between the two answers."""
    start = row.is_target.index(True)
    is_cuttable = [may_go and place < start for place, may_go in enumerate(row.is_cuttable)]
    return Encoded(row.input_ids, row.is_target, is_cuttable, row.is_marked)


# -- single answers --------------------------------------------------------------------------


class WithOthers(Subset):
    """A dataset whose samples bring the row before them, the first one the last row.

    So each prompt has an answer that belongs elsewhere, always the same one, however rows fall
    into steps, micro-batches and replicas.

    Raises:
        DataError: there is one row only.
    """

    def __init__(self, dataset: Any) -> None:
        if len(dataset) < 2:
            raise DataError(
                f"the dataset has {len(dataset)} row. Two at least were expected, because KTO "
                "estimates its baseline from prompts with the answers of other rows: give more "
                "rows, or use --loss-fn.use_kl false."
            )
        super().__init__(dataset, range(len(dataset)))

    def __getitem__(self, row: int) -> tuple[Images, Sample]:
        images, sample = self.dataset[row]
        return images, {**sample, OTHER: self.dataset[(row - 1) % len(self)]}

    def __getitems__(self, rows: list[int]) -> list[tuple[Images, Sample]]:
        return [self[row] for row in rows]

    def describe(self, row: int) -> str:
        """File and line of a row."""
        return self.dataset.describe(row) if hasattr(self.dataset, "describe") else f"row {row}"


def encode_answer(images: Images, sample: Sample, **texts: Any) -> Encoded:
    """The row of a sample, of any length; of several answers the last one is learnt.

    Raises:
        DataError: it does not say whether the answer is wanted, or has no supervised token.
    """
    if not isinstance(sample.get("label"), bool):
        raise bad_row(sample, "label", sample.get("label"), "true (wanted) or false")
    messages = sample.get("messages")
    if isinstance(messages, list) and messages:
        last = max((i for i, message in enumerate(messages) if is_answer(message)), default=-1)
        history = list(map(unlearnt, messages[:last])) if last > 0 else messages[:last]
        sample = {**sample, "messages": [*history, *messages[last:]] if last >= 0 else messages}
    return encode_for_training(images, sample, **texts)


def limited_answer(images: Images, sample: Sample, **common: Any) -> Encoded:
    """The row of a sample, of at most `max_token_num` tokens; `common` as of `encode_limited`."""
    return encode_limited(images, sample, encode=encode_answer, **common)


def length_answer(
    images: Images, sample: Sample, *, pad_to_multiple_of: int = 1, **common: Any
) -> int:
    """Tokens of one sample; `common` is what `collate_answers` takes too."""
    return len(limited_answer(images, sample, **common))


def collate_answers(
    samples: Samples, *, pad_to_multiple_of: int = 1, **common: Any
) -> dict[str, torch.Tensor]:
    """As `collate_sft`, with `loss_is_wanted` [B] bool.

    Samples that bring another row (`WithOthers`) give `loss_kl_input_ids` and what else a
    micro-batch has, of the same prompts with the other rows' answers; pixels are not repeated.
    """
    rows = [limited_answer(images, sample, **common) for images, sample in samples]
    shape = {**common, "pad_to_multiple_of": pad_to_multiple_of}
    batch = collate_encoded(rows, samples, **shape)
    if all(OTHER in sample for _, sample in samples):
        pairs = zip(rows, samples, strict=True)
        mixed = [_borrowing(row, sample, **common) for row, (_, sample) in pairs]
        others = collate_encoded(mixed, samples, **{**shape, "stage": max(1, common["stage"])})
        batch.update({KL_PREFIX + name: value for name, value in others.items()})
    batch["loss_is_wanted"] = torch.tensor([sample["label"] for _, sample in samples])
    return _add_columns(batch, [sample for _, sample in samples], (ANSWER_COLUMN,))


def _borrowing(row: Encoded, sample: Sample, *, max_token_num: int, **common: Any) -> Encoded:
    """A row's prompt with the answer of another row, cut at the end where it is too long."""
    if not any(row.is_target):
        return row  # dropped
    texts = {name: common[name] for name in _TEXTS}
    other = encode_answer(*sample[OTHER], **texts)
    start, other_start = row.is_target.index(True), other.is_target.index(True)
    return Encoded(
        (row.input_ids[:start] + other.input_ids[other_start:])[:max_token_num],
        (row.is_target[:start] + other.is_target[other_start:])[:max_token_num],
        (row.is_cuttable[:start] + other.is_cuttable[other_start:])[:max_token_num],
    )


# -- both ------------------------------------------------------------------------------------


def _add_columns(
    batch: dict[str, torch.Tensor], samples: Sequence[Sample], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Adds log-probabilities under the reference where every sample brings them."""
    if all(name in sample for sample in samples for name in names):
        values = [float(sample[name]) for sample in samples for name in names]
        batch["loss_reference"] = torch.tensor(values)
    return batch
