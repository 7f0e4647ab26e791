"""Seeds: the same everywhere, different for different purposes."""

import random
import subprocess
import sys
from pathlib import Path

import numpy
import torch

from stageline.distributed.seeds import derive_generator, derive_seed, replica_seed, seed_everything

ROOT = Path(__file__).resolve().parents[2]


def test_seed_everything_repeats_all_three_generators():
    def draw() -> tuple:
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    seed_everything(7)
    first = draw()
    assert draw() != first
    seed_everything(7)
    assert draw() == first
    seed_everything(2**40)  # NumPy takes 32 bits only


def test_derived_seeds_differ_by_purpose_and_not_by_process():
    names = [(), ("order",), ("order", 1), ("order", 2), ("order", "1"), ("dropout", 1), (1, 1)]
    seeds = [derive_seed(seed, *parts) for seed in (0, 1) for parts in names]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # hash() of a string changes from process to process; this must not
    script = (
        "from stageline.distributed.seeds import derive_seed; print(derive_seed(0, 'order', 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert int(done.stdout) == derive_seed(0, "order", 1)


def test_names_do_not_run_together():
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")
    assert derive_seed(0, 1, 2) != derive_seed(0, 12)


def test_a_generator_leaves_the_global_one_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn = torch.rand(3, generator=derive_generator(0, "order"))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(drawn, torch.rand(3, generator=derive_generator(0, "order")))


def test_replicas_draw_other_dropout_and_the_first_the_usual_one():
    seeds = [replica_seed(seed, dp_rank) for seed in (0, 1) for dp_rank in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert (seeds[0], seeds[3]) == (0, 1)
