"""Faults in the files of a checkpoint: each is refused with exit code 4, file and tensor named."""

import os
import shutil

import pytest
import torch

from commands import train as train_pp  # noqa: F401  now: what a test registers goes after it
from stageline.checkpoint.adapter import attach_adapter
from stageline.checkpoint.files import weight_files
from stageline.checkpoint.layout import FORMAT_VERSION, MANIFEST, read_manifest, verify
from stageline.checkpoint.plain_model import load_plain
from stageline.checkpoint.save import save_split_model
from stageline.checkpoint.writer import find_latest, skip_lines
from stageline.modules.lora import is_lora_name
from tests.helpers.faulty_files import edit, edit_manifest, flip, load, refused, rewrite, spoil
from tests.helpers.tiny_checkpoints import tiny_whole

SHARD = "model-00002-of-00002.safetensors"


def save_adapter(whole, folder):
    stages = [load(whole, stage=stage, llm_lora_num=1) for stage in range(2)]
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(is_lora_name(name))
    return save_split_model(stages, None, folder, base_path=str(whole))


# -- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "cut"), [("saved", "one byte"), ("whole", "half"), ("whole", "all")]
)
def test_d01_a_truncated_shard_is_named(folder, cut, request):
    folder = request.getfixturevalue(folder)
    file = next(path for path in sorted(folder.glob("*.safetensors"), reverse=True))
    size = file.stat().st_size
    left = {"one byte": size - 1, "half": size // 2, "all": 0}[cut]
    os.truncate(file, left)
    refused(lambda: load(folder), file, "cannot be read")
    if (folder / MANIFEST).exists():
        refused(lambda: verify(folder), file, f"found {left} bytes", f"expected {size} bytes")


def test_d02_a_bit_flipped_in_the_data_is_caught(saved):
    flip(saved / SHARD, -1)
    refused(lambda: verify(saved), saved / SHARD, "sha256")


def test_d03_every_bit_of_the_manifest_counts(saved):
    manifest = saved / MANIFEST
    before = manifest.read_bytes()
    for position in range(0, len(before), 7):
        changed = bytearray(before)
        changed[position] ^= 1 << (position % 8)
        manifest.write_bytes(changed)
        refused(lambda: read_manifest(saved), manifest)
    manifest.write_bytes(before)
    verify(saved)


# -- files ---------------------------------------------------------------------------------------


def test_d04_a_missing_shard_is_named(saved):
    (saved / SHARD).unlink()
    for stage in range(2):
        refused(lambda stage=stage: load(saved, stage=stage), saved / SHARD, "is missing")
    refused(lambda: verify(saved), saved / SHARD, "is missing")


def test_d06_an_index_that_promises_what_no_file_holds(saved):
    def change(index):
        index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = SHARD

    edit(saved / "model.safetensors.index.json", change)
    refused(lambda: weight_files(saved), saved / SHARD, "model.layers.9.mlp.up_proj.weight")


@pytest.mark.parametrize("kind", ["beside", "twice", "untold", "named"])
def test_d06_a_second_set_of_weights(kind, saved, whole):
    """transformers takes the single file, all tensors of a shard, or what config.json names."""
    name = "model.layers.3.mlp.up_proj.weight"
    index = saved / "model.safetensors.index.json"
    if kind == "beside":
        shutil.copy(whole / "model.safetensors", saved)
        words = (saved, "two sets of weights", "model.safetensors")
    elif kind == "twice":
        first = saved / "model-00001-of-00002.safetensors"
        rewrite(first, lambda state: state.update({name: torch.zeros(2)}))
        words = (first, name)
    elif kind == "untold":
        edit(index, lambda found: found["weight_map"].pop(name))
        words = (saved / SHARD, name)
    else:
        shutil.copy(whole / "model.safetensors", saved / "other.safetensors")
        edit(saved / "config.json", lambda it: it.update(transformers_weights="other.safetensors"))
        words = (saved / "config.json", "transformers_weights", "other.safetensors")
    refused(lambda: load_plain(saved), *words)
    refused(lambda: load(saved), *words)


def test_d07_an_adapter_of_a_wider_model_is_refused(whole, tmp_path):
    folder = save_adapter(whole, tmp_path / "adapter")
    (folder / MANIFEST).unlink()
    name = "base_model.model.model.layers.3.mlp.up_proj.lora_A.weight"

    def widen(state):
        state[name] = torch.cat([state[name]] * 2, dim=1)

    rewrite(folder / "adapter_model.safetensors", widen)
    base = tiny_whole("llama")
    for call in (lambda: load(whole, folder, llm_lora_num=1), lambda: attach_adapter(base, folder)):
        refused(call, "adapter_model.safetensors", "model.layers.3.mlp.up_proj", "inputs")


def test_d08_integers_in_place_of_weights_are_refused_and_floats_are_cast_aloud(whole):
    assert load(whole).cast_note is None
    half = load(whole, dtype=torch.bfloat16)
    assert "saved in float32 and are kept in bfloat16" in half.cast_note
    name = "model.layers.3.mlp.up_proj.weight"

    def quantise(state):
        state[name] = state[name].to(torch.int8)

    rewrite(whole / "model.safetensors", quantise)
    refused(lambda: load(whole), whole, f"{name} (I8)", "not quantised")


# -- which checkpoint ----------------------------------------------------------------------------


@pytest.fixture
def three(saved):
    """Checkpoints of steps 2, 4 and 6; the oldest was changed last, the clock went backwards."""
    folders = [
        shutil.copytree(saved, saved.parent / "checkpoints" / f"step-{step:08d}")
        for step in (2, 4, 6)
    ]
    for number, folder in enumerate(folders):
        os.utime(folder, (10_000 - number, 10_000 - number))
    (folders[0].parent / "step-00000008.tmp-1a2b3c4d").mkdir()
    (folders[0].parent / "best-step-00000009").mkdir()
    return folders


@pytest.mark.parametrize("kind", ["cut", "flipped", "gone", "unfinished", "empty", "a file"])
def test_d10_the_newest_whole_one_is_found_and_both_are_named(kind, three):
    assert find_latest(three[0].parent) == (three[2], [])
    spoil(three[2], kind)
    found, skipped = find_latest(three[0].parent)
    assert found == three[1]
    (line,) = skip_lines(found, skipped)
    assert "step-00000006 is skipped" in line
    assert "step-00000004 is used in its place" in line
    refused(lambda: verify(three[2]), three[2])  # a path that is given never falls back
    for folder in three[:2]:
        verify(folder)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 1, None])
def test_d14_another_format_says_which_version_is_needed(version, saved):
    edit_manifest(saved, lambda manifest: manifest.update(format_version=version))
    message = refused(lambda: verify(saved), f"format version {version}", FORMAT_VERSION)
    is_newer = isinstance(version, int) and version > FORMAT_VERSION
    assert ("Update Stageline" in message) is is_newer
