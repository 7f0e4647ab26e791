"""The thread in which gradients are added up and the optimizer runs, in the order of asking."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Worker:
    """Runs jobs one after the other. After one that failed none runs."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._error: BaseException | None = None
        self._last: Future | None = None

    def submit(self, job: Callable[[], Any]) -> Future:
        """Runs a job after those before it.

        Returns:
            A future whose `result()` raises what the job, or one before it, raised.

        Raises:
            Exception: what an earlier job raised, with its traceback.
        """
        self.check()
        self._last = self._executor.submit(self._run, job)
        return self._last

    def wait(self) -> None:
        """Returns when all jobs are done.

        Raises:
            Exception: what a job raised.
        """
        self.wait_for(self._last)

    def wait_for(self, job: Future | None) -> None:
        """Returns when this job and those before it are done.

        Raises:
            Exception: what a job raised.
        """
        if job is not None:
            job.exception()
        self.check()

    def check(self) -> None:
        """Raises what a job raised."""
        if self._error is not None:
            raise self._error

    def _run(self, job: Callable[[], Any]) -> Any:
        if self._error is not None:
            raise self._error
        try:
            return job()
        except BaseException as error:
            self._error = error
            raise
