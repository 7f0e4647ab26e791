"""Call reward parts on the host of a replica's first rank, and turn rewards into advantages.

Shapes: P prompts, G answers of each, N answers in all, R rewards.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from stageline import progress
from stageline.contracts import broken, call, part_name, shown
from stageline.device import device_in_use
from stageline.errors import ContractError, UserError, is_out_of_memory

Samples = Sequence[Mapping[str, Any]]
Advantage = Literal["group", "group_no_std", "batch", "rloo"]


@dataclass(frozen=True)
class Reward:
    """A reward part, its key and its weight in the sum.

    Attributes:
        takes_lots: it gets answers in lots, as soon as they are there; else all of a step at once.
    """

    key: str
    part: Callable[..., Any]
    weight: float = 1.0
    takes_lots: bool = False
    is_dear: bool = False  # calls cost money, or load a model


@dataclass
class Rewards:
    """Several rewards of the same answers.

    Attributes:
        timeout: seconds that a step waits for them once all answers are there; 0 = for ever.
    """

    parts: Sequence[Reward]
    timeout: float = 0.0
    _newest: "Judging | None" = field(default=None, init=False)

    @property
    def weights(self) -> list[float]:
        return [one.weight for one in self.parts]

    def begin(self) -> "Judging":
        """Start to score a step; a part takes its answers when it is done with those before."""
        self._newest = Judging(self.parts, self.timeout, behind=self._newest)
        return self._newest

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], samples: Samples
    ) -> torch.Tensor:
        """Return the rewards of answers that are all there; see `Judging.result`."""
        judging = self.begin()
        judging.add(prompts, completions, samples)
        return judging.result()


class Judging:
    """Computation of the rewards of a step, each part in a thread of its own.

    Args:
        behind: answers that are scored before these.

    Attributes:
        num_late: parts that exceeded the timeout: their answers get no reward from them.
        seconds, seconds_waited: of the slowest part, and for all of them in `result`.
    """

    def __init__(
        self, parts: Sequence[Reward], timeout: float = 0.0, *, behind: "Judging | None" = None
    ) -> None:
        self.timeout, self._behind = timeout, behind
        before = [work.is_over for work in behind._works] if behind else [None] * len(parts)
        self._works: list[_Work] = [_Work(*pair) for pair in zip(parts, before, strict=True)]
        self._answers: tuple[list[str], list[str], list[Mapping[str, Any]]] = ([], [], [])
        self._found: torch.Tensor | None = None
        self._is_whole = False
        self.num_late, self.seconds, self.seconds_waited = 0, 0.0, 0.0

    def add(self, prompts: Sequence[str], completions: Sequence[str], samples: Samples) -> None:
        """Hand over a lot of answers."""
        known_prompts, known_completions, known_samples = self._answers
        known_prompts += prompts
        known_completions += completions
        known_samples += samples
        for work in self._works:
            if work.reward.takes_lots:
                work.asked.put((prompts, completions, samples))

    def end(self) -> None:
        """Tell that no more answers come: parts that take all of a step at once get them."""
        for work in self._works if not self._is_whole else ():
            if not work.reward.takes_lots:
                work.asked.put(self._answers)
            work.asked.put(None)
        self._is_whole = True

    def result(self) -> torch.Tensor:
        """Wait for the rewards [R, N] in float64; NaN where a part has none.

        Raises:
            ContractError: a part raised, or returned something else than one number or None for
                each answer.
        """
        if self._found is not None:
            return self._found
        if self._behind is not None:  # a part that hangs there is given up there
            self._behind.result()
            self._behind = None
        began, found = time.monotonic(), []
        with progress.doing("rewards"):
            self.end()
            for work in self._works:
                left = max(began + self.timeout - time.monotonic(), 0.0) if self.timeout else None
                is_late = not work.is_over.wait(left)
                self.num_late += is_late
                if work.error is not None:
                    raise work.error
                found.append([math.nan] * len(self._answers[0]) if is_late else work.found)
                work.is_over.set()  # a thread cannot be ended; the next step does not wait
        self.seconds = max((work.seconds for work in self._works), default=0.0)
        self.seconds_waited = time.monotonic() - began
        shape = len(found), len(self._answers[0])
        self._found = torch.tensor(found, dtype=torch.float64).view(shape)
        return self._found


class _Work:
    """The calls of a part for one step, in a thread, after those of the step `before`."""

    def __init__(self, reward: Reward, before: threading.Event | None) -> None:
        self.reward, self._before, self._device = reward, before, device_in_use()
        self.asked: queue.SimpleQueue[Sequence[Sequence[Any]] | None] = queue.SimpleQueue()
        self.is_over = threading.Event()
        self.found: list[float] = []
        self.seconds = 0.0
        self.error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True, name=f"reward {reward.key}").start()

    def _run(self) -> None:
        part = self.reward.part
        if self._before is not None:
            self._before.wait()
        try:
            if self._device is not None:  # a new thread would begin on the machine's first one
                torch.accelerator.set_device_index(self._device)
            while (given := self.asked.get()) is not None and not self.is_over.is_set():
                began = time.monotonic()
                self.found += _checked(part, call("reward", part, *given), len(given[1]))
                self.seconds += time.monotonic() - began
        except BaseException as error:  # raised again in the thread that waits
            self.error = error
            if not (isinstance(error, UserError) or is_out_of_memory(error)):
                self.error = ContractError(
                    f"the reward {part_name(part)} raised {type(error).__name__}: {error}. Catch "
                    "what an answer may do to it, and return None for one that it cannot judge."
                )
                self.error.__cause__ = error
        self.is_over.set()


def _checked(part: object, found: Any, count: int) -> list[float]:
    def is_reward(value: Any) -> bool:
        return value is None or (isinstance(value, int | float) and math.isfinite(value))

    if not isinstance(found, Sequence) or isinstance(found, str):
        came = f"returned {shown(found)}"
    elif len(found) != count:
        came = f"returned {len(found)} rewards for {count} answers"
    elif bad := [value for value in found if not is_reward(value)]:
        came = f"returned {shown(bad[0])} among its rewards"
    else:
        return [math.nan if value is None else float(value) for value in found]
    raise broken(
        "reward",
        part,
        came,
        why="A list with one number or None for each answer is required",
        cure="return a float of each completion, in their order; None for one without a score",
    )


def try_rewards(
    rewards: Rewards, prompts: Sequence[str], samples: Samples, *, num_tokens: Callable[[str], int]
) -> list[str]:
    """Return a line for each reward: its mean for the rows' own answers and for empty ones."""
    told = []
    own = [str((one.get("answers") or [one.get("answer", "")])[0]) for one in samples]
    for reward in rewards.parts:
        if reward.is_dear:
            told.append(f"reward {reward.key}: not tried, because its calls cost")
            continue
        values = []
        for texts in (own, [""] * len(own)):
            facts = [{"num_tokens": num_tokens(text), "is_cut": False} for text in texts]
            known = [{**sample, **fact} for sample, fact in zip(samples, facts, strict=True)]
            values.append(replace(rewards, parts=[reward])(prompts, texts, known)[0])
        own_N, empty_N = values
        line = (
            f"reward {reward.key}: {own_N.nanmean().item():.3g} for a row's own answer, "
            f"{empty_N.nanmean().item():.3g} for an empty one, on average"
        )
        if torch.equal(own_N.nan_to_num(), empty_N.nan_to_num()):
            line += "; the same for both, so it does not tell right from wrong in these rows"
        if num_silent := int(own_N.isnan().sum()):
            line += f"; no score for {num_silent} of {len(samples)} rows"
        told.append(line)
    return told


LEAST_STD = 1e-4  # trl also adds it, so that equal rewards do not divide by 0


def weighted(rewards_RPG: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Return the weighted sum of several rewards [P, G]; NaN where no reward has a value."""
    weights_R = torch.tensor(weights, dtype=rewards_RPG.dtype)[:, None, None]
    sums_PG = (rewards_RPG * weights_R).nansum(dim=0)
    return sums_PG.masked_fill(rewards_RPG.isnan().all(dim=0), torch.nan)


def advantages(rewards_PG: torch.Tensor, kind: Advantage) -> torch.Tensor:
    """Return how much better each answer is than the others to its prompt, [P, G].

    An answer without a reward (NaN) is in no mean and no deviation; its advantage is 0.

    Args:
        rewards_PG: of all prompts of the step, of all replicas.
        kind: group: less the mean of its group, by the group's deviation (arXiv 2402.03300);
            group_no_std: only less the mean (2503.20783); batch: by the deviation of all rewards;
            rloo: less the mean of the others (2402.14740).
    """
    centred_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
    if kind == "group":
        centred_PG = centred_PG / (deviations(rewards_PG) + LEAST_STD)[:, None]
    elif kind == "batch":
        centred_PG = centred_PG / (deviations(rewards_PG.reshape(1, -1)) + LEAST_STD)
    elif kind == "rloo":
        counts_P1 = (~rewards_PG.isnan()).sum(dim=1, keepdim=True)
        centred_PG = centred_PG * counts_P1 / (counts_P1 - 1).clamp(min=1)
    return centred_PG.nan_to_num(0.0)


def deviations(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of each group [P], of n - 1; 0 of fewer than two rewards."""
    counts_P = (~rewards_PG.isnan()).sum(dim=1)
    apart_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
    variances_P = apart_PG.square().nansum(dim=1) / (counts_P - 1).clamp(min=1)
    return variances_P.sqrt()


def has_spread(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return which groups have several rewards [P]; in others all advantages are 0."""
    return deviations(rewards_PG) > 1e-8
