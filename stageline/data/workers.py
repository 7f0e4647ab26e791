"""Data workers end with the rank they load for, however that one ends."""

import copy
import ctypes
import os
import signal
import sys
from multiprocessing.reduction import ForkingPickler

from torch.utils.data import get_worker_info

_PR_SET_PDEATHSIG = 1


def end_with_rank(worker: int) -> None:
    """Lets the kernel kill this worker when its rank is gone. Linux only; called in the worker.

    It was forked, so it holds the rank's connections open: until it ends, the other ranks do not
    learn of a killed one. By itself it looks for its rank every five seconds.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:  # gone before it was asked for
        os._exit(1)


def portable(error: Exception) -> Exception:
    """The error, or one with its words where it would not come out of a worker as it went in."""
    if get_worker_info() is None:
        return error
    try:
        # tried here: what the queue cannot send it drops, and the rank would wait for ever
        ForkingPickler.dumps(error)
        if str(copy.copy(error)) == str(error):  # it is made again as the other side will
            return error
    except Exception:  # what a class of anybody does when it is made again
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
