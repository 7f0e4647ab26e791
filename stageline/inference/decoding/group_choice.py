"""How many groups the sequences of a pipeline are best divided into.

With one group the stages take turns and all but one wait. With as many groups as stages all work,
each on fewer rows. That gains as much as a step on fewer rows is shorter: where a step is bound by
arithmetic, nearly everything; where it is bound by reading the weights, nothing, because each
group reads them again. So the steps of this machine and this model are measured, and the number
is chosen for each number of sequences.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LONG_STEP = 1.0  # seconds
WORTH_IT = 0.97  # more groups must save this much: fewer are less work for the host


@dataclass(frozen=True)
class GroupChoice:
    """Chooses by measured steps.

    Attributes:
        rows: numbers of rows that were measured, rising.
        seconds: for each of them, what a step takes on each stage.
    """

    rows: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.seconds[0])

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
        steps = self._steps(-(-num_rows // num_groups))
        return max(sum(steps), num_groups * max(steps))

    def _steps(self, num_rows: int) -> tuple[float, ...]:
        """Between measured numbers on a line; above the largest one in proportion."""
        place = bisect.bisect_left(self.rows, num_rows)
        if place == len(self.rows):
            return tuple(found * num_rows / self.rows[-1] for found in self.seconds[-1])
        if self.rows[place] == num_rows or place == 0:
            return self.seconds[place]
        low, high = self.rows[place - 1], self.rows[place]
        share = (num_rows - low) / (high - low)
        pairs = zip(self.seconds[place - 1], self.seconds[place], strict=True)
        return tuple(a + share * (b - a) for a, b in pairs)


def measure_steps(
    measure: Callable[[int], Sequence[float]], *, max_rows: int, repeats: int = 2
) -> GroupChoice:
    """Measures steps of 1, 2, 4, ... rows.

    Args:
        measure: seconds that each stage takes for one step of so many rows.
        repeats: the shortest of so many counts, behind one that warms up.
    """
    rows, seconds, number = [], [], 1
    while True:
        number = min(number, max_rows)
        rounds = [measure(number) for _ in range(repeats + 1)][1:]
        rows.append(number)
        seconds.append(tuple(min(stage) for stage in zip(*rounds, strict=True)))
        # so long a step is bound by arithmetic, and longer ones follow in proportion
        if number == max_rows or max(seconds[-1]) > LONG_STEP:
            return GroupChoice(tuple(rows), tuple(seconds))
        number *= 2
