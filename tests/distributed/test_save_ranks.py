"""Several ranks write one folder: together, or not at all."""

import errno
import os

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from pp_models import CausalLMStage
from stageline.checkpoint import shards
from stageline.checkpoint.layout import verify
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_checkpoints import auto_class, tiny_whole


def load(rank, folder, num_stages, **kwargs):
    config = AutoConfig.from_pretrained(folder)
    model = CausalLMStage(config, stage=rank, num_stages=num_stages, **kwargs)
    load_split_model(model, folder, device="cpu", dtype=torch.float32)
    model.frozen()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 + len(name) / 500)
    return model


def save_stage(rank, base, folder, num_stages, num_loras):
    model = load(rank, base, num_stages, llm_lora_num=num_loras)
    save_split_model(model, None, folder, step=2)
    assert folder.exists()  # on every rank, when it returns
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def files(folder):
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize(("family", "num_loras"), [("llama", 0), ("mixtral", 1), ("llama", 2)])
def test_three_ranks_write_what_one_process_writes(family, num_loras, tmp_path):
    tiny_whole(family, tmp_path / "base", tied=True)
    base = tmp_path / "base"
    if num_loras == 2:
        base = tmp_path / "first"
        run_ranks(save_stage, 2, tmp_path / "base", base, 2, 1)
        (base / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    states = run_ranks(save_stage, 3, base, tmp_path / "ranks", 3, num_loras)
    stages = [load(stage, base, 3, llm_lora_num=num_loras) for stage in range(3)]
    save_split_model(stages, None, tmp_path / "single", step=2)
    verify(tmp_path / "ranks")
    assert files(tmp_path / "ranks") == files(tmp_path / "single")
    if num_loras == 0:
        whole = auto_class(family).from_pretrained(tmp_path / "ranks").state_dict()
        for state in states:
            for name, tensor in state.items():
                assert torch.equal(tensor, whole[name]), name


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_with_a_failing_rank(rank, base, folder, kind):
    model = load(rank, base, 2)
    if rank == 1 and kind == "weights":
        model.state_dict = lambda **kwargs: 1 / 0
    if rank == 1 and kind == "disk":
        shards.write_tensors = no_space
    if rank == 0 and kind == "exists":
        folder.mkdir()
    dist.barrier()
    try:
        save_split_model(model, None, folder)
    except (OSError, UserError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return ["saved", ""]


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("weights", "RuntimeError", "failed on rank 1: ZeroDivisionError: division by zero"),
        ("disk", "StorageError", "failed on rank 1: [Errno 28] No space left on device"),
        ("exists", "UserError", "exists, and a checkpoint is never"),
    ],
)
def test_when_one_rank_fails_all_do(kind, error, text, tmp_path):
    tiny_whole("llama", tmp_path / "base")
    told = run_ranks(save_with_a_failing_rank, 2, tmp_path / "base", tmp_path / "out", kind)
    assert [name for name, _ in told] == [error, error]
    assert all(text in message for _, message in told)
    assert not list(tmp_path.glob("*.tmp-*"))
    assert not (tmp_path / "out" / "manifest.json").exists()
