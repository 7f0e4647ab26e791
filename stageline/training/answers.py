"""Answers of the stages that train: how they are drawn, and the micro-batches made of them.

Shapes: P prompts of this replica, G answers of each; B rows of a micro-batch, T tokens. An answer
is a row, or rows are packed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from stageline import progress
from stageline.data.batches.collate_part import CollatePart, EncodedSample, as_collate_part
from stageline.data.batches.prompts import answered, decoder_inputs, prompt_of
from stageline.data.batches.step_maker import PackedStepMaker, StepMaker
from stageline.data.text.processor import get_tokenizer
from stageline.errors import UserError
from stageline.inference.decoding.answer_groups import (
    AnswerGroups,
    OnLot,
    PromptToAnswer,
    SampledAnswer,
    check_room,
)
from stageline.inference.decoding.chain import (
    Chain,
    LocalChain,
    RankChain,
    Wire,
    follow,
    max_in_flight,
)
from stageline.inference.decoding.request import Sampling
from stageline.inference.decoding.stage_decoder import StageDecoder, answering
from stageline.modules.chunked_loss import ChunkedLogits
from stageline.modules.policy_loss import (
    ADVANTAGES,
    IS_COUNTED,
    IS_LEARNT,
    OLD,
    PLACES,
    SAMPLED,
)
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.seeds import host_state_kept
from stageline.training.loss_part import Output, logits_of
from stageline.training.rewards import Judging

PromptRow = tuple[int | None, int, EncodedSample]  # row of the dataset, place in the step, prompt


class StageAnswers:
    """The stages of a pipeline as they answer prompts; all ranks call it, the first one draws.

    Args:
        wire: between the ranks of the pipeline; None: there is one.
        stop_ids: tokens that end an answer.
        positions: that the model has; None: not known.

    Raises:
        UserError: a stage cannot answer token by token.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        wire: Wire | None,
        *,
        processor: Any,
        pad_token_id: int,
        stop_ids: Sequence[int],
        positions: int | None = None,
    ) -> None:
        schedule = runner.schedule
        self.runner, self.wire = runner, wire
        self.processor, self.pad_token_id = processor, pad_token_id
        self.positions = positions
        self.models = list(runner.local)
        for model in self.models:
            if not model.can_decode:
                raise UserError(
                    f"stage {model.stage} keeps no keys and values (can_decode is False), so it "
                    "cannot answer. Use `train_model` causal_lm or vision_language."
                )
        device = runner.device
        self.decoders = {
            model.stage: StageDecoder(model, device=device, trains_on=True) for model in self.models
        }
        ranks = {s: rank for rank in range(schedule.num_ranks) for s in schedule.stages_of(rank)}
        self.route = [ranks[stage] for stage in range(schedule.num_stages)]
        self.is_first = self.route[0] == runner.pp_rank
        chain: Chain = LocalChain([self.decoders[stage] for stage in sorted(self.decoders)])
        if wire is not None and self.is_first:
            chain = RankChain(self.decoders, wire, num_stages=schedule.num_stages, route=self.route)
        self.groups = AnswerGroups(
            chain,
            tokenizer=get_tokenizer(processor),
            stop_ids=stop_ids,
            device=device,
            lots_at_once=schedule.num_ranks,
            most_on_way=max(1, max_in_flight(schedule.num_ranks) // len(self.models)),
        )

    def __call__(
        self,
        prompts: Sequence[EncodedSample],
        seeds: Sequence[tuple[int, ...]],
        sampling: Sampling,
        *,
        lot_size: int,
        on_lot: OnLot,
    ) -> list[list[SampledAnswer]]:
        """Return the answers on the first rank, nothing on the others.

        Args:
            on_lot: gets the answers of each lot on the first rank, as soon as it is complete.
        """
        with progress.doing("decoding"), answering(self.models):
            if not self.is_first:
                assert self.wire is not None
                num_stages = len(self.route)
                follow(self.decoders, self.wire, num_stages=num_stages, route=self.route)
                return []
            asked = []
            for prompt, own in zip(prompts, seeds, strict=True):
                inputs = decoder_inputs(
                    prompt, processor=self.processor, pad_token_id=self.pad_token_id
                )
                count = inputs["input_ids"].shape[1]
                check_room(
                    count,
                    sampling.max_new_tokens,
                    self.positions,
                    short_length=self.models[0].short_length,
                )
                asked.append(PromptToAnswer(inputs, own))
            found = self.groups.draw(asked, sampling, lot_size=lot_size, on_lot=on_lot)
            self.groups.close()
            return found

    def logits_of(self, output: Output) -> torch.Tensor | ChunkedLogits:
        """Return the output of a training pass of the last stage as logits."""
        last = self.models[-1]
        chunk, logits = getattr(last, "logits_chunk", 0), logits_of(output)
        return ChunkedLogits(logits, whole=last.whole, chunk=chunk) if chunk else logits

    def shared(self, value: Any, *, stage: int = 0) -> Any:
        """Return what the rank of a stage has, on all of the pipeline."""
        told, source = [value], self.route[stage]
        if self.wire is not None:
            is_waiting = self.runner.pp_rank != source
            with progress.doing("what another rank knows of answers", is_waiting=is_waiting):
                dist.broadcast_object_list(told, group=self.wire.group, group_src=source)
        return told[0]


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
        """Return the row of an answer.

        A token that stands for an image ends it: training would look for the image. It is in
        the loss like any other.
        """
        ids, replaced = list(answer.token_ids), None
        num_prompt = len(prompt_of(prompt))
        first = next((place for place, one in enumerate(ids) if one in image_ids), None)
        if first is not None:
            replaced = (num_prompt + first, ids[first])
            ids = [*ids[:first], next(iter(prompt.whole[0].input_ids[-1:]))]
        return cls(row, answered(prompt, ids), answer, num_prompt, replaced)

    def predicted(self, start: int) -> slice:
        """Return the places that predict the answer, of a prompt that begins at `start`."""
        return slice(start + self.num_prompt - 1, start + len(self.encoded.rows[0]) - 1)

    def saved(self) -> dict[str, Any]:
        """Return it as JSON: numbers of one kind are one text, exact to the bit."""
        answer = self.answer
        return {
            "tokens": " ".join(map(str, answer.token_ids)),
            "log_probs": " ".join(map(repr, answer.log_probs)),
            "old": " ".join(map(repr, self.old or ())),
            "text": answer.text,
            "is_cut": answer.is_cut,
        }


def read_answer(saved: Mapping[str, Any]) -> tuple[SampledAnswer, list[float]]:
    """Return the answer and old log-probabilities that `AnswerRow.saved` gave."""
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
    """Return micro-batches of answers of near-equal length, without what rewards decide.

    Args:
        collate: makes a micro-batch of encoded samples, on this rank.
        packing: more arguments of a `PackedStepMaker`; None: an answer is a row.
        options: of a `StepMaker`.
    """
    part = as_collate_part(collate)
    part = CollatePart(part.collate, encode=lambda images, sample: sample, pack=part.pack)
    rows = _Rows((None, one.encoded) for one in made)
    kind = StepMaker if packing is None else PackedStepMaker
    maker = kind(rows, collate=part, **options, **(packing or {}))
    with host_state_kept():
        batches = maker.make(step, [list(range(len(made)))])
    for batch in batches:
        labels_BT = batch["labels"] = batch["labels"].clone()
        sampled_BT, places_BT = torch.zeros(labels_BT.shape), torch.full_like(labels_BT, -1)
        answers = zip(rows_in(batch, made), _begins(batch), strict=True)
        for number, (one, (row, start)) in enumerate(answers):
            places_BT[row, start : start + len(one.encoded.rows[0])] = number
            if one.replaced is not None:
                labels_BT[row, start + one.replaced[0]] = one.replaced[1]
            tokens = one.predicted(start)
            count = tokens.stop - tokens.start
            sampled_BT[row, tokens] = torch.tensor(one.answer.log_probs[:count])
        batch[SAMPLED] = sampled_BT
        if "sample_ids" in batch:
            batch[PLACES] = places_BT
    return batches


def rows_in(batch: MicroBatch, made: Sequence[AnswerRow]) -> list[AnswerRow]:
    """Return the answers of a micro-batch that has just been collated, in their order."""
    return [made[number] for number in batch[_numbers(batch)].tolist()]


def _numbers(batch: MicroBatch) -> str:
    return "loss_rows" if "loss_rows" in batch else "loss_packed_rows"


def with_rewards(
    batch: MicroBatch, answers: Sequence[AnswerRow], *, has_old: bool = False
) -> MicroBatch:
    """Add all that the loss needs of each answer.

    Args:
        has_old: answers have log-probabilities of the weights that drew them.
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
    """Store the log-probabilities of a pass over a micro-batch with its answers."""
    for one, (row, start) in zip(answers, _begins(batch), strict=True):
        one.old = log_probs_BT[row, one.predicted(start)].tolist()


def _begins(batch: MicroBatch) -> Iterator[tuple[int, int]]:
    """Yield (row, first token) of each answer with its prompt."""
    if "sample_ids" not in batch:
        yield from ((row, 0) for row in range(len(batch["labels"])))
        return
    for row, samples_T in enumerate(batch["sample_ids"]):
        for number in range(int(samples_T.max()) + 1):
            yield row, int((samples_T == number).nonzero()[0])


@dataclass
class Drawn:
    """The answers to the prompts of a step; the same on all ranks of a pipeline.

    Attributes:
        rows: P prompts.
        made: rows of the step, the G of a prompt side by side.
        batches: of these rows, without what rewards decide.
        judging: their rewards, on the first rank.
        staleness: optimizer steps from the weights that drew them to those that they train.
    """

    rows: Sequence[PromptRow]
    made: list[AnswerRow]
    batches: list[MicroBatch]
    judging: Judging | None
    staleness: int
