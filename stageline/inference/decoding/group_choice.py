"""How many groups the sequences of a pipeline are best divided into.

With one group the stages take turns and all but one wait. With as many groups as stages all work,
each on fewer rows. That gains as much as a step on fewer rows is shorter: where a step is bound by
arithmetic, nearly everything; where it is bound by reading the weights, nothing, because each
group reads them again. So the steps of this machine and this model are measured, alone and with
all stages at work (which may share a bus), and the number is chosen for each number of sequences.
Prompts that wait are read in as many passes as the same steps advise.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LONG_STEP = 1.0  # seconds
WORTH_IT = 0.97  # more groups must save this much: fewer are less work for the host
# of passes over prompts, whose times are on a line with those of shorter steps: where it errs,
# passes that are too small cost more than they would gain
PASS_WORTH_IT, LEAST_TOKENS = 0.95, 128
NUM_FULL = 3  # steps that each stage does while all have work, in a measurement
Seconds = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class GroupChoice:
    """Chooses by measured steps.

    Attributes:
        rows: numbers of rows that were measured, rising.
        alone: for each of them, what a step takes on each stage while the others wait.
        together: the same while they work too.
    """

    rows: tuple[int, ...]
    alone: Seconds
    together: Seconds

    @property
    def num_stages(self) -> int:
        return len(self.alone[0])

    def best(self, num_rows: int) -> int:
        """The number of groups with the most tokens a second; at least 1."""
        most = min(2 * self.num_stages, max(1, num_rows))
        best, least = 1, self.cycle(num_rows, 1)
        for num_groups in range(2, most + 1):
            found = self.cycle(num_rows, num_groups)
            if found < least * WORTH_IT:
                best, least = num_groups, found
        return best

    def cycle(self, num_rows: int, num_groups: int) -> float:
        """Seconds until each of the rows has one more token.

        A group can't begin its next step before it came out of the last stage, and the slowest
        stage works for all groups.
        """
        if num_groups == 1:
            return sum(self._steps(self.alone, num_rows))
        steps = self._steps(self.together, -(-num_rows // num_groups))
        return max(sum(steps), num_groups * max(steps))

    def pass_tokens(self, num_tokens: int) -> int:
        """How many tokens of prompts are best read in one pass, if so many wait.

        A pass costs what a step of as many rows costs; the first one goes through all stages
        before the last stage has work, so that few passes leave stages waiting.
        """
        best, least = num_tokens, self._reading(num_tokens, num_tokens)
        for count in range(2, num_tokens // LEAST_TOKENS + 1):
            size = -(-num_tokens // count)
            found = self._reading(num_tokens, size)
            if found < least * PASS_WORTH_IT:
                best, least = size, found
        return best

    def _reading(self, num_tokens: int, size: int) -> float:
        if size == num_tokens:
            return sum(self._steps(self.alone, size))
        steps = self._steps(self.together, size)
        return sum(steps) + (num_tokens / size - 1) * max(steps)

    def _steps(self, seconds: Seconds, num_rows: int) -> list[float]:
        """On a line between measured numbers; beyond them on that from the first to the last."""
        if len(self.rows) == 1:
            return [found * max(1.0, num_rows / self.rows[0]) for found in seconds[0]]
        if num_rows > self.rows[-1]:  # the last two alone differ by noise as well
            low, high = 0, len(self.rows) - 1
        else:
            high = max(bisect.bisect_left(self.rows, num_rows), 1)
            low = high - 1
        share = (num_rows - self.rows[low]) / (self.rows[high] - self.rows[low])
        pairs = zip(seconds[low], seconds[high], strict=True)
        return [a + share * max(0.0, b - a) for a, b in pairs]


def measure_steps(
    measure: Callable[[int, int], Sequence[Sequence[float]]], *, max_rows: int, num_stages: int
) -> GroupChoice:
    """Measures steps of 1, 2, 4, ... rows: matrices of two rows can be as slow as those of four.

    Args:
        measure: (rows, how many steps follow one another) -> seconds of each, on each stage.
    """
    rows, alone, together, number = [], [], [], 1
    while True:
        number = min(number, max_rows)
        rows.append(number)
        flow = measure(number, num_stages + NUM_FULL - 1)  # its first steps warm up
        together.append(tuple(_shortest(flow, stage, num_stages) for stage in range(num_stages)))
        singles = [measure(number, 1)[0] for _ in range(2)]
        # working alone is never slower: what another process disturbed does not count
        alone.append(tuple(min(stage) for stage in zip(*singles, *flow, strict=True)))
        # so long a step is bound by arithmetic, and longer ones lie on a line with it
        if number == max_rows or max(alone[-1]) > LONG_STEP:
            return GroupChoice(tuple(rows), tuple(alone), tuple(together))
        number *= 2


def _shortest(flow: Sequence[Sequence[float]], stage: int, num_stages: int) -> float:
    """What a stage took at least while all the others had work too."""
    first = num_stages - 1 - stage
    return min(seconds[stage] for seconds in flow[first : len(flow) - stage])
