"""Bad rows in whole runs of two ranks (cases G): both refuse, or leave out, the same rows."""

import json

from tests.helpers.small_run import Job


def _spoil(job, lines):
    """Writes bad lines over good ones: no JSON, no question, too long."""
    rows = job.rows.read_text().splitlines()
    for line, kind in lines.items():
        rows[line - 1] = {
            "no JSON": '{"question": ',
            "no question": '{"id": "n", "answer": "a"}',
            "long": json.dumps({"id": "l", "question": "7 " * 99, "answer": "a"}),
        }[kind]
    job.rows.write_text("\n".join(rows) + "\n")


def test_g01_a_bad_line_ends_the_run(tmp_path):
    """A bad line in a run of two ranks: exit code 3, the line named once, nothing saved."""
    job = Job(tmp_path)
    _spoil(job, {17: "no JSON"})
    done = job.fork("run", "--total-steps", 2)
    assert done.code == 3, done.err
    assert done.err.count(f"{job.rows}:17") == 1 and "Traceback" not in done.err
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert done.seconds < 30


def test_g01_bad_rows_are_left_out_and_listed(tmp_path):
    """Bad rows within --skip-bad-rows: listed, and the run is that without them, bit for bit."""
    job = Job(tmp_path, num_rows=48)
    options = ("--total-steps", 5, "--dataset.test_size", 0)
    _spoil(job, {5: "no JSON", 20: "no question", 33: "long"})
    done = job.fork("run", *options, "--skip-bad-rows", 3)
    assert done.code == 0, done.err
    assert "3 bad rows are left out" in done.out and "leaves out 5 of 45 rows" in done.out
    listed = [json.loads(line) for line in (tmp_path / "run/bad_rows.jsonl").open()]
    assert [item["source"] for item in listed] == [f"{job.rows}:{n}" for n in (5, 20, 33)]
    for item, reason in zip(listed, ("no JSON", "needs text", "--max-token-num 64"), strict=True):
        assert reason in item["reason"] and item["reason"] in done.out
    rows = job.rows.read_text().splitlines()
    job.rows.write_text(
        "".join(f"{row}\n" for n, row in enumerate(rows, 1) if n not in (5, 20, 33))
    )
    assert job.fork("clean", *options).code == 0
    assert not (tmp_path / "clean/bad_rows.jsonl").exists()
    assert job.losses("run") == job.losses("clean") and len(job.losses("run")) == 5
