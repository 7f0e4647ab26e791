"""Figures for Prometheus of each replica, where a server has several: `replica="0"` and so on."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LABELS = ("replica",)
# of the statistics of one replica: name there -> what it is
_GAUGES = {
    "queued": "answers that wait for room in the replica",
    "running": "answers that the replica works on",
    "cache_cells": "cells of the replica's key-value cache that are used",
    "is_healthy": "1: the replica works",
}
_COUNTERS = {
    "prompt_tokens": "tokens of prompts that the replica has read",
    "completion_tokens": "tokens that the replica has made",
}


class ReplicaFigures(Collector):
    """What each replica does; numbers of a moment ago.

    Args:
        stats: of all, `RouterStats`.
    """

    def __init__(self, stats: Callable[[], Any]) -> None:
        self.stats = stats

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment."""
        found = self.stats()
        for name, text in _GAUGES.items():
            title = f"stageline_replica_{name.removeprefix('is_')}"
            yield _filled(GaugeMetricFamily(title, text, labels=_LABELS), _of_all(found, name))
        for name, text in _COUNTERS.items():
            title = f"stageline_replica_{name}"
            yield _filled(CounterMetricFamily(title, text, labels=_LABELS), _of_all(found, name))
        given = CounterMetricFamily(
            "stageline_replica_requests", "answers that the replica was asked for", labels=_LABELS
        )
        yield _filled(given, found.num_given)


def _of_all(stats: Any, name: str) -> list[float]:
    return [getattr(one, name, 0) for one in stats.replicas]


def _filled(family: Any, values: Any) -> Metric:
    for number, value in enumerate(values):
        family.add_metric([str(number)], float(value or 0))
    return family
