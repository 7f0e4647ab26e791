"""Percentile bootstrap intervals of a mean (Efron 1979), seeded.

Rows of one picture are no independent samples: where they name a cluster, whole clusters are drawn
and the mean is the sum of their scores over the number of their rows.
"""

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy

LEVEL = 0.95
DRAWS_AT_ONCE = 2_000_000  # 16 MB


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn.

    Attributes:
        resamples: how many; 0: no intervals.
        seed: of the draw. Each interval draws on its own, so that a further group changes no other.
    """

    resamples: int = 10_000
    seed: int = 0

    def interval(
        self,
        scores: Sequence[float],
        *,
        clusters: Sequence[Hashable] | None = None,
        name: str = "",
    ) -> tuple[float, float] | None:
        """The 95 % interval of the mean; None without scores or resamples.

        Args:
            clusters: of each score; by default each is its own.
            name: of what is measured; another name draws otherwise.
        """
        if not scores or not self.resamples:
            return None
        means = self._means(*_by_cluster(scores, clusters), name=name)
        low, high = numpy.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    def _means(self, sums: numpy.ndarray, counts: numpy.ndarray, *, name: str) -> numpy.ndarray:
        """The mean of each resample.

        Args:
            sums: of the scores of each cluster.
            counts: rows of each cluster.
        """
        draw = numpy.random.default_rng([self.seed, zlib.crc32(name.encode())])
        size = len(sums)
        at_once = max(1, DRAWS_AT_ONCE // size)
        means = []
        for start in range(0, self.resamples, at_once):
            shape = (min(at_once, self.resamples - start), size)
            drawn = draw.integers(0, size, shape)
            means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
        return numpy.concatenate(means)


def _by_cluster(
    scores: Sequence[float], clusters: Sequence[Hashable] | None
) -> tuple[numpy.ndarray, numpy.ndarray]:
    if clusters is None:
        return numpy.asarray(scores, dtype=numpy.float64), numpy.ones(len(scores))
    totals: dict[Hashable, list[float]] = {}
    for score, cluster in zip(scores, clusters, strict=True):
        total = totals.setdefault(cluster, [0.0, 0.0])
        total[0] += score
        total[1] += 1
    table = numpy.asarray(list(totals.values()), dtype=numpy.float64)
    return table[:, 0], table[:, 1]
