"""Answers of the stages that train: how they are drawn, and what they are until they are learnt.

Every rank of a pipeline calls the same methods; the first one draws. Answers wait as rows of the
micro-batches of a step, or in a checkpoint.

Shapes: P prompts of this replica, G answers of each; B rows of a micro-batch, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from stageline import chaos, progress
from stageline.data.batches.collate_part import EncodedSample
from stageline.data.batches.prompts import answered, decoder_inputs, prompt_of
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
from stageline.modules.policy_loss import ADVANTAGES, IS_COUNTED, IS_LEARNT, OLD, SAMPLED
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.rewards import Judging

PromptRow = tuple[int | None, int, EncodedSample]  # row of the dataset, place in the step, prompt


class StageAnswers:
    """Has the stages of a pipeline answer prompts.

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
                    f"stage {model.stage} keeps no keys and values (can_decode is False). A model "
                    "that does was expected, because it answers before each step: train a model "
                    "that `train_model` causal_lm or vision_language serves."
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
        """The answers, on the first rank; nothing on the others.

        Args:
            on_lot: told, on the first rank, the answers of each lot as soon as it is whole.
        """
        with progress.doing("decoding"), answering(self.models):
            chaos.point("decoding")
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
                check_room(count, sampling.max_new_tokens, self.positions)
                asked.append(PromptToAnswer(inputs, own))
            found = self.groups.draw(asked, sampling, lot_size=lot_size, on_lot=on_lot)
            self.groups.close()
            return found

    def shared(self, value: Any, *, stage: int = 0) -> Any:
        """What the rank of a stage has, on all of the pipeline."""
        told, source = [value], self.route[stage]
        if self.wire is not None:
            is_waiting = self.runner.pp_rank != source
            with progress.doing("what another rank knows of answers", is_waiting=is_waiting):
                dist.broadcast_object_list(told, group=self.wire.group, group_src=source)
        return told[0]


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

    @property
    def places(self) -> slice:
        """Where the answer's tokens are predicted: one before their own places."""
        return slice(self.num_prompt - 1, len(self.encoded.rows[0]) - 1)

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


@dataclass
class Drawn:
    """The answers to the prompts of a step; the same on all ranks of a pipeline.

    Attributes:
        rows: P prompts.
        answers: P lists of G.
        judging: their rewards, on the first rank.
        staleness: optimizer steps from the weights that drew them to those that they train.
        made: rows of the step, the G of a prompt side by side.
        batches: of these rows, without what rewards decide.
    """

    rows: Sequence[PromptRow]
    answers: list[list[SampledAnswer]]
    judging: Judging | None
    staleness: int
    made: list[AnswerRow] = field(default_factory=list, init=False)
    batches: list[MicroBatch] = field(default_factory=list, init=False)


def rows_in(batch: MicroBatch, made: Sequence[AnswerRow]) -> list[AnswerRow]:
    """The rows of a micro-batch that has just been collated."""
    return [made[number] for number in batch["loss_rows"].tolist()]


def with_answers(batch: MicroBatch, rows: Sequence[AnswerRow]) -> MicroBatch:
    """A micro-batch with what is known of its answers before they are judged."""
    labels_BT = batch["labels"].clone()
    sampled_BT = torch.zeros(labels_BT.shape)
    for place, one in enumerate(rows):
        if one.replaced is not None:
            labels_BT[place, one.replaced[0]] = one.replaced[1]
        count = one.places.stop - one.places.start
        sampled_BT[place, one.places] = torch.tensor(one.answer.log_probs[:count])
    return {**batch, "labels": labels_BT, SAMPLED: sampled_BT}


def with_rewards(batch: MicroBatch, rows: Sequence[AnswerRow]) -> MicroBatch:
    """A micro-batch with all that its loss needs of each answer."""
    columns = {
        "loss_rows": torch.tensor([-1 if one.row is None else one.row for one in rows]),
        ADVANTAGES: torch.tensor([one.advantage for one in rows]),
        IS_LEARNT: torch.tensor([one.is_learnt for one in rows]),
        IS_COUNTED: torch.tensor([one.is_counted for one in rows]),
    }
    if rows[0].old is not None:
        columns[OLD] = torch.zeros(batch["labels"].shape)
        for place, one in enumerate(rows):
            columns[OLD][place, one.places] = torch.tensor(one.old)
    return {**batch, **columns}
