"""A corpus is the same bytes however many build it and however often they are killed."""

import contextlib
import functools
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from stageline.corpus.build import build_corpus
from stageline.corpus.corpus_files import Corpus
from stageline.corpus.pool import WorkerDied
from stageline.corpus.writer import GrowingFile
from stageline.errors import DataError, UserError
from tests.helpers import faults
from tests.helpers.byte_cutter import REFUSED, ByteCutter
from tests.helpers.peak_memory import peak_rise

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".bin", ".idx", ".dis", ".tmp", ".bad.jsonl")
# one line in 20 is empty, one in 50 is not UTF-8
LINES = [
    b"" if i % 20 == 7 else b"\xff" if i % 50 == 3 else f"document {i} \u4e2d ".encode() * (i % 13)
    for i in range(2_000)
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "a.txt").write_bytes(b"\n".join(LINES))
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"\n".join(LINES)))
    rows = [json.dumps({"text": f"row {i}\n" * (i % 9)}) for i in range(900)]
    (folder / "c.jsonl").write_text("\n".join(rows))
    return folder


def build(files, prefix, *, seq_length=32, fingerprint="f", **kwargs):
    given = {"num_workers": 0, "progress": False, "chunk_bytes": 8000, "seconds_a_journal": 9e9}
    return build_corpus(
        files,
        path_prefix=prefix,
        make_cutter=functools.partial(ByteCutter, seq_length, fingerprint),
        **given | kwargs,
    )


def in_child(fault, files, prefix, **kwargs):
    """Build in a forked process with a fault and a journal per chunk; return how it ended."""

    def run():
        os.environ[faults.VARIABLE] = fault
        faults.arm()
        build(files, prefix, **{"seconds_a_journal": 0.0} | kwargs)

    child = get_context("fork").Process(target=run)
    child.start()
    child.join(60)
    assert child.exitcode is not None, "it hangs"
    return child.exitcode


def files_of(prefix):
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES}


def names(prefix):
    return sorted(path.name for path in Path(prefix).parent.iterdir())


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """Return (prefix, report) of a build without faults."""
    prefix = tmp_path_factory.mktemp("whole") / "corpus"
    return prefix, build(inputs, prefix)


def test_documents_come_back_and_bad_lines_are_counted(inputs, whole):
    prefix, report = whole
    texts, bad = [], []
    for name in ("a.txt", "b.txt.gz"):
        for number, line in enumerate(LINES, start=1):
            try:
                text = line.decode()
            except UnicodeDecodeError:
                bad.append((f"{inputs}/{name}", number))
                continue
            texts += [text] if text else []
            bad += [] if text else [(f"{inputs}/{name}", number)]
    texts += [f"row {i}\n" * (i % 9) for i in range(900) if i % 9]
    bad += [(f"{inputs}/c.jsonl", i + 1) for i in range(900) if i % 9 == 0]
    corpus = Corpus(prefix)
    found = [bytes(corpus.document_tokens(*of).tolist()).decode() for of in corpus.documents()]
    assert found == texts
    listed = [json.loads(line) for line in Path(f"{prefix}.bad.jsonl").open()]
    assert [(row["file"], row["line"]) for row in listed] == bad
    assert listed[0]["reason"] == "the document is empty"
    assert report.progress.bad_kinds.total() == len(bad) == sum(report.progress.bad_kinds.values())
    assert report.progress.bad_kinds["invalid UTF-8"] == 80
    assert report.progress.counts["num_documents"] == len(texts) == corpus.header.num_documents
    assert names(prefix) == sorted(f"corpus{suffix}" for suffix in SUFFIXES)


def test_the_bytes_do_not_depend_on_the_workers(inputs, whole, tmp_path):
    build(inputs, tmp_path / "corpus", num_workers=2)
    assert files_of(tmp_path / "corpus") == files_of(whole[0])


def test_parquet_in_several_processes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i} " * (i % 40) for i in range(3000)]
    table = pyarrow.table({"text": texts, "other": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    (tmp_path / "a.txt").write_text("\n".join(texts))
    for name, number in (("txt", 0), ("parquet", 2)):
        build(tmp_path / f"a.{name}", tmp_path / name, num_workers=number, chunk_bytes=1 << 16)
    found = [Path(tmp_path / f"{name}.bin").read_bytes() for name in ("txt", "parquet")]
    assert found[0] == found[1] and len(found[0]) > 100_000


def test_killed_again_and_again_the_bytes_are_the_same(inputs, whole, tmp_path):
    prefix, starts = tmp_path / "corpus", 0
    while in_child("at=corpus_chunk,do=sigkill,count=12", inputs, prefix, num_workers=2):
        starts += 1
        assert starts < 30 and not Path(f"{prefix}.idx").exists()
    assert starts > 2
    assert files_of(prefix) == files_of(whole[0])
    assert names(prefix) == names(whole[0])


@pytest.mark.parametrize("place", ["corpus_close", "corpus_closed"])
def test_killed_while_the_files_get_their_names(place, inputs, whole, tmp_path):
    prefix = tmp_path / "corpus"
    assert in_child(f"at={place},do=sigkill", inputs, prefix) == -signal.SIGKILL
    report = build(inputs, prefix)
    assert report.num_bytes_before == report.progress.num_bytes
    assert files_of(prefix) == files_of(whole[0])
    assert names(prefix) == names(whole[0])


def test_what_came_after_the_journal_is_forgotten(inputs, whole, tmp_path):
    prefix = tmp_path / "corpus"
    # the journal is written by the clock; here as good as never but at the first kill
    for kwargs in ({"seconds_a_journal": 0.0}, {"seconds_a_journal": 9e9}):
        in_child("at=corpus_chunk,do=sigkill,count=9", inputs, prefix, **kwargs)
    report = build(inputs, prefix)
    assert 0 < report.num_bytes_before < report.progress.num_bytes
    assert files_of(prefix) == files_of(whole[0])


def test_killed_from_outside_with_its_workers(inputs, whole, tmp_path):
    prefix = tmp_path / "corpus"
    code = (
        "import functools\n"
        "from stageline.corpus.build import build_corpus\n"
        "from tests.helpers.byte_cutter import ByteCutter\n"
        f"build_corpus({str(inputs)!r}, path_prefix={str(prefix)!r}, num_workers=2,\n"
        "    make_cutter=functools.partial(ByteCutter, 32, 'f'), chunk_bytes=8000,\n"
        "    seconds_a_journal=0.0, progress=False)\n"
    )
    environment = {**os.environ, **faults.environment("at=corpus_chunk,do=sleep,value=60,count=10")}
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment)
    journal = Path(f"{prefix}.journal")
    until(lambda: journal.exists() and json.loads(journal.read_text())["progress"]["part"] >= 9)
    workers = children(run.pid)
    assert len(workers) == 2
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    until(lambda: not any(map(is_alive, workers)))
    assert build(inputs, prefix, num_workers=1).num_bytes_before > 0
    assert files_of(prefix) == files_of(whole[0])


def children(pid):
    return [int(name) for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(is_true):
    for _ in range(3000):
        if is_true():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come")


def test_a_killed_worker_is_told_and_the_build_goes_on(inputs, whole, tmp_path):
    prefix = tmp_path / "corpus"
    with faults.armed("at=corpus_worker,do=sigkill,count=9"):
        with pytest.raises(WorkerDied, match="run the same command again") as caught:
            build(inputs, prefix, num_workers=2)
    assert caught.value.exit_code == 9
    assert build(inputs, prefix).num_bytes_before > 0
    assert files_of(prefix) == files_of(whole[0])


def test_ctrl_c_keeps_what_is_built(inputs, whole, tmp_path):
    prefix = tmp_path / "corpus"
    # a process started in the background of a shell ignores the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), faults.armed("at=corpus_chunk,do=sigint,count=12"):
            # no journal by the clock: it is written because of the interruption
            build(inputs, prefix, num_workers=2, seconds_a_journal=9e9)
    finally:
        signal.signal(signal.SIGINT, before)
    assert build(inputs, prefix).num_bytes_before > 0
    assert files_of(prefix) == files_of(whole[0])


CHANGES = {
    "rules.seq_length: was 32, is 16": {"seq_length": 16},
    "tokenizer.fingerprint: was 'f', is 'g'": {"fingerprint": "g"},
    "document: was 'default', is 'other'": {"document_name": "other"},
    "language: was 'auto', is 'chinese'": {"language": "chinese"},
    "max_document_bytes: was 33554432, is 9": {"max_document_bytes": 9},
}


def test_another_command_does_not_go_on(inputs, tmp_path):
    left = tmp_path / "corpus"
    in_child("at=corpus_chunk,do=sigkill,count=7", inputs, left)
    for words, kwargs in CHANGES.items():
        with pytest.raises(UserError) as caught:
            build(inputs, left, **kwargs)
        lines = str(caught.value).splitlines()
        assert lines[1:-1] == [f"  {words}"] and "--overwrite" in lines[-1]
    with pytest.raises(UserError, match=r"input.*a\.txt: was .* is None"):
        build([inputs / "b.txt.gz", inputs / "c.jsonl"], left)
    with pytest.raises(UserError, match="come in another order"):
        build([inputs / name for name in ("b.txt.gz", "a.txt", "c.jsonl")], left)
    path = inputs / "a.txt"
    before, times = path.read_bytes(), path.stat()
    path.write_bytes(before.replace(b"document 1999", b"DOCUMENT 1999"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    try:
        # neither size nor time tell
        with pytest.raises(UserError, match=r"input.*a\.txt\.edges: was"):
            build(inputs, left)
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_overwrite_goes_on_or_begins_anew(inputs, whole, tmp_path):
    prefix = tmp_path / "corpus"
    build(inputs, prefix, seq_length=16)
    old = files_of(prefix)
    with pytest.raises(UserError, match="corpus is finished.*--overwrite"):
        build(inputs, prefix)
    # the old corpus is whole until the new one is
    in_child("at=corpus_chunk,do=sigkill,count=7", inputs, prefix, overwrite=True)
    assert files_of(prefix)[".bin"] == old[".bin"] and len(Corpus(prefix)) > 0
    assert build(inputs, prefix, overwrite=True).num_bytes_before > 0
    assert files_of(prefix) == files_of(whole[0])
    in_child("at=corpus_chunk,do=sigkill,count=7", inputs, prefix, overwrite=True)
    report = build(inputs, prefix, overwrite=True, seq_length=16)
    assert report.num_bytes_before == 0 and files_of(prefix) == old


def test_strict_names_file_and_line_and_leaves_no_corpus(inputs, tmp_path):
    for number in (0, 2):
        with pytest.raises(DataError, match=r"a\.txt:1: the document is empty") as caught:
            build(inputs, tmp_path / "corpus", strict=True, num_workers=number)
        assert caught.value.exit_code == 3
        assert not (tmp_path / "corpus.idx").exists()
    in_child("at=corpus_chunk,do=sigkill,count=7", inputs, tmp_path / "other")
    with pytest.raises(DataError, match="unfinished build skipped"):
        build(inputs, tmp_path / "other", strict=True)
    (tmp_path / "a.txt").write_text("one\ntwo\r\n")
    report = build(tmp_path / "a.txt", tmp_path / "good", strict=True)
    assert report.progress.bad_kinds.total() == 0 and report.bad_path is None
    assert not (tmp_path / "good.bad.jsonl").exists()


def test_a_long_line_is_counted_and_takes_no_memory(tmp_path):
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.write(b"first\n" + b"x" * 50_000_000 + b"\nlast\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    kwargs = {"chunk_bytes": 1 << 20, "max_document_bytes": 4 << 20}
    files = [path, tmp_path / "b.txt.gz"]
    assert peak_rise(lambda: build(files, tmp_path / "corpus", **kwargs)) < 40
    report = build(files, tmp_path / "corpus", overwrite=True, **kwargs)
    assert (
        report.progress.bad_kinds == {"too long": 2}
        and report.progress.counts["num_documents"] == 4
    )
    with pytest.raises(DataError, match=r"a\.txt:2: the line is longer than 4194304 bytes"):
        build(files, tmp_path / "corpus", overwrite=True, strict=True, **kwargs)


def test_memory_does_not_grow_with_the_input(tmp_path):
    line = b"some text that is not long\n"
    rises = []
    for megabytes in (2, 14):
        (tmp_path / "a.txt").write_bytes(line * (megabytes * 1_000_000 // len(line)))
        kwargs = {"chunk_bytes": 1 << 18, "overwrite": True}
        rises.append(peak_rise(lambda: build(tmp_path / "a.txt", tmp_path / "c", **kwargs)))  # noqa: B023
    assert rises[1] < rises[0] + 9


def test_a_text_that_the_cutter_refuses_is_a_bad_line(tmp_path):
    (tmp_path / "a.txt").write_text(f"one\n\n{REFUSED}\ntwo\n")
    report = build(tmp_path / "a.txt", tmp_path / "corpus")
    assert report.progress.counts["num_documents"] == 2
    listed = [json.loads(line) for line in (tmp_path / "corpus.bad.jsonl").open()]
    assert [(row["line"], row["start"]) for row in listed] == [(2, ""), (3, REFUSED)]


def test_nothing_good_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"txt": "a"}\n' * 1500)
    with pytest.raises(DataError, match="(?s)1,500 lines are bad.*a.jsonl:1: no field 'text'"):
        build(tmp_path / "a.jsonl", tmp_path / "corpus", chunk_bytes=1 << 20)
    (tmp_path / "b.txt").write_text("\n\n")
    with pytest.raises(DataError, match="1 files have no document"):
        build(tmp_path / "b.txt", tmp_path / "corpus")
    assert [name for name in names(tmp_path / "corpus") if name.startswith("corpus")] == [
        "corpus.bad.jsonl"
    ]


def test_one_build_of_a_prefix_at_a_time(inputs, tmp_path):
    with contextlib.closing(GrowingFile(tmp_path / "corpus.bin.part")):
        # a lock is of a process
        assert in_child("at=none,do=raise", inputs, tmp_path / "corpus") == 1
    assert in_child("at=none,do=raise", inputs, tmp_path / "corpus") == 0
