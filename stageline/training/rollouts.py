"""Answers of the stages that train, rewarded, as the micro-batches of optimizer steps (GRPO).

Before a step the stages answer the prompts of the batch, rewards judge on the host of the first
rank, and prompts with answers become the rows of an ordinary step. Answers follow from seeds and
weights, so a checkpoint stores only those that were drawn ahead, by weights that are gone later.

Every rank of a pipeline calls the same methods. Shapes: P prompts of this replica, G answers of
each, R rewards; B rows of a micro-batch, T tokens.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stageline.data.batches.collate_part import EncodedSample
from stageline.data.batches.prompts import prompt_of
from stageline.data.images.images import ImageExpander
from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.answer_groups import OnLot, SampledAnswer
from stageline.inference.decoding.request import Sampling
from stageline.modules.lora import adapters_off
from stageline.modules.policy_loss import OLD, START, token_log_probs
from stageline.pipeline.runner import MicroBatch
from stageline.seeds import derive_seed
from stageline.training.answers import (
    AnswerRow,
    Drawn,
    PromptRow,
    StageAnswers,
    answer_batches,
    note_old,
    read_answer,
    rows_in,
    with_rewards,
)
from stageline.training.evaluation import EvalResult
from stageline.training.loss_part import Output
from stageline.training.reference import (
    FrozenCopy,
    Mode,
    StartStage,
    choose_mode,
    holds_last_stage,
)
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


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options of drawing and using answers, named as on the command line.

    Attributes:
        inner_steps: optimizer steps on the same answers.
        reference: source of the reference model: auto, adapters_off or frozen_copy.
        mask_truncated_completions: answers without an end are not in the loss.
        drop_equal_groups: groups of one reward do not count.
        prompts_together: prompts whose answers are drawn together.
        ahead: 1: answers are drawn before the last step on those before, by its weights.
        row_capacity: tokens of a row that holds several answers; None: it holds one.
        keep_samples: steps between two whose answers are saved; 0 = off.
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
        stop = tuple(self.stop_strings or ())
        return Sampling(
            max_new_tokens=self.max_completion_length, temperature=temperature, stop=stop
        )


class Rollouts:
    """The micro-batches of each optimizer step: `for micro_batches in rollouts`.

    Args:
        prompts: gives the prompts of each step: lists of `PromptRow`.
        collate: makes a micro-batch of encoded samples, on this rank.
        facts: what the stages need of each micro-batch on the host.
        start_step: optimizer steps done.
        end_step: optimizer steps after which no answers are wanted.
        saved: facts of the checkpoint that the run continues.
        start_stage: builds a stage of the start model again; needed after `start_step`.
        on_samples: gets the answers of a step on the main rank: (step, records).

    Attributes:
        figures: of the answers of the last step; the same on all ranks.
        seconds: of the last step, by what they went to.
        busy_seconds: of the last step before its passes began.
        is_last: new answers are drawn after the running step.

    Raises:
        UserError: adapters off were asked for, and would not be the start model.
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
        end_step: int,
        saved: Mapping[str, Any],
        start_stage: StartStage | None = None,
        on_samples: Callable[[int, list[dict[str, Any]]], None] | None = None,
    ) -> None:
        self.answers, self.rewards, self.options = answers, rewards, options
        self.runner = answers.runner
        self.prompts, self.collate, self.facts = prompts, collate, facts
        self.replicas, self.on_samples = replicas, on_samples
        self.start_step, self.end_step, self._start_stage = start_step, end_step, start_stage
        self._saved = saved.get("answers") if options.ahead else None
        self._ahead: Drawn | None = None
        self._frozen: FrozenCopy | None = None
        self.figures: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.busy_seconds = 0.0
        self.is_last = True
        self._tokenizer = get_tokenizer(answers.processor)
        expander = ImageExpander.of(answers.processor)
        self._image_ids = frozenset() if expander is None else expander.own_ids()
        self.start_mode: Mode | None = None
        self.start_reason = ""
        if options.kl_beta:
            self.start_mode, self.start_reason = choose_mode(
                options.reference,
                self.runner,
                has_columns=False,
                begun_as=saved.get("reference"),
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
            start_stage = self._start_stage if self.start_step > 0 else None
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
        """Draw the answers of a step, or read those of the checkpoint; rewards begin.

        Args:
            staleness: optimizer steps until they are used.
        """
        options, prompts = self.options, [prompt for *_, prompt in rows]
        size, lot_size = options.group_size, options.prompts_together
        count = len(rows) * size  # answers of this replica
        saved, self._saved = self._saved or (), None
        if is_saved := len(saved) == count * self.replicas.size:
            own = list(map(read_answer, saved[self.replicas.rank * count :][:count]))
            answers = [[one for one, _ in own[p : p + size]] for p in range(0, count, size)]
            judging, judge = self._begin_to_judge(prompts)
            if judging is not None:  # in the lots that they were drawn in
                for first in range(0, len(answers), lot_size):
                    judge(first, answers[first : first + lot_size])
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
            AnswerRow.of(row, prompt, answer, image_ids=self._image_ids)
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
                note_old(batch, rows_in(batch, made), log_probs_BT.cpu())
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
                text = self._text(prompt)
                for answer in group:
                    facts = {"num_tokens": len(answer.token_ids), "is_cut": answer.is_cut}
                    asked.append(text)
                    said.append(answer.text)
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
        batches = [
            with_rewards(one, rows_in(one, drawn.made), has_old=bool(options.ahead))
            for one in drawn.batches
        ]
        return self._with_log_probs(batches)

    def _text(self, prompt: EncodedSample) -> str:
        return self._tokenizer.decode(prompt_of(prompt).input_ids, skip_special_tokens=True)

    def _figures(
        self, drawn: Drawn, num_late: int, all_RPG: torch.Tensor, total_PG: torch.Tensor
    ) -> dict[str, float]:
        """Return the figures of the answers of all replicas."""
        lengths = [len(one.answer.token_ids) for one in drawn.made]
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
                "num_tokens": len(one.answer.token_ids),
                "is_cut": one.answer.is_cut,
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
        """Return prompts with answers as micro-batches, rows of near-equal length together."""
        options, packing = self.options, None
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
        """Add log-probabilities before the first of several steps, and of the start model."""
        if self.options.inner_steps > 1 and not self.options.ahead:
            batches = _added(batches, OLD, self._log_probs(batches, "old"))
        if self.options.kl_beta:
            frozen = self._frozen
            with adapters_off(self.runner.local) if frozen is None else frozen.in_place():
                batches = _added(batches, START, self._log_probs(batches, "start"))
        return batches

    def _log_probs(self, batches: list[MicroBatch], name: str) -> list[torch.Tensor] | None:
        """Return those of each micro-batch [B, T]; None where the last stage is not."""
        began = time.perf_counter()
        temperature = self.options.sampling_temperature
        found: list[torch.Tensor] = []

        def take(output: Output, batch: MicroBatch) -> None:
            logits = self.answers.logits_of(output)
            found.append(token_log_probs(logits, batch, temperature=temperature))

        told = StepProgress(device=self.runner.device, forward="log-probabilities")
        self.runner.evaluate(batches, on_output=take, recorder=told)
        self._spent(name, time.perf_counter() - began)
        return found if holds_last_stage(self.runner) else None

    def judge(self, prompts: Any) -> EvalResult:
        """Return the rewards of the likeliest answers to held-out prompts."""
        sampling = self.options.sampling()
        lot_size = self.options.prompts_together * self.options.group_size
        sums: list[torch.Tensor] = []
        num_tokens = 0
        self.replicas.put_together()
        for rows in prompts:
            encoded = [one for row, _, one in rows if row is not None]
            if not encoded:
                continue
            answers, judging = self._answers_to(encoded, [(0,)] * len(encoded), sampling, lot_size)
            sums.append(self._judged(judging, len(encoded))[0][:, :, 0])
            num_tokens += sum(len(one.token_ids) for group in answers for one in group)
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
    """Return NaN, of an answer that no reward judged, as JSON's null."""
    return value if value == value else None


def _added(
    batches: list[MicroBatch], name: str, log_probs: list[torch.Tensor] | None
) -> list[MicroBatch]:
    if log_probs is None:
        return batches
    pairs = zip(batches, log_probs, strict=True)
    return [{**batch, name: values} for batch, values in pairs]


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
