"""Resuming from the checkpoint of a run that is not the same one, and from one that was cut off."""

import shutil

import pytest
from safetensors.torch import load_file, save

from tests.helpers.small_run import Job

RESUME = ("--resume", "auto")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a run of four steps, with checkpoints after two and four."""
    made = Job(tmp_path_factory.mktemp("job"))
    assert made.fork("first", "--total-steps", 4, ranks=1).code == 0
    return made


def copy(job: Job, name: str) -> str:
    shutil.copytree(job.folder / "first", job.folder / name)
    return name


def assert_refused(done, code, *words) -> None:
    assert done.code == code, done.err
    assert [word for word in words if word not in done.err] == [], done.err
    assert "Traceback" not in done.err and "step 5" not in done.out


def test_d13_other_settings_are_listed(job):
    """Refuse with each difference and code 4; checkpoints stay, --allow-changes continues."""
    name = copy(job, "changed")
    options = ("--total-steps", 6, "--learning-rate", 0.02, "--seed", 3, "--batch-size", 4)
    words = ["total-steps: 4 then, 6 now", "learning-rate: 0.01 then, 0.02 now"]
    words += ["seed: 0 then, 3 now", "samples of a step: 8 then, 4 now"]
    trained = ("--parts.lm_head.frozen", "--llm-lora-num", 1)
    done = job.fork(name, *options, *trained, *RESUME, ranks=1)
    assert_refused(done, 4, *words, "parts.lm_head.frozen", "llm-lora-num", "--allow-changes")
    assert job.checkpoints(name) == ["step-00000002", "step-00000004"]
    done = job.train(name, *options, *RESUME, "--allow-changes", ranks=1)
    assert [word for word in words if word not in done.out] == []
    assert job.checkpoints(name)[-1] == "step-00000006"


def test_d13_other_data_is_noticed(job):
    """The same path and the same number of rows, with other contents."""
    name = copy(job, "data")
    before = job.rows.read_text()
    job.rows.write_text(before.replace('"answer": "!"', '"answer": "?"'))
    try:
        done = job.fork(name, "--total-steps", 4, *RESUME, ranks=1)
    finally:
        job.rows.write_text(before)
    assert_refused(done, 4, "training data")


def test_d13_other_files_behind_the_same_path_are_noticed(job):
    """Config, tokenizer and template; weights where a checkpoint is an adapter on them."""
    lora = ("--llm-lora-num", 1)
    assert job.fork("lora", "--total-steps", 2, *lora, ranks=1).code == 0
    doubled = {name: 2 * value for name, value in load_file(job.model / WEIGHTS).items()}
    files = {
        "config.json": lambda old: old.replace(b'rms_norm_eps": 1e-0', b'rms_norm_eps": 3e-0'),
        "chat_template.jinja": lambda old: old + b" ",
        WEIGHTS: lambda old: save(doubled),
    }
    for file, changed in files.items():
        before = (job.model / file).read_bytes()
        (job.model / file).write_bytes(changed(before))
        assert (job.model / file).read_bytes() != before
        try:
            whole = job.fork(copy(job, file), "--total-steps", 4, *RESUME, ranks=1)
            adapter = job.fork("lora", "--total-steps", 2, *lora, *RESUME, ranks=1)
        finally:
            (job.model / file).write_bytes(before)
        found = "start weights" if file == WEIGHTS else "files of model and tokenizer"
        assert_refused(adapter, 4, found)
        if file == WEIGHTS:  # its own are in the checkpoint
            assert whole.code == 0, whole.err
        else:
            assert_refused(whole, 4, found)


def test_d09_state_of_another_optimizer_or_of_other_weights(job):
    """Refused with names, also where changes are allowed: moments fit nothing else."""
    more = ("--total-steps", 6, "--allow-changes", *RESUME)
    done = job.fork(copy(job, "sgd"), *more, "--optimizer", "sgd", ranks=1)
    assert_refused(done, 4, "the state of AdamW", "that of SGD")
    done = job.fork(copy(job, "frozen"), *more, "--parts.lm_head.frozen", ranks=1)
    assert_refused(done, 4, "that do not", "lm_head.weight")


def test_a_best_checkpoint_is_no_place_to_resume_from(job):
    """Refuse a folder with only weights, and say what it is good for."""
    name = copy(job, "weights")
    folder = job.folder / name / "checkpoints" / "step-00000004"
    shutil.rmtree(folder / "training_state")
    done = job.fork(name, "--total-steps", 4, "--resume", folder, ranks=1)
    assert done.code == 4 and "training_state" in done.err
