"""The split of layers: exact for any numbers, and as even as whole layers allow."""

import itertools

import pytest

from stageline.errors import UserError
from stageline.pipeline.topology import explicit_partition, layer_range, uniform_partition

RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("num_stages", [1, 2, 5, 8])
def test_no_layer_is_lost_and_no_stage_is_empty(num_stages):
    for num_layers, ratio in itertools.product(range(num_stages, 65), RATIOS):
        counts = uniform_partition(num_layers, num_stages, visual_gpu_ratio=ratio)
        assert len(counts) == num_stages
        assert sum(counts) == num_layers
        assert min(counts) >= 1


def test_the_split_is_the_best_of_all_splits():
    """Brute force: no other split has a smaller worst deviation from the ideal shares."""
    for num_layers, num_stages, ratio in itertools.product(range(4, 11), (2, 3, 4), RATIOS):
        capacities = [1 - ratio] + [1.0] * (num_stages - 1)
        ideal = [num_layers * c / sum(capacities) for c in capacities]

        def squared(counts, ideal=ideal):
            return round(sum((c - i) ** 2 for c, i in zip(counts, ideal, strict=True)), 9)

        every = (
            counts
            for counts in itertools.product(range(1, num_layers + 1), repeat=num_stages)
            if sum(counts) == num_layers
        )
        chosen = uniform_partition(num_layers, num_stages, visual_gpu_ratio=ratio)
        assert squared(chosen) == min(map(squared, every)), (num_layers, num_stages, ratio, chosen)


def test_the_tower_takes_its_share_of_stage_0():
    assert uniform_partition(28, 4, visual_gpu_ratio=0.5) == [4, 8, 8, 8]
    assert uniform_partition(24, 2, visual_gpu_ratio=1.0) == [1, 23]
    # a tower of more than a stage, as in inference: stage 0 has the layers that it must have
    assert uniform_partition(25, 4, visual_gpu_ratio=1.5) == [1, 8, 8, 8]
    assert uniform_partition(3, 1, visual_gpu_ratio=1.5) == [3]


def test_refusals_say_what_to_do():
    with pytest.raises(UserError, match=r"4 layers can't fill 5 stages.*--num-stages to 4"):
        uniform_partition(4, 5)
    with pytest.raises(UserError, match="8,8 sums to 16, the model has 17 layers"):
        explicit_partition([8, 8], num_layers=17, num_stages=2)
    with pytest.raises(UserError, match="8,8 names 2 stages, the run has 3"):
        explicit_partition([8, 8], num_layers=16, num_stages=3)


def test_layer_ranges_are_contiguous():
    assert [list(layer_range([2, 1, 3], stage)) for stage in range(3)] == [[0, 1], [2], [3, 4, 5]]
