"""Calls reward parts, with a time limit and errors that name the part; rewards become advantages.

A reward says how good answers are; it runs on the host of a replica's first rank. Advantages are
made of plain numbers before answers fall into micro-batches.

Shapes: P prompts, G answers of each, N answers in all, R rewards.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from stageline import chaos, progress
from stageline.contracts import broken, call, part_name, shown
from stageline.device import device_in_use
from stageline.errors import ContractError, UserError, is_out_of_memory

Samples = Sequence[Mapping[str, Any]]
Advantage = Literal["group", "group_no_std", "batch", "rloo"]


@dataclass(frozen=True)
class Reward:
    """A reward part, its key and its weight in the sum."""

    key: str
    part: Callable[..., Any]
    weight: float = 1.0


@dataclass
class Rewards:
    """Several rewards of the same answers.

    Attributes:
        timeout: seconds that one part may take for all answers of a step; 0: any number.
        num_late: calls that took longer: their answers have no reward of that part.
    """

    parts: Sequence[Reward]
    timeout: float = 0.0
    num_late: int = field(default=0, init=False)

    @property
    def weights(self) -> list[float]:
        return [one.weight for one in self.parts]

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], samples: Samples
    ) -> torch.Tensor:
        """[R, N] in float64: of each part and answer; NaN where a part has nothing to say.

        All parts run side by side, each in a thread of its own.

        Raises:
            ContractError: a part raised, or returned something else than one number or None for
                each answer; part, file and line are named.
        """
        calls = [_Call(one, prompts, completions, samples) for one in self.parts]
        found = []
        with progress.doing("rewards"):
            chaos.point("rewards")
            began = time.monotonic()
            for one in calls:
                left = self.timeout - (time.monotonic() - began)
                one.thread.join(max(left, 0) if self.timeout else None)
            for one in calls:
                if one.thread.is_alive():  # a thread cannot be ended; its process does not wait
                    self.num_late += 1
                    found.append([math.nan] * len(completions))
                else:
                    found.append(one.result())
        return torch.tensor(found, dtype=torch.float64).view(len(self.parts), len(completions))


class _Call:
    """A part at work."""

    def __init__(self, reward: Reward, *given: Sequence[Any]) -> None:
        self.reward, self.given = reward, given
        self.found: Any = None
        self.error: BaseException | None = None
        self.device = device_in_use()
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"reward {reward.key}")
        self.thread.start()

    def _run(self) -> None:
        try:
            if self.device is not None:  # a new thread would begin on the machine's first one
                torch.accelerator.set_device_index(self.device)
            self.found = call("reward", self.reward.part, *self.given)
        except BaseException as error:  # told in the thread that waits
            self.error = error

    def result(self) -> list[float]:
        if self.error is not None:
            if isinstance(self.error, UserError) or is_out_of_memory(self.error):
                raise self.error
            told = ContractError(
                f"the reward {part_name(self.reward.part)} raised {type(self.error).__name__}: "
                f"{self.error}. A number or None for each answer was expected: catch what an "
                "answer may do to it, and return None for one that it cannot judge."
            )
            raise told from self.error
        return _checked(self.reward.part, self.found, len(self.given[1]))


def _checked(part: object, found: Any, count: int) -> list[float]:
    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    came = None
    if not is_list:
        came = f"returned {shown(found)}"
    elif len(found) != count:
        came = f"returned {len(found)} rewards for {count} answers"
    else:
        wrong = [value for value in found if not _is_reward(value)]
        if wrong:
            came = f"returned {shown(wrong[0])} among its rewards"
    if came is not None:
        raise broken(
            "reward",
            part,
            came,
            why="A list with one number or None for each answer was expected, because answers to "
            "the same prompt are compared by it",
            cure="return a float of each completion, in their order; None for one that it cannot "
            "judge",
        )
    return [math.nan if value is None else float(value) for value in found]


def _is_reward(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


LEAST_STD = 1e-4  # as trl: a spread of nothing divides by this


def weighted(rewards_RPG: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """The weighted sum of several rewards [P, G]; NaN where every reward has nothing to say."""
    weights_R = torch.tensor(weights, dtype=rewards_RPG.dtype)[:, None, None]
    sums_PG = (rewards_RPG * weights_R).nansum(dim=0)
    return sums_PG.masked_fill(rewards_RPG.isnan().all(dim=0), torch.nan)


def advantages(rewards_PG: torch.Tensor, kind: Advantage) -> torch.Tensor:
    """How much better each answer is than the others to its prompt, [P, G].

    An answer without a reward (NaN) is in no mean and no deviation, and has the advantage 0.

    Args:
        rewards_PG: of all prompts of the step, of all replicas: "batch" divides by the spread of
            all of them.
        kind: group: less the mean of its group, by the group's deviation (arXiv 2402.03300);
            group_no_std: less the mean alone (2503.20783); batch: by the deviation of all rewards;
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
    """The standard deviation of each group [P], of n - 1; 0 of fewer than two rewards."""
    counts_P = (~rewards_PG.isnan()).sum(dim=1)
    apart_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
    variances_P = apart_PG.square().nansum(dim=1) / (counts_P - 1).clamp(min=1)
    return variances_P.sqrt()


def has_spread(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Which groups say anything [P]: answers of one reward all have the advantage 0."""
    return deviations(rewards_PG) > 1e-8
