"""Prompts with sampled answers as micro-batches of an optimizer step, or as a checkpoint has them.

Shapes: A answers of a micro-batch, B rows, T tokens. An answer is a row, or rows are packed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stageline.data.batches.collate_part import CollatePart, EncodedSample, as_collate_part
from stageline.data.batches.prompts import answered, prompt_of
from stageline.data.batches.step_maker import PackedStepMaker, StepMaker
from stageline.inference.decoding.answer_groups import SampledAnswer
from stageline.modules.policy_loss import (
    ADVANTAGES,
    IS_COUNTED,
    IS_LEARNT,
    OLD,
    PLACES,
    SAMPLED,
)
from stageline.pipeline.runner import MicroBatch
from stageline.seeds import host_state_kept


class _Rows(list):
    """Rows for a `StepMaker`, which draw nothing."""

    is_fixed = True


@dataclass
class AnswerRow:
    """An answer as a row of a step.

    Attributes:
        row: of the dataset.
        encoded: the prompt with the answer's tokens.
        replaced: the last label, where the row cannot hold its token: (place, token id).
        old: log-probabilities of its tokens by a training pass of the weights that drew it, where
            these may be older than the ones that it trains.
    """

    row: int | None
    encoded: EncodedSample
    answer: SampledAnswer
    num_prompt: int
    replaced: tuple[int, int] | None = None
    old: list[float] | None = field(default=None, init=False)
    advantage: float = field(default=0.0, init=False)
    is_learnt: bool = field(default=True, init=False)
    is_counted: bool = field(default=True, init=False)

    @classmethod
    def of(
        cls,
        row: int | None,
        prompt: EncodedSample,
        answer: SampledAnswer,
        *,
        image_ids: frozenset[int],
    ) -> "AnswerRow":
        """The row of an answer.

        A token that stands for an image ends it: it is learnt like any other, but training would
        look for the image that belongs to it, and for its place in what comes behind.
        """
        ids, replaced = list(answer.token_ids), None
        num_prompt = len(prompt_of(prompt))
        first = next((place for place, one in enumerate(ids) if one in image_ids), None)
        if first is not None:
            replaced = (num_prompt + first, ids[first])
            ids = [*ids[:first], next(iter(prompt.whole[0].input_ids[-1:]))]
        return cls(row, answered(prompt, ids), answer, num_prompt, replaced)

    def predicted(self, start: int) -> slice:
        """Where the answer's tokens are predicted: one before their own places.

        Args:
            start: place of the prompt's first token in its row.
        """
        return slice(start + self.num_prompt - 1, start + len(self.encoded.rows[0]) - 1)

    def saved(self) -> dict[str, Any]:
        """As a checkpoint has it, in JSON: numbers of one kind are one text, exact to the bit."""
        answer = self.answer
        return {
            "tokens": " ".join(map(str, answer.token_ids)),
            "log_probs": " ".join(map(repr, answer.log_probs)),
            "old": " ".join(map(repr, self.old or ())),
            "text": answer.text,
            "is_cut": answer.is_cut,
        }


def read_answer(saved: Mapping[str, Any]) -> tuple[SampledAnswer, list[float]]:
    """What `AnswerRow.saved` gave: the answer, and its old log-probabilities."""
    ids, log_probs = (saved[name].split() for name in ("tokens", "log_probs"))
    answer = SampledAnswer(
        list(map(int, ids)), list(map(float, log_probs)), saved["text"], saved["is_cut"]
    )
    return answer, list(map(float, saved["old"].split()))


def answer_batches(
    made: Sequence[AnswerRow],
    step: int,
    *,
    collate: Callable[..., MicroBatch],
    packing: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[MicroBatch]:
    """Micro-batches of answers, those of near-equal length together, without what rewards decide.

    Args:
        collate: makes a micro-batch of encoded samples, on this rank.
        packing: what a `PackedStepMaker` takes besides; None: an answer is a row.
        options: of a `StepMaker`.
    """
    part = as_collate_part(collate)
    part = CollatePart(part.collate, encode=lambda images, sample: sample, pack=part.pack)
    rows = _Rows((None, one.encoded) for one in made)
    kind = StepMaker if packing is None else PackedStepMaker
    maker = kind(rows, collate=part, **options, **(packing or {}))
    with host_state_kept():
        batches = maker.make(step, [list(range(len(made)))])
    return [with_sampled(batch, rows_in(batch, made)) for batch in batches]


def rows_in(batch: MicroBatch, made: Sequence[AnswerRow]) -> list[AnswerRow]:
    """The answers of a micro-batch that has just been collated, in their order."""
    return [made[number] for number in batch[_numbers(batch)].tolist()]


def _numbers(batch: MicroBatch) -> str:
    return "loss_rows" if "loss_rows" in batch else "loss_packed_rows"


def with_sampled(batch: MicroBatch, answers: Sequence[AnswerRow]) -> MicroBatch:
    """A micro-batch with what is known of its answers before they are judged."""
    labels_BT = batch["labels"].clone()
    sampled_BT, places_BT = torch.zeros(labels_BT.shape), torch.full_like(labels_BT, -1)
    for number, (one, (row, start)) in enumerate(zip(answers, _begins(batch), strict=True)):
        places_BT[row, start : start + len(one.encoded.rows[0])] = number
        if one.replaced is not None:
            labels_BT[row, start + one.replaced[0]] = one.replaced[1]
        tokens = one.predicted(start)
        count = tokens.stop - tokens.start
        sampled_BT[row, tokens] = torch.tensor(one.answer.log_probs[:count])
    found = {**batch, "labels": labels_BT, SAMPLED: sampled_BT}
    return {**found, PLACES: places_BT} if "sample_ids" in batch else found


def with_rewards(
    batch: MicroBatch, answers: Sequence[AnswerRow], *, has_old: bool = False
) -> MicroBatch:
    """A micro-batch with all that its loss needs of each answer.

    Args:
        has_old: answers bring log-probabilities of the weights that drew them.
    """
    columns = {
        _numbers(batch): torch.tensor(
            [-1 if one.row is None else one.row for one in answers], dtype=torch.long
        ),
        ADVANTAGES: torch.tensor([one.advantage for one in answers]),
        IS_LEARNT: torch.tensor([one.is_learnt for one in answers], dtype=torch.bool),
        IS_COUNTED: torch.tensor([one.is_counted for one in answers], dtype=torch.bool),
    }
    if has_old:
        columns[OLD] = torch.zeros(batch["labels"].shape)
        for one, (row, start) in zip(answers, _begins(batch), strict=True):
            columns[OLD][row, one.predicted(start)] = torch.tensor(one.old)
    return {**batch, **columns}


def note_old(batch: MicroBatch, answers: Sequence[AnswerRow], log_probs_BT: torch.Tensor) -> None:
    """Gives answers their log-probabilities, of a pass over the micro-batch that they are in."""
    for one, (row, start) in zip(answers, _begins(batch), strict=True):
        one.old = log_probs_BT[row, one.predicted(start)].tolist()


def _begins(batch: MicroBatch) -> Iterator[tuple[int, int]]:
    """(row, first token) of each answer with its prompt."""
    if "sample_ids" not in batch:
        yield from ((row, 0) for row in range(len(batch["labels"])))
        return
    for row, samples_T in enumerate(batch["sample_ids"]):
        for number in range(int(samples_T.max()) + 1):
            yield row, int((samples_T == number).nonzero()[0])
