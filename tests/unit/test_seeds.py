"""Seeds: the same everywhere, different for different purposes."""

import random

import numpy
import torch

from stageline.seeds import derive_seed, host_state_kept, mix_seed, seed_everything


def draw() -> tuple:
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def test_seed_everything_repeats_all_three_generators():
    seed_everything(7)
    first = draw()
    assert draw() != first
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert not any(map(float.__eq__, draw(), first))  # none of them ignores the seed
    seed_everything(2**40)  # NumPy takes 32 bits only


def test_derived_seeds_differ_by_purpose_and_not_by_process():
    names = [(), ("order",), ("order", 1), ("order", 2), ("order", "1"), ("dropout", 1), (1, 1)]
    seeds = [derive_seed(seed, *parts) for seed in (0, 1) for parts in names]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # hash() of a string changes from process to process; this must not
    assert derive_seed(0, "order", 1) == 8444176558443591710


def test_names_do_not_run_together():
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")
    assert derive_seed(0, 1, 2) != derive_seed(0, 12)
    # a part must not read like two parts
    assert derive_seed(0, "a", "b") != derive_seed(0, "astr:b")


def test_mixed_seeds_differ_also_in_the_bits_that_torch_takes():
    seeds = [mix_seed(base, index) for base in (0, 1, 2**63 - 1) for index in range(2000)]
    assert len(set(seeds)) == len({seed % 2**32 for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # SplitMix64 gives this in its authors' version (https://prng.di.unimi.it/splitmix64.c), halved
    assert mix_seed(1234567, 0) == 6457827717110365317 >> 1


def test_states_of_the_host_are_put_back():
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with host_state_kept():
        draw()
    assert draw() == expected
