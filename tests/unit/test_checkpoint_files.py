"""What is read of a safetensors file without its weights."""

import pytest
import torch
from safetensors.torch import save_file

from stageline.checkpoint.files import tensor_names
from stageline.checkpoint.load import dtypes_of, integer_weights


@pytest.mark.parametrize(
    "dtype, name",
    [
        (torch.float32, "F32"),
        (torch.bfloat16, "BF16"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.int8, "I8"),
        (torch.bool, "BOOL"),
    ],
)
def test_names_and_dtypes_are_those_of_the_file(dtype, name, tmp_path):
    file = tmp_path / "a.safetensors"
    state = {"a.weight": torch.ones(3, 4).to(dtype), "b.weight": torch.ones(0, 2)}
    save_file(state, file, metadata={"format": "pt"})
    assert set(tensor_names(file)) == set(state)
    dtypes = dtypes_of(dict.fromkeys(state, file))
    assert dtypes == {"a.weight": name, "b.weight": "F32"}
    integers = [] if dtype.is_floating_point else [f"a.weight ({name})"]
    assert integer_weights(dtypes, {"weight"}) == integers
