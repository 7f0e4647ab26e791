"""Distill a teacher into the model that trains: the teacher's distributions, and own answers.

A teacher adds its next-token distributions to the micro-batches of a step, for a loss that compares
(`needs_teacher`); only the rank of the last stage has them. It is frozen stages of the pipeline, a
server, or a table. `OwnAnswers` replaces a share of the
rows' answers by completions of the stages (on-policy distillation, Agarwal et al. 2024).

Shapes: B rows, T tokens, N supervised tokens of a micro-batch, V vocabulary, K likeliest tokens.
"""

import json
import random
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any
from urllib.error import HTTPError

import torch
from safetensors import SafetensorError, safe_open

from stageline import progress
from stageline.data.batches.batch import MicroBatch
from stageline.data.batches.prompts import answered, prompt_of
from stageline.errors import UserError
from stageline.modules.losses import (
    IGNORE,
    TEACHER,
    TEACHER_IDS,
    TEACHER_PLACES,
    at_least_float32,
    next_labels,
)
from stageline.pipeline.runner import PipelineRunner
from stageline.seeds import derive_seed
from stageline.training.loss_part import Output, logits_of
from stageline.training.reference import holds_last_stage
from stageline.training.replicas import Replicas
from stageline.training.rollouts import RolloutOptions, StageAnswers, batches_of, numbers_of
from stageline.training.step import StepProgress

# logits [N, V], or log-probabilities [N, K] of the tokens with these ids [N, K]
Distributions = tuple[torch.Tensor, torch.Tensor | None]
# micro-batches -> the distributions of each, where the last stage is
TeacherSource = Callable[[Sequence[MicroBatch]], list[Distributions]]


class Teacher:
    """Prepares micro-batches for the loss; every rank of a pipeline calls it with the same ones."""

    def __init__(self, runner: PipelineRunner, source: TeacherSource) -> None:
        self.runner, self.source = runner, source

    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with what the teacher predicts at supervised places."""
        with progress.doing("teacher"):
            found = self.source(batches)
        if not holds_last_stage(self.runner):
            return list(batches)
        return [with_teacher(*pair) for pair in zip(batches, found, strict=True)]


def with_teacher(batch: MicroBatch, found: Distributions) -> MicroBatch:
    """Return a micro-batch with distributions of its N supervised tokens, in their order."""
    (values, ids), is_target_BT = found, next_labels(batch) != IGNORE
    places_BT = torch.full(is_target_BT.shape, -1)
    places_BT[is_target_BT] = torch.arange(len(values))
    added = {} if ids is None else {TEACHER_IDS: ids}
    return {**batch, TEACHER: values, TEACHER_PLACES: places_BT, **added}


class TeacherStages:
    """The distributions of frozen stages of another model, placed like those that train.

    Args:
        runner: of the teacher's stages.
        top_k: tokens to keep of each distribution; 0: all.
    """

    def __init__(self, runner: PipelineRunner, *, top_k: int = 0) -> None:
        self.runner, self.top_k = runner, top_k

    def __call__(self, batches: Sequence[MicroBatch]) -> list[Distributions]:
        found: list[Distributions] = []

        def take(output: Output, batch: MicroBatch) -> None:
            logits_BTV, is_target_BT = logits_of(output), next_labels(batch) != IGNORE
            places_N = is_target_BT.flatten().nonzero().flatten()
            logits_NV = logits_BTV.flatten(0, 1).index_select(0, places_N)
            if 0 < self.top_k < logits_NV.shape[-1]:
                top = at_least_float32(logits_NV).log_softmax(-1).topk(self.top_k, dim=-1)
                found.append((top.values, top.indices))
            else:
                found.append((logits_NV, None))

        told = StepProgress(device=self.runner.device, forward="teacher")
        self.runner.evaluate(batches, on_output=take, recorder=told)
        return found


def samples_of(batch: MicroBatch) -> Iterator[tuple[int, slice]]:
    """Yield (row, tokens) of each sample of a micro-batch, of several in a row too."""
    for row, mask_T in enumerate(batch["attention_mask"]):
        numbers_T = batch["sample_ids"][row] if "sample_ids" in batch else mask_T - 1
        for number in range(int(numbers_T.max()) + 1):
            places = (numbers_T == number).nonzero().flatten().tolist()
            yield row, slice(places[0], places[-1] + 1)


class TeacherServer:
    """The likeliest tokens that a server's model predicts: completions with `echo` and `logprobs`.

    Only the rank of the last stage asks, with token ids, many samples at a time.

    Args:
        url: address up to /v1.
        top_k: tokens of each distribution; the server limits it.
        seconds: timeout of a request.

    Raises:
        UserError: the server does not answer, or not with token ids.
    """

    def __init__(
        self, runner: PipelineRunner, url: str, *, top_k: int, model: str, seconds: float = 300.0
    ) -> None:
        self.runner, self.url, self.top_k = runner, url.rstrip("/") + "/completions", top_k
        self.model, self.seconds = model, seconds

    def __call__(self, batches: Sequence[MicroBatch]) -> list[Distributions]:
        if not holds_last_stage(self.runner):
            return []
        asked = [[batch["input_ids"][at].tolist() for at in samples_of(batch)] for batch in batches]
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(self._ask, [ids for rows in asked for ids in rows])
            return [self._of_batch(batch, answers) for batch in batches]

    def _of_batch(self, batch: MicroBatch, answers: Iterator[list[Any]]) -> Distributions:
        is_target_BT, found = next_labels(batch) != IGNORE, []
        for row, tokens in samples_of(batch):
            tops = next(answers)[1:]  # the distribution of a token is that at the place before it
            is_asked = is_target_BT[row, tokens].tolist()
            found += [top for top, is_one in zip(tops, is_asked, strict=False) if is_one]
        values = torch.tensor([[value for _, value in one] for one in found])
        ids = torch.tensor([[token for token, _ in one] for one in found], dtype=torch.long)
        return values.view(-1, self.top_k), ids.view(-1, self.top_k)

    def _ask(self, ids: list[int]) -> list[list[tuple[int, float]]]:
        """Return (token, log-probability) of the likeliest tokens at each place but the first."""
        body = {"model": self.model, "prompt": ids, "max_tokens": 0, "echo": True, "temperature": 0}
        body |= {"logprobs": self.top_k, "return_tokens_as_token_ids": True}
        request = urllib.request.Request(
            self.url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as reply:
                tops = json.load(reply)["choices"][0]["logprobs"]["top_logprobs"]
            found = [
                sorted(
                    ((int(name.removeprefix("token_id:")), value) for name, value in one.items()),
                    key=lambda pair: -pair[1],
                )[: self.top_k]
                for one in (top or {} for top in tops)
            ]
            if len(found) != len(ids) or any(len(one) < self.top_k for one in found[1:]):
                raise ValueError(f"fewer than {self.top_k} tokens at a place")
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            told = error.read().decode() if isinstance(error, HTTPError) else error
            raise UserError(
                f"the teacher at {self.url} gave no log-probabilities of {self.top_k} token ids "
                f"({told}). Use a server of the same tokenizer that takes echo, logprobs and "
                "return_tokens_as_token_ids, and a `teacher.top_k` that it allows."
            ) from error


class TeacherTable:
    """Likeliest tokens from a safetensors file: `N.ids` and `N.log_probs` [tokens, K] of row N.

    Args:
        rows: the row in the dataset file of each row of the dataset; None: the same.

    Raises:
        UserError: the file has no such row, or of another number of supervised tokens.
    """

    def __init__(self, runner: PipelineRunner, path: str, *, rows: Sequence[int] | None) -> None:
        self.runner, self.path, self.rows = runner, path, rows

    def __call__(self, batches: Sequence[MicroBatch]) -> list[Distributions]:
        found: list[Distributions] = []
        with safe_open(self.path, framework="pt") as file:
            for batch in batches if holds_last_stage(self.runner) else ():
                is_target_BT, parts = next_labels(batch) != IGNORE, []
                numbers = batch[numbers_of(batch)].tolist()
                for number, (row, tokens) in zip(numbers, samples_of(batch), strict=True):
                    own = number if self.rows is None else self.rows[number]
                    count = int(is_target_BT[row, tokens].sum())
                    try:
                        part = [file.get_tensor(f"{own}.{name}") for name in ("log_probs", "ids")]
                    except SafetensorError:
                        part = []
                    if [len(one) for one in part] != [count, count]:
                        raise UserError(
                            f"{self.path} has no distributions for the {count} supervised tokens "
                            f"of row {own}. Write {own}.ids and {own}.log_probs with {count} rows."
                        )
                    parts.append(part)
                values, ids = (torch.cat(list(one)) for one in zip(*parts, strict=True))
                found.append((values, ids.long()))
        return found


@dataclass(eq=False)
class OwnAnswers:
    """The micro-batches of each step, some rows with answers of the stages that train.

    Which rows, and the answers, follow from seed, step and weights, so a resumed run draws the
    same. An answer takes the place of the last supervised part of its row.

    Args:
        prompts: a loader of (row of the dataset, place in the step, encoded sample) of each step.
        collate: makes a micro-batch of encoded samples, on this rank.
        share: of the rows that are answered (lmbda of TRL's GKD).
        max_token_num: longest row; an answer is cut there.
    """

    answers: StageAnswers
    options: RolloutOptions
    _: KW_ONLY
    prompts: Any
    collate: Callable[..., MicroBatch]
    share: float
    max_token_num: int
    replicas: Replicas
    start_step: int

    def __post_init__(self) -> None:
        self.state_after = self.prompts.state_after

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        options, seed = self.options, self.options.seed
        for step, rows in enumerate(self.prompts, self.start_step):
            samples = [encoded for _, _, encoded in rows]
            chosen = [
                (number, place)
                for number, (row, place, encoded) in enumerate(rows)
                if row is not None
                and 0 < len(prompt_of(encoded)) < self.max_token_num
                and random.Random(derive_seed(seed, "own", step, place)).random() < self.share
            ]
            self.replicas.put_together()  # they answer for different times
            drawn = self.answers(
                [samples[number] for number, _ in chosen],
                [(derive_seed(seed, "answer", step, place, 0),) for _, place in chosen],
                options.sampling(options.sampling_temperature),
                lot_size=options.prompts_together,
            )
            texts = [answer.token_ids for [answer] in drawn]
            for (number, _), ids in zip(chosen, self.answers.shared(texts), strict=True):
                room = self.max_token_num - len(prompt_of(samples[number]))
                first = (place for place, one in enumerate(ids) if one in self.answers.image_ids)
                if kept := ids[: min(room, next(first, room))]:
                    samples[number] = answered(samples[number], kept)
            numbers = torch.tensor([-1 if row is None else row for row, *_ in rows])
            batches = batches_of(
                self.answers,
                [(None, one) for one in samples],
                step,
                options=options,
                collate=self.collate,
                replicas=self.replicas,
                is_sorted=options.is_sorted,
            )
            for batch in batches:
                name = numbers_of(batch)
                batch[name] = numbers[batch[name]]
                if name == "loss_rows":  # some rows only fill up
                    batch["labels"] = batch["labels"].masked_fill(batch[name][:, None] < 0, IGNORE)
            yield batches
