"""Saving: whatever stops it, the last good checkpoint survives and is found."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pp_models import CausalLMStage
from stageline.checkpoint import writer as writer_module
from stageline.checkpoint.layout import verify
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.optimizer_state import SavedState
from stageline.checkpoint.writer import CheckpointWriter, find_latest, keep_last
from stageline.errors import NonFiniteError
from tests.helpers import faults
from tests.helpers.small_run import Job
from tests.helpers.tiny_checkpoints import tiny_whole

SHORT = ("--total-steps", 4, "--save-steps", 2)
RESUME = ("--resume", "auto")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def undisturbed(job):
    assert job.fork("undisturbed", *SHORT, ranks=1).code == 0
    return files(job.folder / "undisturbed" / "checkpoints" / "step-00000004")


def files(folder: Path) -> dict[str, bytes]:
    """Return the tensors of a checkpoint as they are on disk."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


def checkpoints(job, name):
    return job.folder / name / "checkpoints"


def assert_whole(job, name, *expected):
    """All that is called a checkpoint verifies; these are there."""
    assert job.checkpoints(name) == [f"step-{step:08d}" for step in expected]
    for step in expected:
        verify(checkpoints(job, name) / f"step-{step:08d}")


def dies_at(count, work) -> bool:
    """Whether `work` in a forked process came to its k-th operation on files, which ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            with faults.armed(f"at=file,count={count},do=exit"):
                work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 137)
    return code == 137


def test_c01_stopped_at_each_file_operation(tmp_path):
    """The k-th operation on files is the last one, for each k of a save and of what it removes."""
    writer, train = make_writer(tmp_path, keep=1, waits=True)
    save(writer, 1)
    train()
    stops = 0
    while dies_at(stops + 1, lambda: save(writer, 2)):
        stops += 1
        found, _ = find_latest(writer.folder)
        names = {path.name for path in writer.folder.glob("step-????????")}
        assert names == {"step-00000001"} or "step-00000002" in names, names
        assert found is not None and found.name == max(names)
        SavedState(found)
        for path in set(writer.folder.iterdir()) - {writer.folder / "step-00000001"}:
            shutil.rmtree(path)
        if not (writer.folder / "step-00000001").exists():
            break  # the old one went, as it should, once the new one had verified
    assert stops >= 10


def test_c02_runs_stopped_at_file_operations(job, undisturbed):
    """Some of the operations of a rank of a whole run, which is resumed each time."""
    for ranks, rank, count in ((1, 0, 20), (2, 1, 3)):
        name = f"sweep-{rank}"
        fault = f"at=file,rank={rank},count={count},do=exit"
        assert job.fork(name, *SHORT, ranks=ranks, chaos=fault, waits=True).code != 0
        whole = [int(text[5:]) for text in job.checkpoints(name)]
        assert whole in ([], [2], [2, 4]), whole
        assert_whole(job, name, *whole)
        job.train(name, *SHORT, *RESUME, ranks=ranks)
        assert job.losses(name) == job.losses("undisturbed")
        assert_whole(job, name, 2, 4)
        assert not list(checkpoints(job, name).glob("*.tmp-*"))
    assert files(checkpoints(job, "sweep-0") / "step-00000004") == undisturbed


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(
            "at=save,rank=1,count=2,do=limit_files,value=3000", "File too large", id="c04_limit"
        ),
        pytest.param(
            "at=file,rank=0,count=25,do=enospc", "No space left", id="c05_c13_disk_full_behind"
        ),
    ],
)
def test_no_room(fault, words, job, undisturbed):
    """A rank cannot write: all stop with code 5, with rank, path and bytes; resumable."""
    name = f"room-{words[:2]}"
    done = job.fork(name, *SHORT, chaos=fault)
    assert done.code == 5, done.err
    rank = fault.partition("rank=")[2][0]
    assert words in done.err and f"failed on rank {rank}" in done.err
    assert str(checkpoints(job, name)) in done.err and "bytes are free" in done.err
    assert "Traceback" not in done.err
    assert_whole(job, name, 2)
    job.train(name, *SHORT, *RESUME)
    assert job.losses(name) == job.losses("undisturbed")
    assert_whole(job, name, 2, 4)


def test_c06_output_dir_cannot_be_written(job, tmp_path):
    """A file in the way, or a folder that takes no files: refused before training starts."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/stageline")):
        done = job.fork("unused", "--output-dir", folder, ranks=1)
        assert done.code == 2 and str(folder) in done.err and "step 1/" not in done.out
        assert "Traceback" not in done.err


def test_c07_output_dir_removed_while_running(job):
    """It is gone when a checkpoint is due: code 5, the folder named."""
    folder = job.folder / "removed"
    run = job.start_forked("removed", *SHORT, ranks=1, chaos="at=step,step=3,do=sleep,value=2")
    while job.checkpoints("removed") == [] or len(job.losses("removed")) < 3:
        assert run.is_running()
        time.sleep(0.02)
    shutil.rmtree(folder)
    done = run.wait()
    assert done.code == 5 and "No such file" in done.err and str(folder) in done.err, done.err


def test_c08_stopped_between_publishing_and_removing(job, undisturbed):
    """Both checkpoints are whole; the next run removes the old one."""
    keep = ("--keep-last", 1)
    fault = "at=retention,count=2,do=exit"
    assert job.fork("between", *SHORT, *keep, ranks=1, chaos=fault).code == 137
    assert_whole(job, "between", 2, 4)
    done = job.train("between", *RESUME, *keep, "--total-steps", 5, "--allow-changes", ranks=1)
    assert "removed step-00000002, step-00000004" in done.out
    assert_whole(job, "between", 5)


def test_c11_a_step_that_exists_is_kept_aside(job, undisturbed):
    """Resumed from an older one: later ones get another name and are not written into."""
    shutil.copytree(job.folder / "undisturbed", job.folder / "again")
    old = checkpoints(job, "again") / "step-00000002"
    later = files(checkpoints(job, "again") / "step-00000004")
    done = job.fork("again", *SHORT, "--resume", old, ranks=1)
    assert done.code == 0, done.err
    (aside,) = checkpoints(job, "again").glob("step-00000004.replaced-*")
    assert files(aside) == later
    assert_whole(job, "again", 2, 4)


def make_writer(folder: Path, **options):
    """Return a writer over a tiny model and its optimizer after one step."""
    if not (folder / "base").exists():
        tiny_whole("llama", folder / "base")
    config = AutoModelForCausalLM.from_pretrained(folder / "base").config
    model = CausalLMStage(config, stage=0, num_stages=1)
    load_split_model(model, folder / "base", device="cpu", dtype=torch.float32)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    step(parameters, optimizer)
    writer = CheckpointWriter(
        folder / "checkpoints",
        stages=[model],
        processor=None,
        optimizer=optimizer,
        parameters=parameters,
        rows={},
        with_weights=False,
        **options,
    )
    return writer, lambda: step(parameters, optimizer)


def step(parameters, optimizer) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def save(writer, number: int) -> None:
    writer.save(number, {})
    writer.finish()


def test_c12_the_file_holds_the_values_of_the_save(tmp_path):
    """Weights and moments change right after save(), before anything is written."""
    writer, train = make_writer(tmp_path)
    save(writer, 1)
    with faults.armed("at=write,do=sleep,value=1"):
        writer.save(2, {})
        for _ in range(3):
            train()
        writer.finish()
    save(writer, 3)
    one, two, three = (files(writer.folder / f"step-{n:08d}") for n in (1, 2, 3))
    assert one == two
    assert one.keys() == three.keys() and all(one[name] != three[name] for name in one)


def test_one_checkpoint_is_written_at_a_time(tmp_path, monkeypatch):
    writer, _ = make_writer(tmp_path)
    running, most = [], []

    def write(*args):
        running.append(args)
        most.append(len(running))
        time.sleep(0.2)
        running.pop()

    monkeypatch.setattr(writer, "_write", write)
    for number in (1, 2, 3):
        writer.save(number, {})
    writer.finish()
    assert most == [1, 1, 1]


def test_the_last_checkpoints_stay_and_none_is_removed_under_its_name(tmp_path, monkeypatch):
    for number in (1, 2, 3, 10, 20):
        (tmp_path / f"step-{number:08d}").mkdir()
    removed = []

    def discard(folder):
        removed.append(folder.name)
        folder.rmdir()

    monkeypatch.setattr(writer_module, "discard", discard)
    names = ["step-00000001", "step-00000002", "step-00000003"]
    assert keep_last(tmp_path, 2) == names
    assert [name.partition(".tmp-")[0] for name in removed] == names
    assert all(".tmp-" in name for name in removed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_c14_the_end_waits_for_a_save(job):
    """The last checkpoint is being written when training ends: it is there."""
    done = job.fork("slow", *SHORT, ranks=1, chaos="at=write,count=2,do=sleep,value=1")
    assert done.code == 0 and "step-00000004" in done.out
    assert_whole(job, "slow", 2, 4)


def test_c15_a_second_run_in_the_same_folder(job):
    """Refuse it with process and machine of the first, which continues."""
    first = job.start_forked("shared", *SHORT, ranks=1, chaos="at=step,step=1,do=sleep,value=3")
    lock = job.folder / "shared" / "run.lock"
    while not (lock.exists() and lock.stat().st_size):
        time.sleep(0.05)
        assert first.is_running()
    done = job.fork("shared", ranks=1)
    assert done.code == 2 and f"process {first.pids[0]} on {os.uname().nodename}" in done.err
    assert first.wait().code == 0


def test_c15_a_killed_run_holds_no_lock(job):
    """Its data workers may live on for a moment; the folder is free all the same."""
    options = (*SHORT, "--num-workers", 1)
    chaos = "at=step,step=2,do=sigkill"
    assert job.fork("killed", *options, ranks=1, chaos=chaos).code == -signal.SIGKILL
    job.train("killed", *options, *RESUME, ranks=1)


def test_c16_every_parameter_of_every_stage_is_there(job):
    """Weights and moments: the names of the whole model, each once."""
    job.train("all", "--total-steps", 1)
    folder = checkpoints(job, "all") / "step-00000001"
    whole = dict(AutoModelForCausalLM.from_pretrained(job.model).named_parameters())
    names = [n for path in folder.glob("*.safetensors") for n in load_file(path)]
    assert sorted(names) == sorted(whole)
    state = json.loads((folder / "training_state" / "state.json").read_text())["parameters"]
    assert state.keys() == whole.keys()
    for parameter, entry in state.items():
        assert tuple(entry["shape"]) == whole[parameter].shape
        assert entry["values"].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_h12_a_folder_with_checkpoints_of_another_run(job, undisturbed):
    """Not written into unless it is resumed."""
    done = job.fork("undisturbed", ranks=1)
    assert done.code == 2 and "--resume auto" in done.err and "step-00000004" in done.err
    assert files(checkpoints(job, "undisturbed") / "step-00000004") == undisturbed


@pytest.mark.parametrize("where", ["weight", "moment"])
def test_c18_weights_that_are_no_numbers_are_not_saved(where, tmp_path):
    """Refused with the tensor named, code 6; no folder, and the one before stays."""
    writer, _ = make_writer(tmp_path)
    save(writer, 1)
    name, parameter = next(iter(writer.parameters.items()))
    broken = parameter if where == "weight" else writer.optimizer.state[parameter]["exp_avg"]
    with torch.no_grad():
        broken.view(-1)[3] = float("nan")
    with pytest.raises(NonFiniteError, match=name) as caught:
        save(writer, 2)
    assert caught.value.exit_code == 6
    assert [path.name for path in writer.folder.iterdir()] == ["step-00000001"]
    verify(writer.folder / "step-00000001")
