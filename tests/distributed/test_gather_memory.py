"""Peak memory of every rank is known on every rank."""

import torch

from stageline.training.memory import gather_peaks
from tests.helpers.ranks import run_ranks

MIB = 2**20


def gather(rank, num_mib):
    held = torch.ones(num_mib[rank] * MIB // 4)
    peaks = gather_peaks([torch.device("cpu")])
    return peaks, float(held[0])


def test_peaks_of_all_ranks_are_the_same_everywhere_and_in_the_order_of_ranks():
    results = [peaks for peaks, _ in run_ranks(gather, 3, [1, 2400, 1200])]
    assert results[0] == results[1] == results[2]
    first, second, third = results[0]
    # far above what the process held at its peak before it was forked
    assert 1150 * MIB < second - third < 1250 * MIB
    assert third > first
