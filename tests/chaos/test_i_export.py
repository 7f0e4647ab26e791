"""Export under faults (I8 to I10): whatever happens, the target is absent or complete."""

import hashlib
import os
import shutil
import traceback

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from stageline.checkpoint.files import weight_files
from stageline.checkpoint.layout import verify
from stageline.checkpoint.plain_folder import export_folder
from stageline.checkpoint.save import save_split_model
from stageline.errors import CheckpointError, StorageError, UserError
from stageline.verify.export import check_export
from tests.helpers import faults
from tests.helpers.tiny_checkpoints import load_stages, shake, tiny_whole
from tests.helpers.tiny_models import tiny_config

MOST_OPERATIONS = 60
KILLED = 137


def save_run(folder, *, num_loras=0):
    """Save what a run of two stages saves, in the folder of a run."""
    base = folder / "base"
    tiny_whole("llama", base)
    (base / "tokenizer_config.json").write_text("{}")
    stages = shake(load_stages(base, llm_lora_num=num_loras))
    return save_split_model(stages, None, folder / "x" / "checkpoints" / "step-00000001", step=1)


@pytest.fixture(autouse=True)
def _no_bars():
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


OPTIONS = {"overwrites": True, "max_shard_bytes": 20000}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a saved run, the files of an export without faults, and an export to replace."""
    folder = tmp_path_factory.mktemp("export")
    run = save_run(folder)
    made = folder / "made"
    export_folder(run, made / "out", **OPTIONS)
    export_folder(run, made / "old", dtype=torch.bfloat16)
    return run, digests(made / "out"), made / "old"


def digests(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fork_export(run, target, fault, **options):
    """Exports in a forked process with a fault; its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 70
    try:
        os.environ[faults.VARIABLE] = fault
        faults.arm()
        write = modeling_utils.safe_save_file
        modeling_utils.safe_save_file = lambda *args, **kwargs: (
            faults.point("file"),
            write(*args, **kwargs),
        )
        export_folder(run, target, **options)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def test_i08_export_killed_at_every_file_operation(job, tmp_path):
    """It is to replace an old one."""
    run, expected, old = job
    for count in range(1, MOST_OPERATIONS):
        folder = tmp_path / str(count)
        target = shutil.copytree(old, folder / "out")
        code = fork_export(run, target, f"at=file,count={count},do=exit", **OPTIONS)
        if target.exists():
            verify(target)
            assert digests(target) in (expected, digests(old))
        else:  # for a moment the old one is stored next to it, whole
            (aside,) = folder.glob("out.old-*")
            assert digests(aside) == digests(old)
        if code == 0:
            break
        assert code == KILLED
        if count % 3 == 0 or not target.exists():
            export_folder(run, target, **OPTIONS)  # export again, next to what was left
            assert digests(target) == expected
    assert code == 0, "it never came to its end"
    assert digests(target) == expected
    assert count > 8
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_i08_disk_full_at_every_file_operation(job, tmp_path):
    run, expected, old = job
    for count in range(1, MOST_OPERATIONS):
        target = shutil.copytree(old, tmp_path / str(count) / "out")
        try:
            with faults.armed(f"at=file,count={count},do=enospc"):
                export_folder(run, target, **OPTIONS)
            break
        except StorageError as error:
            assert error.exit_code == 5
            assert str(target) in str(error) and "No space left on device" in str(error)
        verify(target)
        assert digests(target) in (expected, digests(old))
        left = [path.name for path in target.parent.iterdir() if path != target]
        assert left == [] or digests(target) == expected
    assert digests(target) == expected


def test_i08_re_import_is_bitwise(tmp_path):
    """Export -> import -> save -> export: the weight files are the same to the byte."""
    run = save_run(tmp_path)
    export_folder(run, tmp_path / "first")
    stages = load_stages(tmp_path / "first")
    for model in stages:
        for name, value in model.state_dict().items():
            file = weight_files(run)[name]
            assert torch.equal(value, load_file(file)[name])
    again = save_split_model(stages, None, tmp_path / "again", step=1)
    export_folder(again, tmp_path / "second")
    weights = [name for name in digests(tmp_path / "first") if name.endswith(".safetensors")]
    assert weights == ["model.safetensors"]
    for name in [*weights, "config.json", "generation_config.json"]:
        first, second = (tmp_path / path / name for path in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_i09_a_target_that_exists_is_refused(tmp_path):
    run = save_run(tmp_path)
    out = tmp_path / "out"
    export_folder(run, out, dtype=torch.float16)
    before = digests(out)
    with pytest.raises(UserError, match="exists, and a checkpoint is never") as told:
        export_folder(run, out)
    assert told.value.exit_code == 2
    assert digests(out) == before
    export_folder(run, out, overwrites=True)
    assert digests(out) != before
    verify(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "x"]


def test_i09_what_is_no_model_or_is_needed_is_never_replaced(tmp_path):
    run = save_run(tmp_path, num_loras=1)
    papers = tmp_path / "papers"
    papers.mkdir()
    (papers / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not a model folder"):
        export_folder(run, papers, overwrites=True)
    for needed in (run, run.parents[1], tmp_path / "base"):
        with pytest.raises(UserError, match="a source of the export"):
            export_folder(run, needed, overwrites=True)
    assert (papers / "thesis.tex").read_text() == "years of work"
    verify(run)


def test_i10_a_tied_head_that_was_stored_twice_is_stored_once(tmp_path):
    tiny_whole("llama", tmp_path / "base", tied=True, max_shard_size="1GB")
    file = tmp_path / "base" / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, file, metadata={"format": "pt"})
    export_folder(tmp_path / "base", tmp_path / "out")
    assert set(weight_files(tmp_path / "out")) == set(state) - {"lm_head.weight"}


def test_i10_heads_of_another_class_are_kept(tmp_path):
    torch.manual_seed(0)
    config = tiny_config("gpt2", num_labels=3)
    whole = transformers.GPT2DoubleHeadsModel(config)
    whole.save_pretrained(tmp_path / "base")
    export_folder(tmp_path / "base", tmp_path / "out")
    assert set(weight_files(tmp_path / "out")) == set(weight_files(tmp_path / "base"))
    assert any("multiple_choice_head" in name for name in weight_files(tmp_path / "out"))
    assert check_export(tmp_path / "base", tmp_path / "out").difference == 0.0


def test_i10_a_head_that_the_model_does_not_have_is_not_dropped_unseen(tmp_path):
    tiny_whole("llama", tmp_path / "base", max_shard_size="1GB")
    file = tmp_path / "base" / "model.safetensors"
    state = load_file(file)
    save_file({**state, "value_head.weight": torch.ones(1, 16)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"belong to no model: value_head.weight") as told:
        export_folder(tmp_path / "base", tmp_path / "out")
    assert told.value.exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
