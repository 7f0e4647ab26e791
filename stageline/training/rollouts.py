"""Answers of the very stages that train, rewarded, as the micro-batches of optimizer steps.

There is no second copy of the weights: before a step the stages answer the prompts of the batch
(`answering`), rewards judge on the host of the first rank, and prompts with answers become the rows
of an ordinary step. What belongs to a step follows from seeds, so that nothing of it is saved.

Every rank of a pipeline calls the same methods. Shapes: P prompts of this replica, G answers of
each, R rewards; B rows of a micro-batch, T tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from stageline import chaos, progress
from stageline.data.batches.batch import sample_name
from stageline.data.batches.collate_part import EncodedSample
from stageline.data.batches.prompts import decoder_inputs, prompt_of
from stageline.data.images.images import ImageExpander
from stageline.data.text.processor import get_tokenizer
from stageline.errors import UserError
from stageline.inference.decoding.answer_groups import (
    AnswerGroups,
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
from stageline.modules.lora import adapters_off
from stageline.modules.policy_loss import OLD, START, token_log_probs
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.seeds import derive_seed
from stageline.training.answer_rows import AnswerRow, answer_batches
from stageline.training.evaluation import EvalResult
from stageline.training.loss_part import Output, logits_of
from stageline.training.reference import choose_mode, holds_last_stage
from stageline.training.replicas import Replicas
from stageline.training.rewards import (
    Advantage,
    Rewards,
    advantages,
    deviations,
    has_spread,
    weighted,
)
from stageline.training.samples import thumbnail
from stageline.training.step import StepProgress, StepResult

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
    ) -> list[list[SampledAnswer]]:
        """The answers, on the first rank; nothing on the others."""
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
            found = self.groups.draw(asked, sampling, lot_size=lot_size)
            self.groups.close()
            return found

    def logits_of(self, output: Output) -> torch.Tensor | ChunkedLogits:
        """What a training pass of the last stage gave, which may be hidden states."""
        last = self.models[-1]
        chunk, logits = getattr(last, "logits_chunk", 0), logits_of(output)
        return ChunkedLogits(logits, whole=last.whole, chunk=chunk) if chunk else logits

    def shared(self, value: Any) -> Any:
        """What the first rank has, on all of the pipeline."""
        told = [value]
        if self.wire is not None:
            with progress.doing("answers of the first rank", is_waiting=not self.is_first):
                dist.broadcast_object_list(told, group=self.wire.group, group_src=self.route[0])
        return told[0]


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How answers are drawn, and what becomes of them.

    Attributes:
        inner_steps: optimizer steps on the same answers.
        masks_cut: answers without an end are not learnt.
        drops_equal: groups of one reward do not count.
        prompts_together: prompts whose answers are drawn together.
        row_capacity: tokens of a row that holds several answers; None: it holds one.
        keep_samples: steps between two whose answers are told; 0: those of none are.
    """

    seed: int
    group_size: int = 8
    inner_steps: int = 1
    advantage: Advantage = "group"
    temperature: float = 1.0
    max_completion_length: int = 512
    stop: tuple[str, ...] = ()
    kl_beta: float = 0.0
    masks_cut: bool = False
    drops_equal: bool = False
    prompts_together: int = 8
    micro_batch_size: int = 1
    is_sorted: bool = True
    row_capacity: int | None = None
    keep_samples: int = 1

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_new_tokens=self.max_completion_length, temperature=self.temperature, stop=self.stop
        )


@dataclass
class _Judged:
    """Answers of a step with what they are worth; the same on all ranks of a pipeline.

    Attributes:
        answers: P lists of G.
        rewards_RPG: of each reward; NaN where it has nothing to say.
        seconds: of decoding and of judging, on the first rank.
    """

    answers: list[list[SampledAnswer]]
    rewards_RPG: torch.Tensor
    num_late: int
    seconds: tuple[float, float]


class Rollouts:
    """Gives the micro-batches of each optimizer step: `for micro_batches in rollouts`.

    Args:
        prompts: gives the prompts of each step: lists of `PromptRow`.
        collate: makes a micro-batch of encoded samples, on this rank.
        facts: what the stages want to be told of each micro-batch.
        start_step: optimizer steps done.
        on_samples: told, on the main rank, the answers of a step: (step, records).

    Attributes:
        figures: of the last step, for the log; the same on all ranks.
        busy_seconds: that the last step took before its passes began.
        is_last: new answers are drawn behind the step that runs.

    Raises:
        UserError: there is no model to take the divergence from.
    """

    def __init__(
        self,
        answers: StageAnswers,
        rewards: Rewards,
        options: RolloutOptions,
        *,
        prompts: Any,
        collate: Callable[..., MicroBatch],
        replicas: Replicas,
        facts: Callable[[MicroBatch], MicroBatch] | None,
        start_step: int = 0,
        on_samples: Callable[[int, list[dict[str, Any]]], None] | None = None,
    ) -> None:
        self.answers, self.rewards, self.options = answers, rewards, options
        self.runner = answers.runner
        self.prompts, self.collate, self.facts = prompts, collate, facts
        self.replicas, self.start_step, self.on_samples = replicas, start_step, on_samples
        self.figures: dict[str, float] = {}
        self.busy_seconds = 0.0
        self.is_last = True
        self._tokenizer = get_tokenizer(answers.processor)
        expander = ImageExpander.of(answers.processor)
        self._image_ids = frozenset() if expander is None else expander.own_ids()
        if options.kl_beta:
            _check_start(self.runner, is_resumed=start_step > 0)

    def __len__(self) -> int:
        """Optimizer steps of an epoch."""
        return len(self.prompts) * self.options.inner_steps

    def state_after(self, step: int) -> Any:
        """Where prompts are drawn from after so many optimizer steps."""
        return self.prompts.state_after(step // self.options.inner_steps)

    def when_between(self, stop_requested: Callable[[], bool]) -> Callable[[], bool]:
        """Asked where new answers are drawn alone: those of a step half done are not saved."""
        return lambda: self.is_last and stop_requested()

    def told(self, result: StepResult) -> StepResult:
        """What a step did, with what was told of its answers, for which nobody waited."""
        wait = max(0.0, result.data_wait - self.busy_seconds)
        return replace(result, answers=dict(self.figures), data_wait=wait)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        step = self.start_step
        for rows in self.prompts:
            began = time.perf_counter()
            batches = self._make(rows, step)
            for inner in range(self.options.inner_steps):
                self.busy_seconds = time.perf_counter() - began
                self.is_last = inner == self.options.inner_steps - 1
                yield batches
                began = time.perf_counter()
                # they belong to the first step on these answers
                self.figures = {n: 0.0 if "seconds" in n else v for n, v in self.figures.items()}
                step += 1

    def _make(self, rows: Sequence[PromptRow], step: int) -> list[MicroBatch]:
        """The micro-batches of a step."""
        options = self.options
        self.replicas.put_together()  # they answer for different times
        number = step // options.inner_steps
        seeds = [
            tuple(
                derive_seed(options.seed, "answer", number, place, one)
                for one in range(options.group_size)
            )
            for _, place, _ in rows
        ]
        encoded = [one for *_, one in rows]
        judged = self._judged(encoded, seeds, options.sampling, options.prompts_together)
        all_RPG = torch.cat(self.replicas.gather(judged.rewards_RPG), dim=1)
        total_PG = weighted(all_RPG, self.rewards.weights)
        mine = slice(self.replicas.rank * len(rows), (self.replicas.rank + 1) * len(rows))
        advantages_PG = advantages(total_PG, options.advantage)[mine]
        self.figures = self._figures(judged, all_RPG, total_PG)
        self._tell(step, rows, judged, total_PG[mine], advantages_PG)
        batches = self._batches(rows, judged, advantages_PG, has_spread(total_PG)[mine], step)
        return self._with_log_probs(batches)

    def _judged(
        self,
        prompts: Sequence[EncodedSample],
        seeds: Sequence[tuple[int, ...]],
        sampling: Sampling,
        lot_size: int,
    ) -> _Judged:
        """Draws answers and judges them; on all ranks of the pipeline."""
        began = time.perf_counter()
        answers = self.answers(prompts, seeds, sampling, lot_size=lot_size)
        drawn = time.perf_counter()
        judged: _Judged | None = None
        if self.answers.is_first:
            before = self.rewards.num_late
            rewards = self._rewards(prompts, answers)
            times = drawn - began, time.perf_counter() - drawn
            judged = _Judged(answers, rewards, self.rewards.num_late - before, times)
        return self.answers.shared(judged)

    def _rewards(
        self, prompts: Sequence[EncodedSample], answers: Sequence[Sequence[SampledAnswer]]
    ) -> torch.Tensor:
        texts = [self._text(prompt) for prompt in prompts]
        asked, said, samples = [], [], []
        for text, prompt, group in zip(texts, prompts, answers, strict=True):
            for answer in group:
                facts = {"num_tokens": len(answer.token_ids), "is_cut": answer.is_cut}
                asked.append(text)
                said.append(answer.text)
                samples.append({**prompt.sample, **facts, "images": prompt.images})
        found = self.rewards(asked, said, samples)
        return found.view(len(self.rewards.parts), len(prompts), -1)

    def _text(self, prompt: EncodedSample) -> str:
        return self._tokenizer.decode(prompt_of(prompt).input_ids, skip_special_tokens=True)

    def _figures(
        self, judged: _Judged, all_RPG: torch.Tensor, total_PG: torch.Tensor
    ) -> dict[str, float]:
        """What the log tells of the answers of all replicas."""
        lengths = [len(one.token_ids) for group in judged.answers for one in group]
        num_cut = sum(one.is_cut for group in judged.answers for one in group)
        told = self.replicas.gather((lengths, num_cut, judged.num_late, judged.seconds))
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
        figures["late_rewards"] = float(sum(late for _, _, late, _ in told))
        for name, times in zip(("decode", "reward"), zip(*(t[-1] for t in told)), strict=True):
            figures[f"{name}_seconds"] = max(times)
        return figures

    def _tell(
        self,
        step: int,
        rows: Sequence[PromptRow],
        judged: _Judged,
        total_PG: torch.Tensor,
        advantages_PG: torch.Tensor,
    ) -> None:
        """Hands the answers of all replicas to who writes them down."""
        every = self.options.keep_samples
        if not self.answers.is_first or not every or step % every:
            return
        keys = [one.key for one in self.rewards.parts]
        records = []
        for p, (row, _, prompt) in enumerate(rows):
            answers = []
            for g, answer in enumerate(judged.answers[p]):
                parts = zip(keys, judged.rewards_RPG[:, p, g].tolist(), strict=True)
                answers.append(
                    {
                        "text": answer.text,
                        "reward": _plain(total_PG[p, g].item()),
                        "advantage": advantages_PG[p, g].item(),
                        "rewards": {key: _plain(value) for key, value in parts},
                        "num_tokens": len(answer.token_ids),
                        "is_cut": answer.is_cut,
                    }
                )
            known = {"row": row, "id": prompt.sample.get("id"), "prompt": self._text(prompt)}
            pictures = [
                thumbnail(one, name=sample_name(prompt.sample)) for one in prompt.images or ()
            ]
            records.append({"step": step + 1, **known, "images": pictures, "answers": answers})
        gathered = self.replicas.gather(records)
        if self.on_samples is not None:
            self.on_samples(step + 1, [record for own in gathered for record in own])

    def _batches(
        self,
        rows: Sequence[PromptRow],
        judged: _Judged,
        advantages_PG: torch.Tensor,
        has_spread_P: torch.Tensor,
        step: int,
    ) -> list[MicroBatch]:
        """Prompts with answers as micro-batches, rows of near-equal length together."""
        options = self.options
        made = [
            AnswerRow.of(row, prompt, answer, advantage, image_ids=self._image_ids)
            for (row, _, prompt), group, own in zip(
                rows, judged.answers, advantages_PG.tolist(), strict=True
            )
            for answer, advantage in zip(group, own, strict=True)
        ]
        counted = has_spread_P.repeat_interleave(options.group_size).tolist()
        for one, is_spread in zip(made, counted, strict=True):
            one.is_counted = is_spread or not options.drops_equal
            one.is_learnt = one.is_counted and not (options.masks_cut and one.answer.is_cut)
        packing = None
        if options.row_capacity is not None:
            packing = {
                "capacity": options.row_capacity,
                "legal_counts": self.runner.schedule.legal_micro_batches,
                "agree": lambda step, count: max(self.replicas.gather(count)),
            }
        return answer_batches(
            made,
            step,
            collate=self.collate,
            packing=packing,
            micro_batch_size=options.micro_batch_size,
            is_sorted=options.is_sorted,
            facts=self.facts,
        )

    def _with_log_probs(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Adds log-probabilities before the first of several steps, and of the start model."""
        if self.options.inner_steps > 1:
            batches = self._added(batches, OLD)
        if self.options.kl_beta:
            with adapters_off(self.runner.local):
                batches = self._added(batches, START)
        return batches

    def _added(self, batches: list[MicroBatch], name: str) -> list[MicroBatch]:
        began = time.perf_counter()
        found: list[torch.Tensor] = []

        def take(output: Output, batch: MicroBatch) -> None:
            logits = self.answers.logits_of(output)
            found.append(token_log_probs(logits, batch, temperature=self.options.temperature))

        told = StepProgress(device=self.runner.device, forward="log-probabilities")
        self.runner.evaluate(batches, on_output=take, recorder=told)
        self.figures[f"{name.removeprefix('loss_')}_seconds"] = time.perf_counter() - began
        if not holds_last_stage(self.runner):
            return batches
        pairs = zip(batches, found, strict=True)
        return [{**batch, name: log_probs} for batch, log_probs in pairs]

    def judge(self, prompts: Any) -> EvalResult:
        """Rewards of held-out prompts, whose likeliest answers are taken."""
        sampling = Sampling(
            max_new_tokens=self.options.max_completion_length, stop=self.options.stop
        )
        lot_size = self.options.prompts_together * self.options.group_size
        sums: list[torch.Tensor] = []
        num_tokens = 0
        self.replicas.put_together()
        for rows in prompts:
            encoded = [one for row, _, one in rows if row is not None]
            if not encoded:
                continue
            judged = self._judged(encoded, [(0,)] * len(encoded), sampling, lot_size)
            sums.append(judged.rewards_RPG[:, :, 0])
            num_tokens += sum(len(one.token_ids) for group in judged.answers for one in group)
        own = torch.cat(sums, dim=1) if sums else torch.empty(len(self.rewards.parts), 0)
        told = self.replicas.gather((own, num_tokens))
        all_RN = torch.cat([values.double() for values, _ in told], dim=1)
        total_N = weighted(all_RN[:, None], self.rewards.weights)[0]
        figures = {"reward": total_N.nanmean().item()}
        for one, values_N in zip(self.rewards.parts, all_RN, strict=True):
            figures[f"reward_{one.key}"] = values_N.nanmean().item()
        return EvalResult(
            loss=None,
            token_accuracy=None,
            num_targets=sum(count for _, count in told),
            figures=figures,
        )


def _plain(value: float) -> float | None:
    """As JSON can say it: an answer that no reward judged has none."""
    return value if value == value else None


def _check_start(runner: PipelineRunner, *, is_resumed: bool) -> None:
    mode, why = choose_mode("auto", runner, has_columns=False, is_resumed=is_resumed)
    if mode != "adapters_off":
        raise UserError(
            f"`kl_beta` came, and {why}, so the model without adapters is not the one that "
            "training began with. LoRA that starts at zero, and nothing else, was expected to be "
            "trained, because the divergence from that model is taken and no second copy is kept: "
            "add `llm_lora_num` 1 and freeze the rest (`frozen_lm_head` ...), or leave `kl_beta` "
            "out (0, as trl has it)."
        )
