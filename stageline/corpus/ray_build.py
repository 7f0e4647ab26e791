"""Cuts chunks on the machines of a Ray cluster; the parent writes, as with processes.

Plain files are read where they are cut, so they have to lie on a disk that all machines share.
Compressed files and Parquet are read by the parent and sent.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any

from stageline.corpus.chunks import Chunk
from stageline.corpus.pool import ONE_THREAD, WorkerDied
from stageline.corpus.worker import ChunkResult, CutterFacts, Task, Worker
from stageline.errors import UserError


class RayActors:
    """Workers on a Ray cluster: the one that RAY_ADDRESS names, or one of this machine alone.

    Raises:
        UserError: ray is not installed, or a worker cannot make its cutter.
        WorkerDied: one ended; Ray is not asked to start it anew.
    """

    def __init__(self, task: Task, num_workers: int) -> None:
        self.num_workers = num_workers
        self._ray = _import_ray()
        # one that a program around this one started stays when the build is over
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": num_workers}
            self._ray.init(
                log_to_driver=False,
                configure_logging=False,
                include_dashboard=False,
                runtime_env={"env_vars": {**ONE_THREAD, "PYTHONPATH": _python_path()}},
                **local,
            )
        actor = self._ray.remote(num_cpus=1, max_restarts=0)(_Actor)
        self._actors = [actor.remote(task) for _ in range(num_workers)]
        self._next = itertools.cycle(self._actors)

    def facts(self) -> CutterFacts:
        """Tokenizer and rules, the same of all workers.

        Raises:
            UserError: the workers see different tokenizers.
        """
        facts = [self._get(actor.facts.remote()) for actor in self._actors]
        if any(other != facts[0] for other in facts):
            raise UserError(
                "the workers of the Ray cluster have different tokenizers under one path. The "
                "same was expected, because one corpus has one: copy the folder to all machines, "
                "or to a disk that they share."
            )
        return facts[0]

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """Hands a chunk to the next worker in turn."""
        reference = next(self._next).cut.remote(chunk)
        return lambda: self._get(reference)

    def close(self) -> None:
        """Ends the workers, and the cluster where it is of this build alone."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_ours:
            self._ray.shutdown()

    def _get(self, reference: Any) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return self._ray.get(reference)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise WorkerDied(
                f"a worker of the Ray cluster ended before its chunk was cut ({error}). Workers "
                "were expected to live as long as the build. What was built is kept: run the same "
                "command again to go on, with fewer --num-workers where memory is short."
            ) from error


class _Actor:
    """A `Worker` behind Ray."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._worker: Worker | None = None

    def _made(self) -> Worker:
        if self._worker is None:  # here, not at the start: so its errors come back as they are
            self._worker = Worker(self._task)
        return self._worker

    def facts(self) -> CutterFacts:
        return self._made().facts()

    def cut(self, chunk: Chunk) -> ChunkResult:
        return self._made()(chunk)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "--executor ray was asked for and the package ray is not installed: pip install "
            "ray, or build with --executor processes."
        ) from error
    return ray


def _python_path() -> str:
    """Where this program imports from: workers need the same, also parts beside it."""
    import sys

    return os.pathsep.join(path or os.getcwd() for path in sys.path)
