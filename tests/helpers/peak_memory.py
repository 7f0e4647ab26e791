"""The peak memory of a piece of work, measured in a process of its own."""

import os
import resource
from collections.abc import Callable


def peak_rise(work: Callable[[], object]) -> int:
    """MiB that the work adds to the peak memory of a forked child.

    Raises:
        ValueError: the work failed.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            work()
            rise = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os.write(writing, str(rise // 1024).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return int(said)
