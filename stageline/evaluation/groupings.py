"""Which samples belong together in a report, and which are no independent draws."""

from collections.abc import Sequence
from typing import Any

Groups = dict[str, list[int]]  # name of a group -> indices of its samples


def collect_groupings(samples: Sequence[dict[str, Any]]) -> dict[str, Groups]:
    """The groupings of all samples: relation, task, ... -> its groups.

    A sample says its own as `groups`, such as {"relation": "left of", "task": "direction"}; one
    that names none of a grouping is left out of that grouping.
    """
    groupings: dict[str, Groups] = {}
    for index, sample in enumerate(samples):
        for grouping, name in (sample.get("groups") or {}).items():
            if name is not None:
                groups = groupings.setdefault(str(grouping), {})
                groups.setdefault(str(name), []).append(index)
    return groupings


def collect_clusters(samples: Sequence[dict[str, Any]]) -> list[str]:
    """The cluster of each sample, such as its picture; one without is a cluster by itself."""
    return [
        f"cluster {sample['cluster']}" if sample.get("cluster") is not None else f"sample {index}"
        for index, sample in enumerate(samples)
    ]
