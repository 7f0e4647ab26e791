"""A corpus that is built on Ray has the bytes of one that processes built."""

import functools
import gzip
import os
import signal
from pathlib import Path

import pytest

from stageline.corpus.build import build_corpus
from stageline.corpus.pool import WorkerDied
from stageline.errors import DataError, UserError
from tests.helpers.byte_cutter import ByteCutter


class DyingCutter(ByteCutter):
    """Kills its process with the fourth chunk that it gets."""

    num_left = 4

    def __call__(self, texts):
        self.num_left -= 1
        if not self.num_left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(texts)


def build(files, prefix, *, cutter=ByteCutter, **kwargs):
    return build_corpus(
        files,
        path_prefix=prefix,
        make_cutter=functools.partial(cutter, 32),
        progress=False,
        chunk_bytes=2000,
        **kwargs,
    )


def files_of(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".bad.jsonl")]


def test_the_same_bytes_and_errors_as_from_processes(tmp_path):
    pytest.importorskip("ray")
    lines = "".join(f"{'' if i % 9 == 3 else f'document {i} ' * (i % 5)}\n" for i in range(500))
    (tmp_path / "a.txt").write_text(lines)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(lines.encode()))
    build([tmp_path / "a.txt", tmp_path / "b.txt.gz"], tmp_path / "one", num_workers=0)
    files = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    build(files, tmp_path / "ray", num_workers=2, executor="ray")
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "one")
    with pytest.raises(WorkerDied, match="run the same command again"):
        build(files, tmp_path / "died", cutter=DyingCutter, num_workers=2, executor="ray")
    assert build(files, tmp_path / "died", num_workers=1).num_bytes_before > 0
    assert files_of(tmp_path / "died") == files_of(tmp_path / "one")
    with pytest.raises(DataError, match=r"a\.txt:1: the document is empty"):
        build(files, tmp_path / "strict", num_workers=1, executor="ray", strict=True)


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(UserError, match="pip install ray"):
        build(tmp_path / "a.txt", tmp_path / "c", executor="ray")
