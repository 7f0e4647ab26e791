"""Malice in the files of a checkpoint, and files that are none: refused with exit code 4."""

import os
import pickle
import shutil
import struct

import pytest

from stageline.checkpoint import files as checkpoint_files
from stageline.checkpoint.files import find_checkpoint, tensor_names, weight_files
from stageline.checkpoint.layout import MANIFEST, verify
from tests.helpers.faulty_files import Canary, edit, edit_manifest, load, refused

SHARD = "model-00002-of-00002.safetensors"


# -- malice --------------------------------------------------------------------------------------


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
        refused(lambda: tensor_names(saved / "model.safetensors.new"), "pickle")
    assert not canary.exists()
    pickle.loads(content)
    assert canary.exists()  # it would have shown


@pytest.mark.parametrize("name", ["../whole/model.safetensors", "/etc/passwd", ""])
def test_d16_names_that_lead_out_of_the_folder_are_refused(name, saved):
    def point(index):
        index["weight_map"]["model.norm.weight"] = name

    edit(saved / "model.safetensors.index.json", point)
    refused(lambda: weight_files(saved), "index.json", repr(name), "plain file name")
    edit_manifest(saved, lambda m: m["files"].update({name: {"size": 1, "sha256": "0"}}))
    refused(lambda: verify(saved), MANIFEST, repr(name), "below its folder")


FALSE = {
    "length 2^63": (struct.pack("<Q", 1 << 63) + b"{}", "header too large"),
    "no JSON": (struct.pack("<Q", 2) + b"{]" + bytes(8), "invalid JSON"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
}


@pytest.mark.parametrize("case", FALSE)
def test_d17_false_headers_are_refused_before_anything_is_allocated(case, tmp_path):
    content, words = FALSE[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    refused(lambda: weight_files(tmp_path), file, words)


def test_d18_a_file_that_is_cut_while_it_is_read_ends_with_a_message(whole, monkeypatch):
    """Read without a mapping, which would end the process silently by a bus error."""
    file = whole / "model.safetensors"
    read, size = checkpoint_files.read_tensor, file.stat().st_size

    def cut_then_read(*arguments):
        os.truncate(file, size // 4)
        return read(*arguments)

    monkeypatch.setattr(checkpoint_files, "read_tensor", cut_then_read)
    refused(lambda: load(whole), file, "the tensor model.", "cut short or changed while")
