"""Faults in the files of a checkpoint: each is refused with exit code 4, file and tensor named."""

import json
import os
import pickle
import re
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pp_models import CausalLMStage
from stageline.checkpoint import files as checkpoint_files
from stageline.checkpoint.adapter import attach_adapter
from stageline.checkpoint.files import find_checkpoint, weight_files
from stageline.checkpoint.find import find_latest, no_checkpoint_left, skip_lines
from stageline.checkpoint.header import MAX_HEADER_BYTES, read_header
from stageline.checkpoint.layout import FORMAT_VERSION, MANIFEST, content_sum, read_manifest, verify
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.save import save_split_model
from stageline.errors import CheckpointError, UserError
from stageline.modules.lora import is_lora_name
from stageline.testing.small_run import Job
from stageline.testing.tiny_checkpoints import tiny_whole

SHARD = "model-00002-of-00002.safetensors"


def load(folder, path=None, *, stage=1, num_stages=2, dtype=torch.float32, **kwargs):
    config = AutoConfig.from_pretrained(folder)
    model = CausalLMStage(config, stage=stage, num_stages=num_stages, dtype=dtype, **kwargs)
    load_split_model(model, path or folder, device="cpu", dtype=dtype)
    return model


def refused(call, *words, code=4):
    """The message of the error that `call` raises; it must hold the words."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert caught.value.exit_code == code, message
    for word in words:
        assert str(word) in message
    return message


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A model folder as a run saves it: two shards, and the weights of a whole llama."""
    folder = tmp_path_factory.mktemp("originals")
    tiny_whole("llama", folder / "whole", max_shard_size="1GB")
    stages = [load(folder / "whole", stage=stage) for stage in range(2)]
    save_split_model(stages, None, folder / "saved", step=2)
    return folder


@pytest.fixture
def saved(originals, tmp_path):
    return shutil.copytree(originals / "saved", tmp_path / "saved")


@pytest.fixture
def whole(originals, tmp_path):
    """A folder of another program: one file, no manifest."""
    return shutil.copytree(originals / "whole", tmp_path / "whole")


def flip(path, position, bit=0):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def with_header(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_manifest(folder, change, *, signs=True):
    def both(manifest):
        change(manifest)
        if signs:
            manifest["sha256"] = content_sum(manifest)

    edit(folder / MANIFEST, both)


def save_adapter(whole, folder):
    stages = [load(whole, stage=stage, llm_lora_num=1) for stage in range(2)]
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(is_lora_name(name))
    return save_split_model(stages, None, folder, base_path=str(whole))


def rewrite(file, change):
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


# -- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["one byte", "half", "all"])
@pytest.mark.parametrize("folder", ["saved", "whole"])
def test_d01_a_truncated_shard_is_named_with_both_sizes(folder, cut, request):
    folder = request.getfixturevalue(folder)
    file = next(path for path in sorted(folder.glob("*.safetensors"), reverse=True))
    size = file.stat().st_size
    left = {"one byte": size - 1, "half": size // 2, "all": 0}[cut]
    os.truncate(file, left)
    refused(lambda: load(folder), file, f"expected {size if left else 8} bytes", f"found {left}")
    if (folder / MANIFEST).exists():
        refused(lambda: verify(folder), file, f"found {left} bytes", f"expected {size} bytes")


def test_d01_a_run_on_a_truncated_file_ends_with_code_4(tmp_path):
    job = Job(tmp_path)
    file = job.model / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    ended = job.fork("out")
    assert ended.code == 4
    assert str(file) in ended.err and "expected" in ended.err
    assert "Traceback" not in ended.err
    assert ended.seconds < 30
    assert not job.checkpoints("out")


def test_d02_a_bit_flipped_in_the_data_is_caught(saved):
    for position in (-1, -1000):
        flip(saved / SHARD, position)
        refused(lambda: verify(saved), saved / SHARD, "sha256")
        refused(lambda: load(saved), saved / SHARD, "sha256")
        load(saved, stage=0)  # reads the other shard alone
        flip(saved / SHARD, position)
    verify(saved)
    load(saved)


def test_d02_a_bit_flipped_in_an_adapter_is_caught(whole, tmp_path):
    folder = save_adapter(whole, tmp_path / "adapter")
    load(whole, folder, llm_lora_num=1)
    flip(folder / "adapter_model.safetensors", -1)
    refused(lambda: load(whole, folder, llm_lora_num=1), "adapter_model.safetensors", "sha256")


def test_d03_a_bit_flipped_in_a_header_is_caught(saved):
    file = saved / SHARD
    length = struct.unpack("<Q", file.read_bytes()[:8])[0] + 8
    for position in (0, 3, 7, 8, 9, *range(10, length, max(1, length // 40)), length - 1):
        flip(file, position, bit=position % 8)
        refused(lambda: verify(saved), file, "sha256")
        refused(lambda: load(saved))
        flip(file, position, bit=position % 8)
    verify(saved)


def test_d03_every_bit_of_the_manifest_counts(saved):
    manifest = saved / MANIFEST
    before = manifest.read_bytes()
    for position in range(len(before)):
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


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"format_version": 2', b"\xff\xfe{}"])
def test_d05_a_folder_without_a_whole_manifest_is_incomplete(content, saved):
    older = shutil.copytree(saved, saved.parent / "step-00000002")
    newer = saved.rename(saved.parent / "step-00000004")
    if content is None:
        (newer / MANIFEST).unlink()
    else:
        (newer / MANIFEST).write_bytes(content)
    refused(lambda: verify(newer), newer / MANIFEST, "incomplete")
    found, skipped = find_latest(saved.parent)
    assert found == older
    assert [path for path, _ in skipped] == [newer]
    assert "incomplete" in skipped[0][1]


@pytest.mark.parametrize("kind", ["missing", "extra"])
def test_d06_a_tensor_that_is_missing_or_extra_is_listed(kind, whole):
    name = "model.layers.3.mlp.up_proj.weight"

    def change(state):
        if kind == "missing":
            del state[name]
        else:
            state["one.more.weight"] = torch.zeros(2)

    rewrite(whole / "model.safetensors", change)
    refused(lambda: load(whole), whole, name if kind == "missing" else "one.more.weight")


def test_d06_an_index_that_promises_what_no_file_holds(saved):
    def change(index):
        index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = SHARD

    edit(saved / "model.safetensors.index.json", change)
    refused(lambda: weight_files(saved), saved / SHARD, "model.layers.9.mlp.up_proj.weight")


def test_d07_another_shape_is_told_with_both(whole):
    name = "model.layers.3.mlp.up_proj.weight"
    shape = list(load_file(whole / "model.safetensors")[name].shape)

    def change(state):
        state[name] = torch.zeros(shape[0] + 1, shape[1])

    rewrite(whole / "model.safetensors", change)
    refused(lambda: load(whole), name, [shape[0] + 1, shape[1]], shape)


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


def spoil(folder, kind):
    if kind == "cut":
        os.truncate(folder / SHARD, 100)
    elif kind == "flipped":
        flip(folder / SHARD, -1)
    elif kind == "gone":
        (folder / SHARD).unlink()
    elif kind == "unfinished":
        (folder / MANIFEST).unlink()
    elif kind == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif kind == "a file":
        shutil.rmtree(folder)
        folder.write_text("")


KINDS = ["cut", "flipped", "gone", "unfinished", "empty", "a file"]


@pytest.mark.parametrize("kind", KINDS)
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


def test_d11_none_left_is_an_error_with_every_reason(three):
    for folder, kind in zip(three, ("cut", "flipped", "unfinished"), strict=True):
        spoil(folder, kind)
    found, skipped = find_latest(three[0].parent)
    assert found is None
    error = no_checkpoint_left(skipped)
    assert error.exit_code == 4
    for folder in three:
        assert folder.name in str(error)
    assert "incomplete" in str(error) and "sha256" in str(error) and "100 bytes" in str(error)
    assert find_latest(three[0].parent / "nothing") == (None, [])


def test_d11_another_way_to_verify_may_be_given(three):
    seen = []

    def verify_together(folder):
        seen.append(folder.name)
        if len(seen) == 1:
            raise CheckpointError("rank 3 says no")

    assert find_latest(three[0].parent, verify=verify_together)[0] == three[1]
    assert seen == ["step-00000006", "step-00000004"]


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, FORMAT_VERSION + 40, 1, "2", None])
def test_d14_another_format_says_which_version_is_needed(version, saved):
    edit_manifest(saved, lambda manifest: manifest.update(format_version=version))
    message = refused(lambda: verify(saved), f"format version {version}", FORMAT_VERSION)
    is_newer = isinstance(version, int) and version > FORMAT_VERSION
    assert ("Update Stageline" in message) is is_newer


# -- malice --------------------------------------------------------------------------------------


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_d15_pickles_beside_the_weights_are_never_opened(saved, tmp_path):
    canary = tmp_path / "canary"
    content = pickle.dumps(Canary(canary))
    names = ("pytorch_model.bin", "optimizer.pt", ".metadata", "rng_state.pth", "a.ckpt")
    for name in (*names, "training_args.bin"):
        (saved / name).write_bytes(content)
    verify(saved)
    load(saved)
    for name in names:
        if name != ".metadata":
            refused(lambda name=name: find_checkpoint(saved / name), name, "is never opened")
    for name in names:
        shutil.copy(saved / name, saved / "model.safetensors.new")
        refused(lambda: read_header(saved / "model.safetensors.new"), "pickle")
    assert not canary.exists()
    pickle.loads(content)
    assert canary.exists()  # it would have shown


@pytest.mark.parametrize("name", ["model.safetensors", "deep/model.safetensors", "a.index.json"])
def test_d15_files_that_nobody_saved_are_not_loaded(name, saved):
    (saved / "deep").mkdir()
    shutil.copy(saved / SHARD, saved / name)
    refused(lambda: verify(saved), saved / name, "not in the manifest")
    (saved / name).unlink()
    (saved / "notes.txt").write_text("a note may lie here")
    verify(saved)


@pytest.mark.parametrize(
    "name", ["../whole/model.safetensors", "/etc/passwd", "deep/../../x", "..", "", "a\\b", "a\0b"]
)
def test_d16_names_that_lead_out_of_the_folder_are_refused(name, saved):
    def point(index):
        index["weight_map"]["model.norm.weight"] = name

    edit(saved / "model.safetensors.index.json", point)
    refused(lambda: weight_files(saved), "index.json", repr(name), "plain file name")
    edit_manifest(saved, lambda m: m["files"].update({name: {"size": 1, "sha256": "0"}}))
    refused(lambda: verify(saved), MANIFEST, repr(name), "below its folder")


def test_d16_links_that_lead_out_of_the_folder_are_refused(saved, whole, tmp_path):
    shutil.move(saved / SHARD, tmp_path / "elsewhere")
    (saved / SHARD).symlink_to(tmp_path / "elsewhere")
    for call in (lambda: weight_files(saved), lambda: verify(saved)):
        refused(call, saved / SHARD, tmp_path / "elsewhere", "leads out of its folder")
    shutil.move(whole / "model.safetensors", tmp_path / "elsewhere")
    (whole / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    refused(lambda: weight_files(whole), "model.safetensors", "leads out of its folder")


def test_d16_links_within_the_folder_and_within_a_cache_are_followed(originals, whole, tmp_path):
    linked = tmp_path / "linked"
    linked.symlink_to(whole)
    load(linked)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(whole.iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    load(snapshot)


def entry(start, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HEADERS = {
    "length 2^63": (struct.pack("<Q", 1 << 63) + b"{}", f"{1 << 63} bytes"),
    "length above the cap": (
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
        f"at most {MAX_HEADER_BYTES}",
    ),
    "length above the file": (struct.pack("<Q", 1000) + b"{}", "expected 1008 bytes"),
    "too short": (b"abc", "found 3"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, "'b' overlaps"),
    "same place": ({"a": entry(0, 8), "b": entry(0, 8)}, "'b' overlaps"),
    "hole": ({"a": entry(0, 8), "b": entry(9, 17)}, "'b' leaves a hole"),
    "beyond the end": ({"a": entry(0, 8), "b": entry(8, 16)}, "found 8 bytes|by its header"),
    "data that belongs to none": ({"a": entry(0, 4, (1,))}, "by its header"),
    "backwards": ({"a": entry(8, 0)}, "expected at 0"),
    "negative": ({"a": entry(-8, 0)}, "offsets"),
    "overflow": ({"a": entry(0, 8, (1 << 62, 1 << 62))}, "overflows"),
    "overflow with a zero": ({"a": entry(0, 8, (1 << 62, 1 << 62, 0))}, "overflows"),
    "wrong size": ({"a": entry(0, 8, (3,))}, "expected 12 bytes, found 8"),
    "unknown dtype": ({"a": entry(0, 8, dtype="F31")}, "unknown dtype 'F31'"),
    "a float as length": ({"a": entry(0, 8, (2.0,))}, "shape"),
    "a truth as length": ({"a": entry(0, 8, (True, 2))}, "shape"),
    "doubled name": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
        "'a' twice",
    ),
    "not UTF-8": (b'{"\xff":1}', "UTF-8"),
    "no JSON": (b"{]", "no JSON"),
    "nesting": (b'{"a":' + b"[" * 200_000, "no JSON"),
    "a list": (b"[]", "does not begin with"),
    "NaN": (b'{"a":NaN}', "NaN"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry(0, 8)}, "__metadata__"),
    "HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "looks like HTML"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "Git LFS pointer",
    ),
    "zip": (b"PK\x03\x04" + bytes(100), "zip archive"),
    "GGUF": (b"GGUF" + bytes(100), "GGUF"),
    "zeros": (bytes(100), "begins with zeros"),
    "JSON": (b'{"error": "not found"}', "JSON"),
}
RAW = {"length", "too", "HTML", "LFS", "zip", "GGUF", "zeros", "JSON"}


@pytest.mark.parametrize("case", HEADERS)
def test_d17_false_headers_are_refused_before_anything_is_allocated(case, tmp_path):
    header, words = HEADERS[case]
    file = tmp_path / "model.safetensors"
    if case.split()[0] in RAW and isinstance(header, bytes):
        file.write_bytes(header)
    else:
        with_header(file, header, bytes(8))
    message = refused(lambda: weight_files(tmp_path), file)
    assert re.search(words, message), message


def test_d18_a_file_that_is_cut_while_it_is_read_ends_with_a_message(whole, monkeypatch):
    """Mapped, it would end the process by a bus error, without a word."""
    file = whole / "model.safetensors"
    read, size = checkpoint_files.read_tensor, file.stat().st_size

    def cut_then_read(*arguments):
        os.truncate(file, size // 4)
        return read(*arguments)

    monkeypatch.setattr(checkpoint_files, "read_tensor", cut_then_read)
    refused(lambda: load(whole), file, "the tensor model.", "cut short or changed while")


def test_d19_a_folder_a_pipe_or_nothing_in_place_of_a_file(whole, tmp_path):
    refused(lambda: find_checkpoint(tmp_path / "gone"), tmp_path / "gone", code=2)
    file = whole / "model.safetensors"
    refused(lambda: read_header(tmp_path / "gone.safetensors"), "gone.safetensors", "No such file")
    file.unlink()
    message = refused(lambda: weight_files(whole), whole, "neither", "config.json")
    assert "os error" not in message
    file.mkdir()
    refused(lambda: weight_files(whole), file, "it is a folder")
    file.rmdir()
    os.mkfifo(file)
    refused(lambda: weight_files(whole), file, "a pipe")
