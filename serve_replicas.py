"""Several replicas of the pipeline behind one server: the first one's first process listens.

The first process of each other replica runs its engine for it, over a socket in a private folder,
as long as the server lasts.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from decode_run import Decoding
from stageline.distributed.machines import this_machine
from stageline.errors import UserError
from stageline.inference.decoding.engine_stats import EngineStats
from stageline.inference.replicas.host import host_engine, plain_stats
from stageline.inference.replicas.link import Link
from stageline.inference.replicas.meeting import join_meeting, meeting_place
from stageline.inference.replicas.remote_engine import RemoteEngine, stats_of
from stageline.inference.replicas.router import ReplicaRouter

SECONDS_TO_MEET = 600.0  # a replica measures its steps before it comes
PATH_BYTES = 512


def check_one_machine(num_replicas: int | None) -> None:
    """Refuses replicas on several machines.

    Raises:
        UserError: torchrun started them there.
    """
    count = this_machine().count
    if (num_replicas or 1) > 1 and count > 1:
        raise UserError(
            f"--num-replicas {num_replicas} came with a server on {count} machines. One machine "
            "was expected, because its replicas talk over a socket of the machine: start a server "
            "on each one, and share requests out in front."
        )


@contextlib.contextmanager
def gathered(decoding: Decoding) -> Iterator[Decoding]:
    """The engines of all replicas as one, for the process that serves.

    Args:
        decoding: of the first replica.
    """
    if decoding.num_replicas == 1:
        yield decoding
        return
    with meeting_place() as place:
        _share(place.path, decoding)
        decoding.engine.prepare()
        links = place.wait_for(decoding.num_replicas - 1, SECONDS_TO_MEET)
    remotes = [_remote(link, number, decoding) for number, link in sorted(links.items())]
    yield replace(decoding, engine=ReplicaRouter([decoding.engine, *remotes]))


def work_for_the_server(decoding: Decoding) -> None:
    """What the first process of another replica does, until the server says stop.

    Raises:
        ConnectionError: the process that serves is gone.
    """
    path = _share("", decoding)
    decoding.engine.prepare()
    host_engine(decoding.engine, join_meeting(path, decoding.replica))


def _remote(link: Link, number: int, decoding: Decoding) -> RemoteEngine:
    rank = number * (int(os.environ["WORLD_SIZE"]) // decoding.num_replicas)
    engine = decoding.engine
    own = stats_of(plain_stats(engine.stats()))  # all have the same limits
    idle = EngineStats(
        **{**vars(own), "queued": 0, "running": 0, "prompt_tokens": 0, "completion_tokens": 0}
    )
    name = f"replica {number} (rank {rank})"
    return RemoteEngine(link, name=name, max_length=engine.max_length, stats=idle)


def _share(path: str, decoding: Decoding) -> str:
    """The first replica tells the others where to meet."""
    block = torch.zeros(PATH_BYTES, dtype=torch.uint8)
    content = os.fsencode(path)
    block[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    dist.broadcast(block, group=decoding.first_ranks, group_src=0)
    return os.fsdecode(bytes(block.tolist()).rstrip(b"\0"))
