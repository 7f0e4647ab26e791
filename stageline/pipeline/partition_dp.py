"""The best of all ways to place layers on stages. Pure numbers: knows no model and no device."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

StageCost = Callable[[int, int, int], float]  # (stage, first layer, last layer + 1)


def smallest_maximum(num_layers: int, num_stages: int, cost: StageCost) -> list[int] | None:
    """Minimises the dearest stage, exactly; among the best, the sum of squares of the others.

    Args:
        cost: of a stage with these layers; infinite where it must not be.

    Returns:
        Layers per stage, at least one each; None where every split has an infinite cost.
    """
    known = cache(cost)
    limit = _best_chain(num_layers, num_stages, known, combine=max)[0]
    if math.isinf(limit):
        return None
    above = math.nextafter(limit, math.inf)

    def squared(stage: int, start: int, end: int) -> float:
        value = known(stage, start, end)
        return value * value if value <= above else math.inf

    return _best_chain(num_layers, num_stages, squared, combine=float.__add__)[1]


def _best_chain(
    num_layers: int,
    num_stages: int,
    cost: StageCost,
    *,
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Dynamic programming over (stages used, layers placed)."""
    best: list[float] = [0.0] + [math.inf] * num_layers
    choices: list[list[int]] = []
    for stage in range(num_stages):
        behind = num_stages - 1 - stage  # stages that still need a layer
        row = [math.inf] * (num_layers + 1)
        chosen = [stage] * (num_layers + 1)
        ends = [num_layers] if behind == 0 else range(stage + 1, num_layers - behind + 1)
        for end in ends:
            for start in range(stage, end):
                if math.isinf(best[start]):
                    continue
                value = combine(best[start], float(cost(stage, start, end)))
                if value < row[end]:
                    row[end], chosen[end] = value, start
        best = row
        choices.append(chosen)
    return best[num_layers], _walk_back(choices, num_layers)


def _walk_back(choices: Sequence[Sequence[int]], num_layers: int) -> list[int]:
    partition, end = [], num_layers
    for chosen in reversed(choices):
        partition.append(end - chosen[end])
        end = chosen[end]
    return partition[::-1]


def num_splits(num_layers: int, num_stages: int) -> int:
    """How many ways there are."""
    return math.comb(num_layers - 1, num_stages - 1)


def every_split(num_layers: int, num_stages: int) -> Iterator[list[int]]:
    """All ways, at least one layer a stage."""
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        places = (0, *cuts, num_layers)
        yield [end - start for start, end in itertools.pairwise(places)]


def best_split(
    starts: Sequence[Sequence[int]],
    value: Callable[[Sequence[int]], tuple[float, float]],
    *,
    bound: Callable[[Sequence[int]], tuple[float, float]],
    most_splits: int = 3000,
    most_values: int = 300,
) -> list[int]:
    """The split of the smallest value where no rule makes the stages independent.

    Exact where there are at most `most_splits` splits: all are looked at, the dear value of each
    being asked for only where its bound leaves hope. Else, from the best start, single layers are
    moved between any two stages as long as that helps.

    Args:
        starts: splits to begin with.
        value: what is minimised.
        bound: never above `value`, and quick.
        most_values: how often `value` may be asked for when not all splits are tried.
    """
    best = min(starts, key=value)
    best_value = value(best)
    if num_splits(sum(best), len(best)) <= most_splits:
        for split in sorted(every_split(sum(best), len(best)), key=bound):
            if bound(split) >= best_value:
                break  # sorted: none behind it is better
            if (found := value(split)) < best_value:
                best, best_value = split, found
        return list(best)
    asked = 0
    improved = True
    while improved and asked < most_values:
        improved = False
        for split in sorted(_neighbours(best), key=bound):
            if bound(split) >= best_value or asked >= most_values:
                break
            asked += 1
            if (found := value(split)) < best_value:
                best, best_value, improved = split, found, True
                break
    return list(best)


def _neighbours(split: Sequence[int]) -> Iterator[list[int]]:
    """One layer fewer on one stage, one more on another."""
    for giver, taker in itertools.permutations(range(len(split)), 2):
        if split[giver] > 1:
            moved = list(split)
            moved[giver] -= 1
            moved[taker] += 1
            yield moved
