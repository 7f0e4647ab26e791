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
        is_dear: calls cost money, or load a model.
    """

    key: str
    part: Callable[..., Any]
    weight: float = 1.0
    takes_lots: bool = False
    is_dear: bool = False


@dataclass
class Rewards:
    """Several rewards of the same answers.

    Attributes:
        timeout: seconds that one part may take for all answers of a step; 0 = none.
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
        seconds: of the slowest part.
        seconds_waited: for them, in `result`.
    """

    def __init__(
        self, parts: Sequence[Reward], timeout: float = 0.0, *, behind: "Judging | None" = None
    ) -> None:
        self.timeout, self._behind = timeout, behind
        before = [None for _ in parts] if behind is None else behind._works
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
        if self._is_whole:
            return
        self._is_whole = True
        for work in self._works:
            if not work.reward.takes_lots:
                work.asked.put(self._answers)
            work.asked.put(None)

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
                left = work.seconds_left(self.timeout)
                while not work.is_over.wait(left) and left != 0:
                    left = work.seconds_left(self.timeout)  # only its calls count
                if work.is_over.is_set() and work.seconds_left(self.timeout) != 0:
                    found.append(work.result())
                else:
                    work.is_over.set()  # a thread cannot be ended; the next step does not wait
                    self.num_late += 1
                    found.append([math.nan] * len(self._answers[0]))
        self.seconds = max((work.seconds for work in self._works), default=0.0)
        self.seconds_waited = time.monotonic() - began
        shape = len(found), len(self._answers[0])
        self._found = torch.tensor(found, dtype=torch.float64).view(shape)
        return self._found


class _Work:
    """The calls of a part for one step, in a thread, after those of the step `before`."""

    def __init__(self, reward: Reward, before: "_Work | None") -> None:
        self.reward = reward
        self.asked: queue.SimpleQueue[Sequence[Sequence[Any]] | None] = queue.SimpleQueue()
        self.is_over = threading.Event()
        self._before = None if before is None else before.is_over
        self._device = device_in_use()
        self._found: list[float] = []
        self._error: BaseException | None = None
        # (seconds of calls done, start of the one that runs)
        self._clock: tuple[float, float | None] = 0.0, None
        threading.Thread(target=self._run, daemon=True, name=f"reward {reward.key}").start()

    @property
    def seconds(self) -> float:
        """Return the seconds of its calls up to now."""
        done, since = self._clock
        return done if since is None else done + time.monotonic() - since

    def seconds_left(self, timeout: float) -> float | None:
        return max(timeout - self.seconds, 0.0) if timeout else None

    def _run(self) -> None:
        if self._before is not None:
            self._before.wait()
        try:
            if self._device is not None:  # a new thread would begin on the machine's first one
                torch.accelerator.set_device_index(self._device)
            while (given := self.asked.get()) is not None and not self.is_over.is_set():
                self._clock = self.seconds, time.monotonic()
                found = call("reward", self.reward.part, *given)
                self._found += _checked(self.reward.part, found, len(given[1]))
                self._clock = self.seconds, None
        except BaseException as error:  # raised again in the thread that waits
            self._error = error
        self._clock = self.seconds, None
        self.is_over.set()

    def result(self) -> list[float]:
        error = self._error
        if error is None:
            return self._found
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise error
        raise ContractError(
            f"the reward {part_name(self.reward.part)} raised {type(error).__name__}: {error}. "
            "Catch what an answer may do to it, and return None for one that it cannot judge."
        ) from error


def _checked(part: object, found: Any, count: int) -> list[float]:
    came = None
    if not isinstance(found, Sequence) or isinstance(found, str):
        came = f"returned {shown(found)}"
    elif len(found) != count:
        came = f"returned {len(found)} rewards for {count} answers"
    else:
        for value in found:
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if value is not None and not is_number:
                came = f"returned {shown(value)} among its rewards"
    if came is not None:
        raise broken(
            "reward",
            part,
            came,
            why="A list with one number or None for each answer is required",
            cure="return a float of each completion, in their order; None for one that it cannot "
            "score",
        )
    return [math.nan if value is None else float(value) for value in found]


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
        if silent := own_N.isnan().nonzero()[:, 0].tolist():
            first = samples[silent[0]]
            line += f"; nothing to say of {len(silent)} of {len(samples)} rows, the first is "
            line += str(first.get("source") or first.get("id"))
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
        rewards_PG: of all prompts of the step, of all replicas: "batch" divides by the spread of
            all of them.
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
