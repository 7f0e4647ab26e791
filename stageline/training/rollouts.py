"""Answers of the stages that train, rewarded, as the micro-batches of optimizer steps (GRPO).

Before a step the stages answer the prompts of the batch, rewards judge on the host of the first
rank, and prompts with answers become the rows of an ordinary step. Answers follow from seeds and
weights, so a checkpoint stores only those that were drawn ahead, by weights that are gone later.

Every rank of a pipeline calls the same methods. Shapes: P prompts of this replica, G answers of
each, R rewards; B rows of a micro-batch, T tokens.
"""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stageline import progress
from stageline.contracts import ROW_LENGTHS, SHARED
from stageline.data.batches import step_maker
from stageline.data.batches.collate_part import CollatePart, EncodedSample, as_collate_part
from stageline.data.batches.prompts import answered, decoder_inputs, prompt_of
from stageline.data.images.images import ImageExpander
from stageline.data.text.processor import get_tokenizer
from stageline.distributed.ranks import Ranks
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
from stageline.modules import policy_loss
from stageline.modules.chunked_loss import ChunkedLogits
from stageline.modules.lora import adapters_off
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.seeds import derive_seed, host_state_kept
from stageline.training.evaluation import EvalResult
from stageline.training.loss_part import Output, logits_of
from stageline.training.reference import FrozenCopy, Mode, StartStage, choose_mode, holds_last_stage
from stageline.training.replicas import Replicas
from stageline.training.rewards import (
    Advantage,
    Judging,
    Rewards,
    advantages,
    deviations,
    has_spread,
    weighted,
)
from stageline.training.step import StepProgress, StepResult
from stageline.training.turns import Episodes

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
        self.runner, self.wire, self.positions = runner, wire, positions
        self.processor, self.pad_token_id = processor, pad_token_id
        expander = ImageExpander.of(processor)
        # training would look for the picture of such a token
        self.image_ids = frozenset() if expander is None else expander.own_ids()
        self.models = list(runner.local)
        for model in self.models:
            if not model.can_decode:
                raise UserError(
                    f"stage {model.stage} keeps no keys and values (can_decode is False), so it "
                    "cannot answer. Use `train_model` causal_lm or vision_language."
                )
        make = functools.partial(StageDecoder, device=runner.device, trains_on=True)
        self.decoders = {model.stage: make(model) for model in self.models}
        ranks = {s: rank for rank in range(schedule.num_ranks) for s in schedule.stages_of(rank)}
        self.route = [ranks[stage] for stage in range(schedule.num_stages)]
        self.is_first = self.route[0] == runner.pp_rank
        chain: Chain = LocalChain([decoder for _, decoder in sorted(self.decoders.items())])
        if wire is not None and self.is_first:
            chain = RankChain(self.decoders, wire, num_stages=schedule.num_stages, route=self.route)
        self.groups = AnswerGroups(
            chain,
            tokenizer=get_tokenizer(processor),
            stop_ids=tuple(stop_ids),
            device=runner.device,
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
        on_lot: OnLot | None = None,
    ) -> list[list[SampledAnswer]]:
        """Return the answers, of which `on_lot` gets each lot at once; on the first rank only."""
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
                check_room(
                    inputs["input_ids"].shape[1],
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
            waits = self.runner.pp_rank != source
            with progress.doing("what another rank knows of answers", is_waiting=waits):
                dist.broadcast_object_list(told, group=self.wire.group, group_src=source)
        return told[0]


@dataclass(frozen=True)
class Completions:
    """The likeliest answers of the stages to held-out rows, scored; every rank calls it.

    Attributes:
        prompts: of the rows, the same on all ranks.
        score: (predictions, samples) -> figures, and a score for each; the main rank calls it.
        lot_size: prompts that are answered together.
        on_samples: gets (step, records) on the main rank.
    """

    answers: StageAnswers
    prompts: Sequence[EncodedSample]
    score: Callable[
        [list[dict[str, Any]], list[dict[str, Any]]], tuple[dict[str, float], list[float]]
    ]
    replicas: Replicas
    max_new_tokens: int
    lot_size: int
    on_samples: Callable[[int, list[dict[str, Any]]], None] | None

    def __call__(self, step: int) -> tuple[dict[str, float], list[str]]:
        """Return the figures of the score, and the answers."""
        self.replicas.put_together()
        mine = self.prompts[self.replicas.rank :: self.replicas.size]
        sampling = Sampling(max_new_tokens=self.max_new_tokens, temperature=0.0)
        found = self.answers(mine, [(0,)] * len(mine), sampling, lot_size=self.lot_size)
        told = self.replicas.gather(self.answers.shared([one.text for [one] in found]))
        places = (divmod(row, self.replicas.size) for row in range(len(self.prompts)))
        texts = [told[replica][place] for place, replica in places]
        samples = [one.sample for one in self.prompts]
        tokenizer = get_tokenizer(self.answers.processor)
        predictions = [
            {
                "id": str(one.sample["id"]),
                "prediction": text,
                "prompt": tokenizer.decode(prompt_of(one).input_ids, skip_special_tokens=True),
            }
            for one, text in zip(self.prompts, texts, strict=True)
        ]
        scored = Ranks.of(None).on_first(lambda: self.score(predictions, samples))
        assert scored is not None
        figures, scores = scored
        if self.on_samples is not None:
            records = [
                {
                    "step": step,
                    "row": row,
                    "id": one["id"],
                    "prompt": one["prompt"],
                    "answers": [{"text": one["prediction"], "score": score}],
                }
                for row, (one, score) in enumerate(zip(predictions, scores, strict=True))
            ]
            self.on_samples(step, records)
        return figures, texts


class _Rows(list):
    """Rows for a `StepMaker`, which draw nothing."""

    is_fixed = True


def batches_of(
    answers: StageAnswers,
    items: Sequence[tuple[int | None, EncodedSample]],
    step: int,
    *,
    options: "RolloutOptions",
    collate: Callable[..., MicroBatch],
    replicas: Replicas,
    is_sorted: bool,
) -> list[MicroBatch]:
    """Return the micro-batches of encoded samples, `loss_rows` counting them from 0."""
    part = as_collate_part(collate)
    part = CollatePart(part.collate, encode=lambda images, sample: sample, pack=part.pack)
    facts = getattr(answers.models[0], "host_facts", None)  # a custom stage may have none
    given: dict[str, Any] = {"is_sorted": is_sorted, "facts": facts}
    kind: type[step_maker.StepMaker | step_maker.PackedStepMaker] = step_maker.StepMaker
    if options.row_capacity is not None:
        kind = step_maker.PackedStepMaker
        given["capacity"] = options.row_capacity
        given["legal_counts"] = answers.runner.schedule.legal_micro_batches
        given["agree"] = lambda step, count: max(replicas.gather(count))
    with host_state_kept():
        maker = kind(_Rows(items), collate=part, micro_batch_size=options.micro_batch_size, **given)
        return maker.make(step, [list(range(len(items)))])


@dataclass
class AnswerRow:
    """An answer as a row of a step.

    Attributes:
        replaced: the last label, where the row cannot hold its token: (place, token id).
        old: log-probabilities of its tokens by a training pass of the weights that drew it.
    """

    row: int | None  # its number in the dataset
    encoded: EncodedSample  # the prompt with the answer's tokens
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
        image_ids: frozenset[int],
    ) -> "AnswerRow":
        """Return the row of an answer; a token that stands for an image ends it.

        Training would look for the image. The token is in the loss like any other.
        """
        ids, replaced = list(answer.token_ids), None
        num_prompt = len(prompt_of(prompt))
        first = next((place for place, one in enumerate(ids) if one in image_ids), None)
        if first is not None:
            replaced = (num_prompt + first, ids[first])
            ids = [*ids[:first], next(iter(prompt.whole[0].input_ids[-1:]))]
        is_own = answer.is_own and answer.is_own[: len(ids)]
        return cls(row, answered(prompt, ids, is_own), answer, num_prompt, replaced)

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


def numbers_of(batch: MicroBatch) -> str:
    """Return the name of what counts the samples of a micro-batch."""
    return "loss_rows" if "loss_rows" in batch else "loss_packed_rows"


def placed(batch: MicroBatch, made: Sequence[AnswerRow]) -> list[tuple[AnswerRow, int, int]]:
    """Return (answer, row, first token) of each answer in a micro-batch as it was collated."""
    answers = [made[number] for number in batch[numbers_of(batch)].tolist()]
    if "sample_ids" not in batch:
        return [(one, row, 0) for row, one in enumerate(answers)]
    places = [
        (row, int((samples_T == number).nonzero()[0]))
        for row, samples_T in enumerate(batch["sample_ids"])
        for number in range(int(samples_T.max()) + 1)
    ]
    return [(one, *place) for one, place in zip(answers, places, strict=True)]


@dataclass
class Drawn:
    """The answers to the prompts of a step; the same on all ranks of a pipeline.

    Attributes:
        rows, made: P prompts; rows of the step, the G of a prompt side by side.
    """

    rows: Sequence[PromptRow]
    made: list[AnswerRow]
    batches: list[MicroBatch]  # micro-batches of these rows, before rewards
    judging: Judging | None  # their rewards, on the first rank
    staleness: int  # optimizer steps from the weights that drew them to those that they train


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options of drawing and using answers, named as those that set them (docs/options.md).

    Attributes:
        row_capacity: tokens of a row that holds several answers; None: it holds one.
    """

    seed: int
    group_size: int = 8
    inner_steps: int = 1
    advantage: Advantage = "group"
    sampling_temperature: float = 1.0
    max_completion_length: int = 512
    stop_strings: Sequence[str] | None = None
    kl_beta: float = 0.0
    reference: Mode = "auto"
    mask_truncated_completions: bool = False
    drop_equal_groups: bool = False
    prompts_together: int = 8
    ahead: int = 0
    micro_batch_size: int = 1
    is_sorted: bool = True
    row_capacity: int | None = None
    keep_samples: int = 1

    def sampling(self, temperature: float = 0.0) -> Sampling:
        length, stop = self.max_completion_length, tuple(self.stop_strings or ())
        return Sampling(max_new_tokens=length, temperature=temperature, stop=stop)


@dataclass(eq=False)
class Rollouts:
    """The micro-batches of each optimizer step: `for micro_batches in rollouts`.

    Args:
        prompts: gives the prompts of each step: lists of `PromptRow`.
        collate: makes a micro-batch of encoded samples, on this rank.
        start_step, end_step: optimizer steps done, and after which no answers are wanted.
        saved: facts of the checkpoint that the run continues.
        start_stage: builds a stage of the start model again; needed after `start_step`.
        episodes: draws answers of several turns; None: an answer is one completion.
        on_samples: gets the answers of a step on the main rank: (step, records).

    Attributes:
        figures: of the answers of the last step; the same on all ranks.
        seconds, busy_seconds: of the last step, by what they went to, and before its passes began.
        is_last: new answers are drawn after the running step.

    Raises:
        UserError: adapters off were asked for, and would not be the start model.
    """

    answers: StageAnswers
    rewards: Rewards
    options: RolloutOptions
    _: KW_ONLY
    prompts: Any
    collate: Callable[..., MicroBatch]
    replicas: Replicas
    start_step: int
    end_step: int
    saved: Mapping[str, Any]
    start_stage: StartStage
    on_samples: Callable[[int, list[dict[str, Any]]], None] | None
    episodes: Episodes | None

    def __post_init__(self) -> None:
        options, self.runner = self.options, self.answers.runner
        self._saved = self.saved.get("answers") if options.ahead else None
        self._ahead: Drawn | None = None
        self._frozen: FrozenCopy | None = None
        self.figures, self.seconds = dict[str, float](), dict[str, float]()
        self.busy_seconds, self.is_last = 0.0, True
        self._tokenizer = get_tokenizer(self.answers.processor)
        self.start_mode: Mode | None = None
        self.start_reason = ""
        if options.kl_beta:
            self.start_mode, self.start_reason = choose_mode(
                options.reference,
                self.runner,
                has_columns=False,
                begun_as=self.saved.get("reference"),
                otherwise="frozen_copy",
            )

    def __len__(self) -> int:
        """Return the optimizer steps of an epoch."""
        return len(self.prompts) * self.options.inner_steps

    def state_after(self, step: int) -> Any:
        """Return where prompts are drawn from after that many optimizer steps."""
        return self.prompts.state_after(step // self.options.inner_steps)

    def answers_ahead(self) -> list[dict[str, Any]] | None:
        """Return the answers of all replicas that await training; every rank calls this."""
        if self._ahead is None:
            return None
        told = self.replicas.gather([one.saved() for one in self._ahead.made])
        return [one for own in told for one in own]

    def told(self, result: StepResult) -> StepResult:
        """Return a step's result with the figures of its answers."""
        wait = max(0.0, result.data_wait - self.busy_seconds)
        all_seconds = self.replicas.gather(self.seconds)
        slowest = {f"{n}_seconds": max(one[n] for one in all_seconds) for n in self.seconds}
        return replace(result, answers={**self.figures, **slowest}, data_wait=wait)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        options, step, prompts = self.options, self.start_step, iter(self.prompts)
        if self.start_mode == "frozen_copy":  # before anything is trained
            self.replicas.put_together()
            start_stage = self.start_stage if self.start_step > 0 else None
            self._frozen = FrozenCopy(self.runner, start_stage=start_stage)
        began = time.perf_counter()
        self.seconds = {}
        while True:
            self.replicas.put_together()  # they answer for different times
            drawn = self._ahead or self._drawn(next(prompts), step)
            self._ahead = None
            for inner in range(options.inner_steps):
                self.is_last = inner == options.inner_steps - 1
                if options.ahead and self.is_last and step + 1 < self.end_step:
                    if inner > 0:
                        self.replicas.put_together()  # the step before has sharded them again
                    self._ahead = self._drawn(next(prompts), step + 1, staleness=1)
                if inner == 0:  # behind the draw, so that rewards have had that long
                    batches = self._make(drawn, step)
                self.busy_seconds = time.perf_counter() - began
                yield batches
                began = time.perf_counter()
                self.seconds = dict.fromkeys(self.seconds, 0.0)
                step += 1

    def _drawn(self, rows: Sequence[PromptRow], step: int, *, staleness: int = 0) -> Drawn:
        """Draw the answers of a step, or read those of the checkpoint; rewards begin."""
        options, prompts = self.options, [prompt for *_, prompt in rows]
        size, lot_size = options.group_size, options.prompts_together
        count = len(rows) * size  # answers of this replica
        saved, self._saved = self._saved or (), None
        if is_saved := len(saved) == count * self.replicas.size:
            own = list(map(read_answer, saved[self.replicas.rank * count :][:count]))
            answers = [[one for one, _ in own[p : p + size]] for p in range(0, count, size)]
            judging, judge = self._begin_to_judge(prompts)
            for first in range(0, len(answers), lot_size):  # the lots that they were drawn in
                judge(first, answers[first : first + lot_size])
            if judging is not None:
                judging.end()
        else:
            number = step // options.inner_steps
            seeds = [
                tuple(derive_seed(options.seed, "answer", number, place, g) for g in range(size))
                for _, place, _ in rows
            ]
            sampling = options.sampling(options.sampling_temperature)
            answers, judging = self._answers_to(prompts, seeds, sampling, lot_size)
        made = [
            AnswerRow.of(row, prompt, answer, self.answers.image_ids)
            for (row, _, prompt), group in zip(rows, answers, strict=True)
            for answer in group
        ]
        batches = self._batches(made, step)
        if is_saved:
            for one, (_, old) in zip(made, own, strict=True):
                one.old = old
        elif options.ahead:
            # log-probabilities by a training pass of the weights that drew them, on all ranks
            for batch, log_probs_BT in zip(batches, self._log_probs(batches, "old") or ()):
                log_probs_BT = log_probs_BT.cpu()
                for one, row, start in placed(batch, made):
                    one.old = log_probs_BT[row, one.predicted(start)].tolist()
            olds = self.answers.shared([one.old for one in made], stage=-1)
            for one, old in zip(made, olds, strict=True):
                one.old = old
        return Drawn(rows, made, batches, judging, staleness=1 if is_saved else staleness)

    def _answers_to(
        self,
        prompts: Sequence[EncodedSample],
        seeds: Sequence[tuple[int, ...]],
        sampling: Sampling,
        lot_size: int,
    ) -> tuple[list[list[SampledAnswer]], Judging | None]:
        """Draw answers, on all ranks of the pipeline; the first one judges meanwhile."""
        began = time.perf_counter()
        judging, judge = self._begin_to_judge(prompts)
        if self.episodes is not None:
            found = self.episodes(prompts, seeds, sampling, lot_size=lot_size)
            judge(0, found)
        else:
            found = self.answers(prompts, seeds, sampling, lot_size=lot_size, on_lot=judge)
        if judging is not None:
            judging.end()
        answers, seconds = self.answers.shared((found, time.perf_counter() - began))
        self._spent("decode", seconds)
        return answers, judging

    def _begin_to_judge(self, prompts: Sequence[EncodedSample]) -> tuple[Judging | None, OnLot]:
        """Return the rewards at work, and what is called with each lot of answers."""
        judging = self.rewards.begin() if self.answers.is_first else None

        def judge(first: int, lot: Sequence[Sequence[SampledAnswer]]) -> None:
            asked, said, samples = [], [], []
            for prompt, group in zip(prompts[first : first + len(lot)], lot, strict=True):
                asked += [self._text(prompt)] * len(group)
                said += [answer.text for answer in group]
                for answer in group:
                    facts: dict[str, Any] = {
                        "num_tokens": answer.num_tokens,
                        "is_cut": answer.is_cut,
                    }
                    if self.episodes is not None:
                        facts |= {"environment_reward": answer.reward, "turns": answer.turns}
                    samples.append({**prompt.sample, **facts, "images": prompt.images})
            if judging is not None:
                judging.add(asked, said, samples)

        return judging, judge

    def _judged(self, judging: Judging | None, num_prompts: int) -> tuple[torch.Tensor, int]:
        """Return rewards [R, P, G], NaN where there is none, and late parts; on all ranks."""
        told = None
        if judging is not None:
            found = judging.result().view(len(self.rewards.parts), num_prompts, -1)
            told = found, judging.num_late, judging.seconds, judging.seconds_waited
        rewards_RPG, num_late, seconds, waited = self.answers.shared(told)
        self._spent("reward", seconds)
        self._spent("reward_wait", waited)
        return rewards_RPG, num_late

    def _spent(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _make(self, drawn: Drawn, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step."""
        options, count = self.options, len(drawn.rows)
        rewards_RPG, num_late = self._judged(drawn.judging, count)
        all_RPG = torch.cat(self.replicas.gather(rewards_RPG), dim=1)
        total_PG = weighted(all_RPG, self.rewards.weights)
        mine = slice(self.replicas.rank * count, (self.replicas.rank + 1) * count)
        advantages_PG = advantages(total_PG, options.advantage)[mine]
        self.figures = self._figures(drawn, num_late, all_RPG, total_PG)
        has_spread_P = has_spread(total_PG)[mine].repeat_interleave(options.group_size)
        worth = zip(advantages_PG.flatten().tolist(), has_spread_P.tolist(), strict=True)
        for one, (advantage, is_spread) in zip(drawn.made, worth, strict=True):
            one.advantage = advantage
            one.is_counted = is_spread or not options.drop_equal_groups
            is_masked = options.mask_truncated_completions and one.answer.is_cut
            one.is_learnt = one.is_counted and not is_masked
        self._tell(step, drawn, rewards_RPG, total_PG[mine])
        return self._with_log_probs([self._with_rewards(b, drawn.made) for b in drawn.batches])

    def _with_rewards(self, batch: MicroBatch, made: Sequence[AnswerRow]) -> MicroBatch:
        """Return a micro-batch with all that the loss needs of each answer."""
        answers = placed(batch, made)
        rows = [-1 if one.row is None else one.row for one, *_ in answers]
        columns = {
            numbers_of(batch): torch.tensor(rows, dtype=torch.long),
            policy_loss.ADVANTAGES: torch.tensor([one.advantage for one, *_ in answers]),
            policy_loss.IS_LEARNT: torch.tensor([one.is_learnt for one, *_ in answers]).bool(),
            policy_loss.IS_COUNTED: torch.tensor([one.is_counted for one, *_ in answers]).bool(),
        }
        if self.options.ahead:
            columns[policy_loss.OLD] = torch.zeros(batch["labels"].shape)
            for one, row, start in answers:
                columns[policy_loss.OLD][row, one.predicted(start)] = torch.tensor(one.old)
        return {**batch, **columns}

    def _text(self, prompt: EncodedSample) -> str:
        return self._tokenizer.decode(prompt_of(prompt).input_ids, skip_special_tokens=True)

    def _figures(
        self, drawn: Drawn, num_late: int, all_RPG: torch.Tensor, total_PG: torch.Tensor
    ) -> dict[str, float]:
        """Return the figures of the answers of all replicas."""
        lengths = [one.answer.num_tokens for one in drawn.made]
        num_cut = sum(one.answer.is_cut for one in drawn.made)
        told = self.replicas.gather((lengths, num_cut, num_late))
        lengths = [length for own, *_ in told for length in own]
        figures = {
            "reward": total_PG.nanmean().item(),
            "reward_std": deviations(total_PG.reshape(1, -1)).item(),
            "equal_groups": 1 - has_spread(total_PG).double().mean().item(),
            "answer_tokens": sum(lengths) / len(lengths),
            "cut_answers": sum(cut for _, cut, *_ in told) / len(lengths),
            "shortest_answer": float(min(lengths)),
            "longest_answer": float(max(lengths)),
        }
        for one, values_PG in zip(self.rewards.parts, all_RPG, strict=True):
            figures[f"reward_{one.key}"] = values_PG.nanmean().item()
            figures[f"reward_{one.key}_std"] = deviations(values_PG.reshape(1, -1)).item()
        figures["late_rewards"] = float(sum(late for *_, late in told))
        if self.options.ahead:
            figures["staleness"] = float(drawn.staleness)
        return figures

    def _tell(
        self, step: int, drawn: Drawn, rewards_RPG: torch.Tensor, total_PG: torch.Tensor
    ) -> None:
        """Hand the answers of all replicas to `on_samples`."""
        every = self.options.keep_samples
        if not self.answers.is_first or not every or step % every:
            return
        keys = [one.key for one in self.rewards.parts]
        rewards = zip(total_PG.flatten().tolist(), rewards_RPG.flatten(1).T.tolist(), strict=True)
        answers = [
            {
                "text": one.answer.text,
                "reward": _plain(total),
                "advantage": one.advantage,
                "rewards": dict(zip(keys, map(_plain, parts), strict=True)),
                "num_tokens": one.answer.num_tokens,
                "is_cut": one.answer.is_cut,
                **({"turns": one.answer.turns} if self.episodes is not None else {}),
            }
            for one, (total, parts) in zip(drawn.made, rewards, strict=True)
        ]
        size = self.options.group_size
        records = [
            {
                "step": step + 1,
                "row": row,
                "id": prompt.sample.get("id"),
                "prompt": self._text(prompt),
                "answers": answers[p * size : (p + 1) * size],
            }
            for p, (row, _, prompt) in enumerate(drawn.rows)
        ]
        gathered = self.replicas.gather(records)
        if self.on_samples is not None:
            self.on_samples(step + 1, [record for own in gathered for record in own])

    def _batches(self, made: Sequence[AnswerRow], step: int) -> list[MicroBatch]:
        """Return micro-batches of answers, without what rewards decide."""
        order = self._by_prompt(made)
        batches = batches_of(
            self.answers,
            [(None, made[number].encoded) for number in order or range(len(made))],
            step,
            options=self.options,
            collate=self.collate,
            replicas=self.replicas,
            is_sorted=self.options.is_sorted and not order,
        )
        for batch in batches:
            if order:
                batch["loss_rows"] = torch.tensor(order)[batch["loss_rows"]]
            if order and ROW_LENGTHS in batch:
                batch[SHARED] = torch.arange(made[int(batch["loss_rows"][0])].num_prompt - 1)
            labels_BT = batch["labels"] = batch["labels"].clone()
            sampled_BT, places_BT = torch.zeros(labels_BT.shape), torch.full_like(labels_BT, -1)
            for number, (one, row, start) in enumerate(placed(batch, made)):
                places_BT[row, start : start + len(one.encoded.rows[0])] = number
                if one.replaced is not None:
                    labels_BT[row, start + one.replaced[0]] = one.replaced[1]
                tokens = one.predicted(start)
                count = tokens.stop - tokens.start
                sampled_BT[row, tokens] = torch.tensor(one.answer.log_probs[:count])
            batch[policy_loss.SAMPLED] = sampled_BT
            if "sample_ids" in batch:
                batch[policy_loss.PLACES] = places_BT
        return batches

    def _by_prompt(self, made: Sequence[AnswerRow]) -> list[int]:
        """Return the rows by prompt, where to read those once is less than rows of equal length."""
        options, lengths = self.options, [len(one.encoded.rows[0]) for one in made]
        size, is_plain = options.micro_batch_size, options.row_capacity is None
        reads_once = is_plain and all(getattr(one, "reads_once", 0) for one in self.answers.models)
        if options.group_size % size or not reads_once:
            return []
        order = sorted(range(len(made)), key=lambda n: (n // options.group_size, lengths[n]))
        parts = [order[first : first + size] for first in range(0, len(order), size)]
        once, each = (
            sum(step_maker.padded_cost([lengths[n] for n in part]) for part in some)
            for some in (parts, step_maker.group_by_length(lengths, len(parts)))
        )
        once -= sum((size - 1) * (made[part[0]].num_prompt - 1) for part in parts)
        return order if once < each else []

    def _with_log_probs(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Add log-probabilities before the first of several steps, and of the start model."""
        found = {}
        if self.options.inner_steps > 1 and not self.options.ahead:
            found[policy_loss.OLD] = self._log_probs(batches, "old")
        if self.options.kl_beta:
            frozen = self._frozen
            with adapters_off(self.runner.local) if frozen is None else frozen.in_place():
                found[policy_loss.START] = self._log_probs(batches, "start")
        for name, values in found.items():
            if values is not None:
                pairs = zip(batches, values, strict=True)
                batches = [{**batch, name: one} for batch, one in pairs]
        return batches

    def _log_probs(self, batches: list[MicroBatch], name: str) -> list[torch.Tensor] | None:
        """Return those of each micro-batch [B, T]; None where the last stage is not."""
        began, temperature = time.perf_counter(), self.options.sampling_temperature
        found: list[torch.Tensor] = []

        def take(output: Output, batch: MicroBatch) -> None:
            logits = self.answers.logits_of(output)
            found.append(policy_loss.token_log_probs(logits, batch, temperature=temperature))

        told = StepProgress(device=self.runner.device, forward="log-probabilities")
        self.runner.evaluate(batches, on_output=take, recorder=told)
        self._spent(name, time.perf_counter() - began)
        return found if holds_last_stage(self.runner) else None

    def judge(self, prompts: Any) -> EvalResult:
        """Return the rewards of the likeliest answers to held-out prompts."""
        lot_size = self.options.prompts_together * self.options.group_size
        sums, num_tokens, greedy = list[torch.Tensor](), 0, self.options.sampling()
        self.replicas.put_together()
        for rows in prompts:
            encoded = [one for row, _, one in rows if row is not None]
            if not encoded:
                continue
            answers, judging = self._answers_to(encoded, [(0,)] * len(encoded), greedy, lot_size)
            sums.append(self._judged(judging, len(encoded))[0][:, :, 0])
            num_tokens += sum(one.num_tokens for group in answers for one in group)
        own = torch.cat(sums, dim=1) if sums else torch.empty(len(self.rewards.parts), 0)
        told = self.replicas.gather((own, num_tokens))
        all_RN = torch.cat([values.double() for values, _ in told], dim=1)
        total_N = weighted(all_RN[:, None], self.rewards.weights)[0]
        figures = {"reward": total_N.nanmean().item()}
        for one, values_N in zip(self.rewards.parts, all_RN, strict=True):
            figures[f"reward_{one.key}"] = values_N.nanmean().item()
        return EvalResult(None, None, sum(count for _, count in told), figures=figures)


def _plain(value: float) -> float | None:
    """Return NaN, of an answer that no reward judged, as JSON's null."""
    return value if value == value else None


class SampleFile:
    """Answers with their rewards in `samples.jsonl` of the run folder, a line a prompt.

    Args:
        start_step: steps done; lines of later steps, from an earlier start, are removed.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self.path, kept = folder / "samples.jsonl", []
        if self.path.exists():
            for line in self.path.read_bytes().splitlines(keepends=True) if start_step else ():
                with contextlib.suppress(ValueError):  # cut off by a crash
                    if json.loads(line)["step"] <= start_step:
                        kept.append(line)
            draft = self.path.with_name("samples.jsonl.tmp")
            draft.write_bytes(b"".join(kept))
            os.replace(draft, self.path)

    def __call__(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the answers of a step."""
        # half of a surrogate pair, which a row may have, is written as JSON escapes it
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in records)
