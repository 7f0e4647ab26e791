"""A whole model whose linear layers the library keeps in few bits, by bitsandbytes."""

import importlib
from typing import Any, Literal

import torch
from transformers import BitsAndBytesConfig

from stageline.errors import UserError

Kind = Literal["nf4", "int8"]


def quantization_settings(kind: str) -> dict[str, Any]:
    """What config.json would say of it: enough to count bytes, without the package."""
    bits = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True}
    return {"quant_method": "bitsandbytes", **bits}


def quantization_config(kind: str, dtype: torch.dtype | None) -> Any:
    """What `from_pretrained` takes.

    Args:
        dtype: in which layers multiply.

    Raises:
        UserError: the package is missing.
    """
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise UserError(
            f"--builder.quantization {kind} came, and bitsandbytes cannot be imported ({error}); "
            "it was expected, because it makes the numbers. Install it (pip install "
            "bitsandbytes), or leave the option out."
        ) from error
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
