"""Slow transfers on gloo, in the order of a device: streams that do one after the other."""

import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(eq=False)
class LateWork:
    """A transfer that a stream will come to."""

    begin: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.done.is_set()


@contextmanager
def late_transfers(
    delay: Callable[[], float], *, stream_of: Callable[[bool, int, Any], Hashable]
) -> Iterator[None]:
    """Sends and receives of this process, inside, take `delay()` seconds more, and no core.

    A transfer begins when both ranks have posted it and both streams are through with all before.

    Args:
        stream_of: (is a send, peer, group) -> the stream; the same on both ranks of a transfer.
    """
    streams: dict[Hashable, queue.SimpleQueue] = {}
    real = dist.isend, dist.irecv

    def work_off(tasks: queue.SimpleQueue) -> None:
        while (work := tasks.get()) is not None:
            try:
                work.begin().wait()
                time.sleep(delay())
            except BaseException as error:  # noqa: BLE001 - the rank that waits raises it
                work.error = error
            work.done.set()

    def late(is_send: bool) -> Callable[..., LateWork]:
        def post(
            tensor: Any, peer: int | None = None, group: Any = None, **others: int
        ) -> LateWork:
            peer = others.popitem()[1] if peer is None else peer  # given by its place in the group
            stream = stream_of(is_send, peer, group)
            if stream not in streams:
                streams[stream] = queue.SimpleQueue()
                threading.Thread(target=work_off, args=(streams[stream],), daemon=True).start()
            work = LateWork(lambda: real[not is_send](tensor, peer, group=group))
            streams[stream].put(work)
            return work

        return post

    places = (dist, distributed_c10d)  # a P2POp compares with the second
    is_late = late(True), late(False)
    for place in places:
        place.isend, place.irecv = is_late
    try:
        yield
    finally:
        for place in places:
            place.isend, place.irecv = real
        for tasks in streams.values():
            tasks.put(None)
