"""Calls reward parts: each with a time limit, and with an error that names the part.

A reward says how good answers are; it runs on the host of a replica's first rank.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stageline import chaos, progress
from stageline.contracts import broken, call, part_name, shown
from stageline.errors import UserError

Samples = Sequence[Mapping[str, Any]]


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
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"reward {reward.key}")
        self.thread.start()

    def _run(self) -> None:
        try:
            self.found = call("reward", self.reward.part, *self.given)
        except BaseException as error:  # told in the thread that waits
            self.error = error

    def result(self) -> list[float]:
        if isinstance(self.error, UserError):
            raise self.error
        if self.error is not None:
            told = UserError(
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
