"""Faults on demand in processes that tests start: wraps functions by name, from outside.

TEST_FAULTS="at=forward,rank=1,step=3,do=sigkill" lets rank 1 kill itself when it begins a forward
pass with 3 optimizer steps done. Keys: `at` (a point's name), `do` (see ACTIONS), and optionally
`rank`, `step`, `count` (the how-manieth time that all else fits; default 1), `value` (of `exit`,
`sleep` and `limit_files`). Several faults are divided by ";".

Points are the operations that `stageline.progress.doing` notes (forward, backward, data, log, save,
evaluation, decoding, rewards ...), and those of WRAPS below. Production code knows nothing of them.
A new Python arms itself by faulty_start/sitecustomize.py, which `environment` puts on its path.
"""

import contextlib
import errno
import functools
import importlib.abc
import importlib.machinery
import os
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

VARIABLE = "TEST_FAULTS"
HERE = pathlib.Path(__file__).resolve().parent
START = HERE / "faulty_start"


class InjectedError(RuntimeError):
    """The error of the action `raise`."""


def _raise(value: int) -> None:
    raise InjectedError("a fault was asked for")


def _raise_no_space(value: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _raise_no_memory(value: int) -> None:
    import torch

    raise torch.OutOfMemoryError("out of memory (a fault was asked for)")


def _limit_files(value: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (value, value))


def _hang(value: int) -> None:
    time.sleep(3600)


def _hold_gil(value: int) -> None:
    import ctypes

    mutex = ctypes.create_string_buffer(128)  # zeros mean that it is free
    for _ in range(2):  # the second time waits for ever, in C
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


ACTIONS: dict[str, Callable[[int], None]] = {
    "raise": _raise,
    "enospc": _raise_no_space,
    "oom": _raise_no_memory,
    "exit": lambda value: os._exit(value),
    "sys_exit": lambda value: (_ for _ in ()).throw(SystemExit(value)),
    "sigkill": lambda value: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda value: os.kill(os.getpid(), signal.SIGSEGV),
    "sigstop": lambda value: os.kill(os.getpid(), signal.SIGSTOP),
    "sigterm": lambda value: os.kill(os.getpid(), signal.SIGTERM),
    "sigusr1": lambda value: os.kill(os.getpid(), signal.SIGUSR1),
    "sigint": lambda value: os.kill(os.getpid(), signal.SIGINT),
    "hang": _hang,
    "hold_gil": _hold_gil,
    "sleep": time.sleep,
    "limit_files": _limit_files,
}


@dataclass
class _Fault:
    at: str
    do: str
    rank: int | None = None
    step: int | None = None
    count: int = 1
    value: int = 137

    def fits(self, name: str) -> bool:
        return (
            self.at == name
            and (self.rank is None or self.rank == int(os.environ.get("RANK", "0")))
            and (self.step is None or self.step == sys.modules["stageline.progress"].place().step)
        )


def _read(text: str) -> list[_Fault]:
    faults = []
    for part in filter(None, text.split(";")):
        given = dict(item.split("=", 1) for item in part.split(","))
        names: dict[str, Any] = {k: v if k in ("at", "do") else int(v) for k, v in given.items()}
        faults.append(_Fault(**names))
    return faults


_faults: list[_Fault] = []


def point(name: str) -> bool:
    """A place where a fault may be asked for.

    Returns:
        Whether the fault `value` was asked for here: one that the caller makes, a nan for example.
    """
    for fault in _faults:
        if fault.fits(name):
            fault.count -= 1
            if fault.count == 0:
                if fault.do not in ACTIONS:
                    return fault.do == "value"
                ACTIONS[fault.do](fault.value)
    return False


# -- what is wrapped -------------------------------------------------------------------------------

_undo: list[Callable[[], None]] = []


def _replace(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Puts `make(original)` in the place of a function, also where it was imported by name."""
    original = getattr(owner, name)
    wrapped = functools.wraps(original)(make(original))
    places = [owner]
    if isinstance(owner, ModuleType):
        known = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        places += [module for module in known if vars(module).get(name) is original]
    for place in places:
        setattr(place, name, wrapped)
        _undo.append(functools.partial(setattr, place, name, original))


def _before(owner: Any, name: str, at: str) -> None:
    def make(original: Callable) -> Callable:
        return lambda *args, **kwargs: (point(at), original(*args, **kwargs))[1]

    _replace(owner, name, make)


def _after(owner: Any, name: str, at: str) -> None:
    def make(original: Callable) -> Callable:
        return lambda *args, **kwargs: (original(*args, **kwargs), point(at))[0]

    _replace(owner, name, make)


def _wrap_progress(module: ModuleType) -> None:
    def make(original: Callable) -> Callable:
        @contextlib.contextmanager
        def doing(operation: str, **given: Any) -> Iterator[None]:
            with original(operation, **given):
                # a loss has its own point; what decoding does on a stage is a part of decoding
                is_part = operation == "decoding" and given.get("stage") is not None
                if not (given.get("is_waiting") or is_part or operation == "loss"):
                    point(operation)
                yield

        return doing

    _replace(module, "doing", make)


def _wrap_step(module: ModuleType) -> None:
    _after(module, "begin_step", "step")

    def make(original: Callable) -> Callable:
        def passes(self: Any, *args: Any, **kwargs: Any) -> Any:
            loss = original(self, *args, **kwargs)
            gradients = [p.grad for p in self.weights.parameters.values() if p.grad is not None]
            if gradients and point("gradient"):  # in what this rank has first
                gradients[0].view(-1)[0] = float("inf")
            if gradients and point("zero_gradient"):
                for gradient in gradients:
                    gradient.zero_()
            return loss

        return passes

    _replace(module.TrainStep, "run_passes", make)


def _wrap_loss(module: ModuleType) -> None:
    def make(original: Callable) -> Callable:
        def call(self: Any, output: Any, batch: Any) -> Any:
            part = self.part

            def faulty(*args: Any, **kwargs: Any) -> Any:
                is_nan = point("loss")
                loss, figures = part(*args, **kwargs)
                loss = loss * float("nan") if is_nan else loss
                return loss * 100 if point("spike") else loss, figures

            self.part = faulty
            try:
                return original(self, output, batch)
            finally:
                self.part = part

        return call

    _replace(module.StepLoss, "__call__", make)


def _wrap_files(module: ModuleType) -> None:
    """`file` is each operation on files that stageline/checkpoint asks for."""

    def make(original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").startswith("stageline.checkpoint."):
                point("file")
            return original(*args, **kwargs)

        return call

    _before(module, "fsync_path", "file")
    for owner, names in (
        (pathlib.Path, ("write_text", "mkdir", "unlink", "rename")),
        (os, ("rename",)),
        (shutil, ("copyfile",)),
    ):
        for name in names:
            _replace(owner, name, make)


def _wrap_chunks(module: ModuleType) -> None:
    def make(original: Callable) -> Callable:
        def refuse(self: Any, *least: int) -> None:
            original(self, *least)
            if not least:  # a chunk is written, and the journal does not know yet
                point("corpus_chunk")

        return refuse

    _replace(module.BuildRun, "_refuse_hopeless", make)


def _wrap_corpus(module: ModuleType) -> None:
    _before(module.CorpusWriter, "close", "corpus_close")
    _after(module.CorpusWriter, "close", "corpus_closed")


WRAPS: dict[str, Callable[[ModuleType], None]] = {
    "stageline.progress": _wrap_progress,
    "stageline.distributed.process_group": lambda of: _before(of, "distributed_context", "start"),
    "stageline.data.batches.loader": lambda of: _before(of, "_as_it_is", "loader"),
    "stageline.training.step": _wrap_step,
    "stageline.training.loss_part": _wrap_loss,
    "stageline.checkpoint.layout": _wrap_files,
    "stageline.checkpoint.files": lambda of: _before(of, "write_tensors", "file"),
    "stageline.checkpoint.writer": lambda of: (
        _before(of, "keep_last", "retention"),
        _before(of.CheckpointWriter, "_write", "write"),
    ),
    "stageline.corpus.build": _wrap_chunks,
    "stageline.corpus.writer": _wrap_corpus,
    "stageline.corpus.pool": lambda of: _before(of.ChunkWorker, "cut", "corpus_worker"),
}


class _WrapWhenImported(importlib.abc.MetaPathFinder):
    """Wraps the functions of a module as soon as it is imported, before anyone takes them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in WRAPS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), WRAPS[name](module))
        return spec


# -- for tests -------------------------------------------------------------------------------------


def arm() -> None:
    """Reads the environment, and wraps what is not wrapped yet. A process has one set of faults."""
    _faults[:] = _read(os.environ.get(VARIABLE, ""))
    if not _faults or _undo:
        return
    for name, wrap in WRAPS.items():
        if name in sys.modules:
            wrap(sys.modules[name])
    finder = _WrapWhenImported()
    sys.meta_path.insert(0, finder)
    _undo.append(lambda: sys.meta_path.remove(finder))


@contextlib.contextmanager
def armed(faults: str) -> Iterator[None]:
    """Asks for faults in this process and those that it starts; then all is as it was."""
    before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    os.environ.update(environment(faults))
    arm()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        _faults.clear()
        while _undo:
            _undo.pop()()


def environment(faults: str) -> dict[str, str]:
    """Return the environment variables that a new Python needs for these faults."""
    if not faults:
        return {VARIABLE: ""}
    path = os.environ.get("PYTHONPATH")
    return {VARIABLE: faults, "PYTHONPATH": f"{START}{os.pathsep}{path}" if path else str(START)}
