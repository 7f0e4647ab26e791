"""Saving: the folder loads in plain transformers, with the names and values of the stages."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig

from pp_models import CausalLMStage, StageModel, class_of_key
from stageline.checkpoint.files import tensor_names, weight_files
from stageline.checkpoint.init import init_split_model
from stageline.checkpoint.layout import (
    MANIFEST,
    check_files,
    file_facts,
    publish,
    read_manifest,
    verify,
)
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.save import save_split_model
from stageline.checkpoint.shards import split_state
from stageline.errors import CheckpointError, UserError
from tests.helpers.tiny_checkpoints import auto_class, tiny_whole
from tests.helpers.tiny_models import TYPICAL, tiny_config


def load_stages(family, folder, num_stages, **kwargs):
    stage_class = class_of_key(family)
    stages = []
    for stage in range(num_stages):
        config = AutoConfig.from_pretrained(folder)
        model = stage_class(config, stage=stage, num_stages=num_stages, **kwargs)
        load_split_model(model, folder, device="cpu", dtype=torch.float32)
        model.frozen()
        stages.append(model)
    return stages


def change(stages):
    """Changes every weight by its own amount, and a tied one alike on every stage."""
    with torch.no_grad():
        for model in stages:
            for name, parameter in model.named_parameters():
                parameter.add_(1.0 + len(name) / 7)


@pytest.mark.parametrize(
    ("family", "tied"),
    [*((one, False) for one in TYPICAL), ("gpt2", True), ("gemma3_vl", True)],
)
def test_saved_stages_are_a_plain_model(family, tied, tmp_path):
    tiny_whole(family, tmp_path / "before", tied=tied)
    stages = load_stages(family, tmp_path / "before", 3)
    change(stages)
    folder = save_split_model(stages, None, tmp_path / "after", step=7)
    # names on disk are those that transformers writes, each in one file, tied ones included
    names = [name for file in folder.glob("*.safetensors") for name in tensor_names(file)]
    assert sorted(names) == sorted(weight_files(tmp_path / "before"))
    whole, info = auto_class(family).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = whole.state_dict()
    for model in stages:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name]), name
    manifest = verify(folder)
    assert (manifest["kind"], manifest["step"], manifest["num_stages"]) == ("full", 7, 3)


def test_random_start_is_saved_whole(tmp_path):
    stages = []
    for stage in range(2):
        model = CausalLMStage(tiny_config("mixtral"), stage=stage, num_stages=2)
        init_split_model(model, seed=0, device="cpu", dtype=torch.float32)
        stages.append(model)
    folder = save_split_model(stages, None, tmp_path / "saved")
    state = auto_class("mixtral").from_pretrained(folder).state_dict()
    for model in stages:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name]), name


def test_files_are_those_of_the_library_and_the_same_each_time(tmp_path):
    tiny_whole("llama", tmp_path / "before", tied=True)
    stages = load_stages("llama", tmp_path / "before", 3)
    save_split_model(stages, None, tmp_path / "a", max_shard_bytes=9000)
    save_split_model(stages, None, tmp_path / "b", max_shard_bytes=9000)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 3
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors"
                      for i in range(1, len(shards) + 1)]  # fmt: skip
    assert {"config.json", "generation_config.json", MANIFEST} < set(names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert not list(tmp_path.glob("*.tmp-*"))
    one = save_split_model(load_stages("llama", tmp_path / "before", 1), None, tmp_path / "one")
    assert (one / "model.safetensors").exists()
    assert not (one / "model.safetensors.index.json").exists()


def test_index_says_what_the_files_hold(tmp_path):
    whole = tiny_whole("llama", tmp_path / "before")
    stages = load_stages("llama", tmp_path / "before", 2)
    folder = save_split_model(stages, None, tmp_path / "after")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    count = sum(parameter.numel() for parameter in whole.parameters())
    assert index["metadata"]["total_parameters"] == count
    assert index["weight_map"]["lm_head.weight"] == "model-00002-of-00002.safetensors"


def test_nothing_is_written_over(tmp_path):
    tiny_whole("llama", tmp_path / "before")
    stages = load_stages("llama", tmp_path / "before", 1)
    before = sorted(path.read_bytes() for path in (tmp_path / "before").iterdir())
    with pytest.raises(UserError, match="exists, and a checkpoint is never"):
        save_split_model(stages, None, tmp_path / "before")
    assert sorted(path.read_bytes() for path in (tmp_path / "before").iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


class BrokenProcessor:
    def save_pretrained(self, folder):
        raise OSError("no space left")


def test_a_failed_save_leaves_nothing(tmp_path):
    tiny_whole("llama", tmp_path / "before")
    stages = load_stages("llama", tmp_path / "before", 2)
    with pytest.raises(OSError, match="failed on rank 0: no space left"):
        save_split_model(stages, BrokenProcessor(), tmp_path / "after")
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


class TwoParts:
    """A processor that cannot save itself, as one without its video part."""

    class Part:
        def __init__(self, name):
            self.name = name

        def save_pretrained(self, folder):
            (Path(folder) / self.name).write_text("{}")

    def __init__(self):
        self.tokenizer = self.Part("tokenizer.json")
        self.image_processor = self.Part("preprocessor_config.json")

    def save_pretrained(self, folder):
        raise AttributeError("None has no save_pretrained")


def test_a_processor_is_saved_by_its_parts(tmp_path):
    tiny_whole("llama", tmp_path / "before")
    stages = load_stages("llama", tmp_path / "before", 1)
    folder = save_split_model(stages, TwoParts(), tmp_path / "after")
    assert {"tokenizer.json", "preprocessor_config.json"} <= set(verify(folder)["files"])


@pytest.mark.parametrize("spoil", ["flip", "cut", "remove"])
def test_the_manifest_finds_damage(spoil, tmp_path):
    tiny_whole("llama", tmp_path / "before")
    stages = load_stages("llama", tmp_path / "before", 2)
    folder = save_split_model(stages, None, tmp_path / "after")
    shard = folder / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    if spoil == "remove":
        shard.unlink()
    else:
        shard.write_bytes(content if spoil == "flip" else content[:-1])
    with pytest.raises(UserError, match=shard.name):
        verify(folder)
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:40])
    with pytest.raises(UserError, match="incomplete"):
        read_manifest(folder)


def test_shards_hold_each_tensor_once_within_the_limit():
    state = {f"t{i}": torch.zeros(10 * (i + 1)) for i in range(6)}
    shards = split_state(state, 200)
    assert sorted(name for shard in shards for name in shard) == sorted(state)
    for shard in shards:
        size = sum(tensor.nbytes for tensor in shard.values())
        assert size <= 200 or len(shard) == 1
    assert len(split_state(state, 10**6)) == 1


class OwnStage(StageModel):
    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        with torch.device("meta"):
            self.layers = nn.ModuleList(
                nn.Linear(4, 4) if index in self.layers else nn.Identity() for index in range(4)
            )

    def num_layers(self):
        return 4

    def parts(self):
        return {"llm": ["layers"]}


def test_own_modules_are_saved_under_their_names(tmp_path):
    state = {f"layers.{i}.weight": torch.randn(4, 4) for i in range(4)}
    state |= {f"layers.{i}.bias": torch.randn(4) for i in range(4)}
    (tmp_path / "before").mkdir()
    save_file(state, tmp_path / "before" / "model.safetensors")
    stages = [OwnStage(None, stage=stage, num_stages=2) for stage in range(2)]
    for model in stages:
        load_split_model(model, tmp_path / "before", device="cpu", dtype=torch.float32)
    folder = save_split_model(stages, None, tmp_path / "after")
    assert set(weight_files(folder)) == set(state)
    again = OwnStage(None, stage=0, num_stages=1)
    load_split_model(again, folder, device="cpu", dtype=torch.float32)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("name", ["model-extra.safetensors", "below/adapter_config.json"])
def test_a_file_that_loaders_would_read_must_be_in_the_manifest(name, tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"weights")
    publish(draft, tmp_path / "saved", facts={}, known={})
    verify(tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("of a user")
    verify(tmp_path / "saved")
    (tmp_path / "saved" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "saved" / name).write_text("{}")
    with pytest.raises(CheckpointError, match="is not in the manifest"):
        verify(tmp_path / "saved")


def test_a_checksum_is_compared_to_its_last_letter(tmp_path):
    (tmp_path / "a").write_bytes(b"weights")
    facts = file_facts(tmp_path / "a")
    check_files(tmp_path, {"files": {"a": facts}})
    right = facts["sha256"]
    for wrong in (right[:-1] + "0123"[right[-1] == "0"], "0123"[right[0] == "0"] + right[1:]):
        with pytest.raises(CheckpointError, match="found sha256"):
            check_files(tmp_path, {"files": {"a": {**facts, "sha256": wrong}}})


def test_an_empty_folder_is_not_written_over_either(tmp_path):
    draft, folder = tmp_path / "draft", tmp_path / "there"
    draft.mkdir()
    folder.mkdir()
    with pytest.raises(UserError, match="exists, and a checkpoint is never"):
        publish(draft, folder, facts={}, known={})
    assert draft.is_dir() and not any(folder.iterdir())


def test_all_is_on_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    """After a power cut the name may be there: then so must be every byte below it."""
    done = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(source, target):
        done.append("rename")
        rename(source, target)

    tiny_whole("llama", tmp_path / "before")
    stages = load_stages("llama", tmp_path / "before", 2)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    folder = save_split_model(stages, None, tmp_path / "after")
    before, behind = done[: done.index("rename")], done[done.index("rename") + 1 :]
    (draft,) = {path for path in before if path.name.startswith("after.tmp-")}
    files = {path.relative_to(folder) for path in folder.rglob("*")} | {Path()}
    assert {path.relative_to(draft) for path in before if path.is_relative_to(draft)} == files
    assert Path(MANIFEST) in files and len(files) > 3
    # the manifest behind all files that it lists, and the folder's own entries last
    assert before[-1] == draft and before[-2] == draft / MANIFEST
    assert tmp_path in behind
