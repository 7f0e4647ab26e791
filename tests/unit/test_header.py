"""Our look at safetensors headers against the library's: what it refuses, we refuse too."""

import json
import random
import re
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from stageline.checkpoint.header import _BITS, read_header
from stageline.errors import CheckpointError

NUMBERS = [b"-0", b"1.0", b"1e1", b"18446744073709551616", b"9223372036854775808", b"NaN"]
NUMBERS += [b"null", b"true", b"[1]", b"007", b"-1", b'"2"', b"0"]


def library_takes(file):
    try:
        with safe_open(file, "pt", backend="pread") as opened:
            list(opened.keys())
    except Exception:
        return False
    return True


def random_file(rng):
    """A valid file of up to three tensors, then most often something is wrong with it."""
    entries, end = {}, 0
    for number in range(rng.randrange(4)):
        dtype, shape = rng.choice(list(_BITS)), [rng.randrange(5) for _ in range(rng.randrange(4))]
        bits = _BITS[dtype]
        for length in shape:
            bits *= length
        start, end = end, end + (bits + 7) // 8
        entries[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    if rng.random() < 0.3:
        entries["__metadata__"] = rng.choice([{"a": "b"}, None, {"a": 1}, [], {}])
    text = json.dumps(entries).encode() + b" " * rng.randrange(3)
    kind = rng.random()
    numbers = list(re.finditer(rb"\d+", text))
    if kind < 0.2 and numbers:
        match = rng.choice(numbers)
        text = text[: match.start()] + rng.choice(NUMBERS) + text[match.end() :]
    content = bytearray(struct.pack("<Q", len(text)) + text + bytes(end))
    if 0.2 < kind < 0.6:
        for _ in range(rng.randrange(1, 3)):
            content[rng.randrange(len(text) + 8)] ^= 1 << rng.randrange(8)
    elif 0.6 < kind < 0.7:
        del content[rng.randrange(len(content)) :]
    elif 0.7 < kind < 0.8:
        content += b"x"
    return bytes(content)


def test_the_library_and_we_agree_on_random_files(tmp_path):
    rng, file = random.Random(7), tmp_path / "a.safetensors"
    taken = 0
    for _ in range(2500):
        content = random_file(rng)
        file.write_bytes(content)
        try:
            read_header(file)
            ours = True
        except CheckpointError as error:
            # the library lets a name stand twice
            ours = "twice" in str(error) and library_takes(file)
        assert ours == library_takes(file), content
        taken += ours
    assert 300 < taken < 2200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_entries_are_those_of_the_file(dtype, tmp_path):
    state = {"a": torch.ones(3, 4).to(dtype), "b": torch.ones(()).to(dtype), "c": torch.ones(0, 2)}
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "a.safetensors")
    assert {name: entry.shape for name, entry in entries.items()} == {
        name: tuple(value.shape) for name, value in state.items()
    }
    assert entries["a"].end - entries["a"].start == state["a"].nbytes
    assert entries["a"].is_floating_point == dtype.is_floating_point
