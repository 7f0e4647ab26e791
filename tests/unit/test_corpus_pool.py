"""Worker processes of a corpus build: their end is the end of what waits for them."""

import os
import struct
import time

from stageline.corpus.pool import Processes, Task
from tests.helpers.byte_cutter import ByteCutter


def test_a_result_that_was_cut_off_is_not_waited_for():
    task = Task((), ByteCutter, document=str, max_document_bytes=1 << 20)
    pool = Processes(task, num_workers=1)
    try:
        future = pool._executor.submit(time.sleep, 60)
        waiting = pool._executor._executor_manager_thread
        os.write(pool._results._writer.fileno(), struct.pack("!i", 100) + b"half")
    finally:
        pool.close()
    assert not waiting.is_alive() and future.done()


def test_nothing_of_a_closed_pool_is_left_for_the_end_of_the_interpreter():
    """Chunks wait in a pipe that is full, results were not taken."""
    task = Task((), ByteCutter, document=str, max_document_bytes=1 << 20)
    pool = Processes(task, num_workers=2)
    futures = [pool._executor.submit(len, b"x" * 300_000) for _ in range(8)]
    futures += [pool._executor.submit(time.sleep, 60) for _ in range(2)]
    futures += [pool._executor.submit(len, b"x" * 300_000) for _ in range(8)]
    workers = [*pool._executor._processes.values()]
    waiting = pool._executor._executor_manager_thread
    pool.close()
    assert not waiting.is_alive() and all(future.done() for future in futures)
    assert not any(worker.is_alive() for worker in workers)
