"""Makes one micro-batch of preferences; the bodies of the `dpo`, `rm` and `kto` collate parts.

A sample of `dpo` and `rm` becomes two rows next to each other, [c0, r0, c1, r1, ...]: the prompt
with the chosen and with the rejected answer, so that a pair is in one micro-batch. A sample of
`kto` is one desirable or undesirable answer; next to the rows are others, the same prompts with
answers of other rows, which show how far the model is from the reference. Shapes: B rows, T
tokens, P pairs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Subset

from stageline.data.batches.batch import Images, MicroBatch, Sample, sample_name
from stageline.data.batches.collate import (
    TEXTS,
    Item,
    collate_encoded,
    encode_for_training,
    encode_sft,
)
from stageline.data.batches.collate_part import EncodedSample, all_encoded
from stageline.data.rows.conversations import state_of
from stageline.data.text.encode import Encoded
from stageline.data.text.limit import Overlong, limit_length
from stageline.errors import DataError

ANSWERS = ("chosen", "rejected")
OTHER = "other_row"  # field with (images, sample) of another row, whose answer is borrowed
KL_PREFIX = "loss_kl_"
PAIR_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
ANSWER_COLUMN = "ref_logps"


def both_answers(sample: Sample) -> list[Sample]:
    """Return the question with the chosen answer, and with the rejected one.

    `chosen` and `rejected` are lists of messages that continue `messages`; text stands for one
    message of the assistant or, in a row without messages, for the field `answer`.
    """
    rest = {key: value for key, value in sample.items() if key not in ANSWERS}
    messages, made = sample.get("messages"), []
    if not isinstance(messages, list | None):
        raise bad_row(sample, "messages", messages, "a list of messages, the prompt")
    for name in ANSWERS:
        answer = sample.get(name)
        told = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        if not isinstance(told, list) or not any(map(is_answer, told)):
            raise bad_row(sample, name, answer, "text, or a list of messages with an assistant's")
        if messages is not None:
            made.append({**rest, "messages": [*map(unlearnt, messages), *told]})
        elif len(told) == 1 and isinstance(told[0].get("content"), str):
            made.append({**rest, "answer": told[0]["content"]})
        else:
            raise bad_row(sample, name, answer, "text, or one assistant message")
    return made


def is_answer(message: Any) -> bool:
    """Tell whether a message is the assistant's."""
    return isinstance(message, dict) and message.get("role") == "assistant"


def unlearnt(message: Any) -> Any:
    """Return the message, the assistant's out of the loss."""
    return {**message, "weight": 0} if is_answer(message) else message


def bad_row(sample: Sample, name: str, value: Any, wanted: str) -> DataError:
    """Return the error for a field that is missing or of another kind."""
    return DataError(
        f"{sample_name(sample)}: {name!r} {state_of(value)}. Write {wanted}, or use a `collate_fn` "
        "that fits the row (dpo, rm: messages or question, chosen, rejected; kto: messages or "
        "question and answer, label)."
    )


def encode_pair(
    images: Images,
    sample: Sample,
    *,
    pad_token_id: int,
    max_token_num: int,
    stage: int,
    overlong: Overlong = "error",
    **texts: Any,
) -> EncodedSample:
    """Encode the chosen and the rejected row of a sample, of at most `max_token_num` tokens.

    The same tokens of the prompt are cut from both, or both are dropped.
    """
    texts = {name: texts[name] for name in TEXTS}
    pair = [encode_for_training(images, one, **texts) for one in both_answers(sample)]
    longest = max(map(len, pair))
    if longest <= max_token_num:
        return EncodedSample(images, sample, pair, longest, pair)
    limited = list(pair)
    # the longer one first: if it is refused, the numbers are those of the limit
    for index in sorted((0, 1), key=lambda index: -len(pair[index])):
        row = pair[index]
        start = row.is_target.index(True)  # from there on the answers differ, and nothing may go
        is_cuttable = [may_go and place < start for place, may_go in enumerate(row.is_cuttable)]
        limited[index] = limit_length(
            Encoded(row.input_ids, row.is_target, is_cuttable, row.is_marked),
            max_token_num=len(row) - (longest - max_token_num),
            overlong=overlong,
            name=sample_name(sample),
            pad_token_id=pad_token_id,
            warn=stage == 0,
        )
    return EncodedSample(images, sample, limited, max(map(len, limited)), pair)


def collate_pairs(samples: Sequence[Item], **common: Any) -> MicroBatch:
    """Make one micro-batch of pairs as `collate_sft` does; adds `loss_pairs`, `loss_is_chosen` [B].

    Rows that have their log-probabilities under the reference model, as trl writes them, give
    `loss_reference` [B].
    """
    pairs = all_encoded(samples, encode_pair, **common)
    batch = collate_encoded(pairs, **common)
    numbers = torch.arange(2 * len(pairs))
    batch["loss_pairs"] = numbers // 2
    batch["loss_is_chosen"] = numbers % 2 == 0
    return _add_columns(batch, [sample for _, sample in samples], PAIR_COLUMNS)


class WithOthers(Subset):
    """A dataset whose samples bring the row before them, the first one the last row.

    So each prompt has an answer of another row, always the same one, however rows fall into steps,
    micro-batches and replicas. One row only is a DataError.
    """

    def __init__(self, dataset: Any) -> None:
        if len(dataset) < 2:
            raise DataError(
                f"the dataset has {len(dataset)} row, and KTO needs the answers of other rows. "
                "Give more rows, or use `loss_fn.use_kl` false."
            )
        super().__init__(dataset, range(len(dataset)))

    def __getitem__(self, row: int) -> tuple[Images, Sample]:
        images, sample = self.dataset[row]
        return images, {**sample, OTHER: self.dataset[(row - 1) % len(self)]}

    def __getitems__(self, rows: list[int]) -> list[tuple[Images, Sample]]:  # torch requires it
        return [self[row] for row in rows]


def encode_answer(images: Images, sample: Sample, **common: Any) -> EncodedSample:
    """Encode one answer; `common` as of `encode_sft`.

    With a sample that brings another row (`WithOthers`), `others` has its prompt with that row's
    answer, cut at the end where it is too long.
    """
    encoded = encode_sft(images, sample, encode=_encode_last, **common)
    if OTHER not in sample:
        return encoded
    row = encoded.rows[0]
    if not any(row.is_target):  # dropped
        return replace(encoded, others=[row])
    other = _encode_last(*sample[OTHER], **{name: common[name] for name in TEXTS})
    start, other_start = row.is_target.index(True), other.is_target.index(True)
    most = common["max_token_num"]
    names = ("input_ids", "is_target", "is_cuttable")
    borrowed = (getattr(row, n)[:start] + getattr(other, n)[other_start:] for n in names)
    return replace(encoded, others=[Encoded(*(values[:most] for values in borrowed))])


def _encode_last(images: Images, sample: Sample, **texts: Any) -> Encoded:
    """Encode a sample at any length; the last of several answers is in the loss."""
    if not isinstance(sample.get("label"), bool):
        raise bad_row(sample, "label", sample.get("label"), "true (wanted) or false")
    messages = sample.get("messages")
    if isinstance(messages, list) and messages:
        last = max((i for i, message in enumerate(messages) if is_answer(message)), default=0)
        sample = {**sample, "messages": [*map(unlearnt, messages[:last]), *messages[last:]]}
    return encode_for_training(images, sample, **texts)


def collate_answers(samples: Sequence[Item], **common: Any) -> MicroBatch:
    """Make one micro-batch as `collate_sft` does, with `loss_is_wanted` [B] bool.

    Samples with another row (`WithOthers`) give `loss_kl_input_ids` and the other tensors of a
    micro-batch for the same prompts with the other rows' answers; pixels are not repeated.
    """
    encoded = all_encoded(samples, encode_answer, **common)
    batch = collate_encoded(encoded, **common)
    if all(one.others for one in encoded):
        mixed = [replace(one, rows=one.others) for one in encoded]
        others = collate_encoded(mixed, **{**common, "stage": max(1, common["stage"])})
        batch.update({KL_PREFIX + name: value for name, value in others.items()})
    batch["loss_is_wanted"] = torch.tensor([sample["label"] for _, sample in samples])
    return _add_columns(batch, [sample for _, sample in samples], (ANSWER_COLUMN,))


def _add_columns(batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> MicroBatch:
    """Add log-probabilities under the reference where every sample brings them."""
    if all(name in sample for sample in samples for name in names):
        values = [float(sample[name]) for sample in samples for name in names]
        batch["loss_reference"] = torch.tensor(values)
    return batch


def encode_scored_pair(
    images: Images, sample: Sample, *, pad_token_id: int, **common: Any
) -> EncodedSample:
    """Encode both rows; only the last token of each has a label: there its reward is read.

    Rows end before trailing padding tokens (where EOS is the padding token): there transformers'
    classifiers read, and what comes behind a token does not change it. Where one of the two was
    dropped, none has a label.
    """
    pair = [
        encode_sft(images, one, pad_token_id=pad_token_id, **common) for one in both_answers(sample)
    ]
    rows = [row for one in pair for row in one.rows]
    is_dropped = not all(any(row.is_target) for row in rows)
    for index, row in enumerate(rows):
        length = len(row)
        while not is_dropped and length and row.input_ids[length - 1] == pad_token_id:
            length -= 1
        if length < 2 and not is_dropped:
            raise DataError(
                f"{sample_name(sample)}: a row of {length} tokens is left of question and answer, "
                "and a reward is read at the last of two or more. Correct the row."
            )
        kept = row.keep(list(range(length)))
        rows[index] = replace(kept, is_target=[False] * (length - 1) + [not is_dropped])
    whole = [row for one in pair for row in one.whole]
    return EncodedSample(images, sample, rows, max(map(len, rows)), whole)


def collate_rewards(samples: Sequence[Item], **common: Any) -> MicroBatch:
    """Make one micro-batch of two rows a sample, and `loss_margins` [P] of the pairs."""
    batch = collate_encoded(all_encoded(samples, encode_scored_pair, **common), **common)
    margins = []
    for _, sample in samples:
        margin = sample.get("margin") or 0.0
        if not isinstance(margin, int | float):
            raise DataError(
                f"{sample_name(sample)}: `margin` is {margin!r:.100}. Give the number by which the "
                "chosen answer's reward should be greater, or leave it out."
            )
        margins.append(float(margin))
    batch["loss_margins"] = torch.tensor(margins)
    return batch
