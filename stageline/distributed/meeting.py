"""Where the ranks of one start meet: a part of the launcher's store that no earlier start has used.

torchrun keeps one store over all its restarts, and torch writes the addresses of the ranks under
the same names each time (pytorch issues 135712, 167288): a rank that is started anew would read
those of dead ones. The count of restarts does not tell starts apart: on several machines it differs
between them.
"""

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

_SECONDS_BETWEEN_LOOKS = 0.01
_NAME = "stageline/meeting"


def launchers_store(rank: int, world_size: int, *, timeout: float) -> Store | None:
    """The store for the process group of this start; None: torch finds one by itself."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return PrefixStore(agree(store, rank, world_size, timeout=timeout), store)


def agree(store: Store, rank: int, world_size: int, *, timeout: float) -> str:
    """A name of this start, the same on all ranks and on none of an earlier start.

    Each rank asks with a word of its own, the first one answers to that word: what earlier starts
    left in the store is answered too, and nobody reads it.

    Raises:
        TimeoutError, RuntimeError: a rank did not come.
    """
    if rank:
        word = uuid.uuid4().hex
        store.set(f"{_NAME}/asks/{rank}", word)
        name = store.get(f"{_NAME}/answer/{word}").decode()
        store.set(f"{name}/here/{rank}", "1")
        return name
    name = f"{_NAME}/{uuid.uuid4().hex}"
    deadline = time.monotonic() + timeout
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            _answer(store, other, name)
        missing = {other for other in missing if not store.check([f"{name}/here/{other}"])}
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} did not come in {timeout:g} s")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return name


def _answer(store: Store, rank: int, name: str) -> None:
    if store.check([f"{_NAME}/asks/{rank}"]):
        word = store.get(f"{_NAME}/asks/{rank}").decode()
        store.set(f"{_NAME}/answer/{word}", name)
