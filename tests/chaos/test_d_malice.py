"""Malice in the files of a checkpoint, and files that are none: refused with exit code 4."""

import json
import os
import pickle
import re
import shutil
import struct

import pytest

from stageline.checkpoint import files as checkpoint_files
from stageline.checkpoint.files import find_checkpoint, tensor_names, weight_files
from stageline.checkpoint.layout import MANIFEST, verify
from tests.helpers.faulty_files import Canary, edit, edit_manifest, load, refused

SHARD = "model-00002-of-00002.safetensors"


def with_header(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


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


@pytest.mark.parametrize("name", ["model.safetensors", "deep/model.safetensors"])
def test_d15_files_that_nobody_saved_are_not_loaded(name, saved):
    (saved / "deep").mkdir()
    shutil.copy(saved / SHARD, saved / name)
    refused(lambda: verify(saved), saved / name, "not in the manifest")
    (saved / name).unlink()
    (saved / "notes.txt").write_text("a note may lie here")
    verify(saved)


@pytest.mark.parametrize("name", ["../whole/model.safetensors", "/etc/passwd", ""])
def test_d16_names_that_lead_out_of_the_folder_are_refused(name, saved):
    def point(index):
        index["weight_map"]["model.norm.weight"] = name

    edit(saved / "model.safetensors.index.json", point)
    refused(lambda: weight_files(saved), "index.json", repr(name), "plain file name")
    edit_manifest(saved, lambda m: m["files"].update({name: {"size": 1, "sha256": "0"}}))
    refused(lambda: verify(saved), MANIFEST, repr(name), "below its folder")


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
    "length 2^63": (struct.pack("<Q", 1 << 63) + b"{}", "header too large"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, "offset for tensor `b`"),
    "no JSON": (b"{]", "invalid JSON"),
    "HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "looks like HTML"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "Git LFS pointer",
    ),
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
