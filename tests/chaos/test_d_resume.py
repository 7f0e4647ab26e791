"""A run that resumes by itself where checkpoints are damaged."""

import shutil

import pytest

from commands import train as train_pp  # noqa: F401  now: what a test registers goes after it
from stageline.checkpoint.layout import verify
from tests.helpers.faulty_files import spoil
from tests.helpers.small_run import Job

SHORT = ("--total-steps", 6, "--save-steps", 2)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("job"))
    assert job.fork("whole", *SHORT, ranks=1).code == 0
    assert len(job.checkpoints("whole")) == 3
    return job


def damaged(job, name, *faults):
    """Return a copy of the run whose newest checkpoints are damaged."""
    shutil.copytree(job.folder / "whole", job.folder / name)
    folders = [job.folder / name / "checkpoints" / one for one in job.checkpoints(name)]
    for folder, fault in zip(reversed(folders), faults, strict=False):
        spoil(folder, fault)
    return folders


def test_d10_a_run_falls_back_to_the_newest_whole_one(job):
    folders = damaged(job, "two", "flipped", "unfinished")
    ended = job.fork("two", *SHORT, "--resume", "auto", ranks=1)
    assert ended.code == 0, ended.err
    for folder in folders[1:]:
        assert f"{folder.name} is skipped; {folders[0].name} is used in its place" in ended.out
    assert job.losses("two") == job.losses("whole")
    verify(folders[0])


def test_d11_a_run_with_nothing_but_damaged_ones_does_not_start_anew(job):
    folders = damaged(job, "none", "flipped", "cut", "unfinished")
    ended = job.fork("none", *SHORT, "--resume", "auto", ranks=2)
    assert ended.code == 4
    for folder in folders:
        assert folder.name in ended.err
    assert "sha256" in ended.err and "incomplete" in ended.err and "found" in ended.err
    assert job.checkpoints("none") == [folder.name for folder in folders]
    assert ended.seconds < 30
