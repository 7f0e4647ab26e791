"""Worker processes of a corpus build: when they end, so does all that waits for them."""

import multiprocessing
import threading
import time

import pytest

from stageline.corpus.pool import Task, open_pool
from tests.helpers.byte_cutter import ByteCutter


class SlowCutter(ByteCutter):
    """Sleeps over the texts of a chunk."""

    def __call__(self, texts):
        time.sleep(60 * bool(texts))
        return super().__call__(texts)


def test_nothing_is_left_of_a_closed_pool_whose_results_nobody_took(tmp_path):
    """Chunks wait in a pipe that is full, and the workers are at work."""
    path = tmp_path / "a.txt"
    path.write_text("a document\n")
    from stageline.corpus.input import find_sources

    task = Task(find_sources(path), SlowCutter, document=str, max_document_bytes=1 << 20)
    (chunk,) = task.chunks()
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), open_pool(task, 2) as pool:
        waiting = [pool.submit(chunk) for _ in range(8)]
        raise KeyboardInterrupt
    assert threading.active_count() == before and not multiprocessing.active_children()
    assert all(result.__self__.done() for result in waiting)
