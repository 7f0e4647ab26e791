"""Ranks that are started anew over the same store meet each other, not those that came before."""

import threading
import time

from torch.distributed import HashStore

from stageline.distributed.launch import agree


def start(store, world_size, *, first_is_early=False):
    """What each rank of one start agrees on."""
    names = {}

    def join(rank):
        names[rank] = agree(store, rank, world_size, timeout=20)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
        if first_is_early:
            time.sleep(0.1)  # the first rank sees what an earlier start has left
    for thread in threads:
        thread.join()
    return [names[rank] for rank in range(world_size)]


def test_each_start_has_a_name_of_its_own_on_all_ranks():
    store = HashStore()
    starts = [start(store, 3, first_is_early=early) for early in (False, True, True)]
    assert all(len(set(names)) == 1 for names in starts)
    assert len({names[0] for names in starts}) == 3


def test_a_rank_that_was_killed_before_it_had_an_answer_is_not_waited_for():
    store = HashStore()
    store.set("stageline/meeting/asks/1", "of a dead rank")
    names = start(store, 2, first_is_early=True)
    assert names[0] == names[1]
