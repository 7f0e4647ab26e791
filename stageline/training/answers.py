"""Answers of the stages that train: how they are drawn, and what waits for their rewards.

Every rank of a pipeline calls the same methods; the first one draws.

Shapes: P prompts of this replica, G answers of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from stageline import progress
from stageline.data.batches.collate_part import EncodedSample
from stageline.data.batches.prompts import decoder_inputs
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
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.answer_rows import AnswerRow
from stageline.training.loss_part import Output, logits_of
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
        """What a training pass of the last stage gave, which may be hidden states."""
        last = self.models[-1]
        chunk, logits = getattr(last, "logits_chunk", 0), logits_of(output)
        return ChunkedLogits(logits, whole=last.whole, chunk=chunk) if chunk else logits

    def shared(self, value: Any, *, stage: int = 0) -> Any:
        """What the rank of a stage has, on all of the pipeline."""
        told, source = [value], self.route[stage]
        if self.wire is not None:
            is_waiting = self.runner.pp_rank != source
            with progress.doing("what another rank knows of answers", is_waiting=is_waiting):
                dist.broadcast_object_list(told, group=self.wire.group, group_src=source)
        return told[0]


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
