"""Options of export.py."""

from typing import Literal

from options.fields import Options, model_option, num_bytes, option


class ExportConfig(Options):
    """Output"""

    model_path: str | None = model_option(None, "checkpoint, model or hub name", is_needed=True)
    output_path: str | None = option(None, "folder to create", is_output=True, is_needed=True)
    merge: bool = option(False, "merge the adapter into its base, not export it in peft's format")
    adapter_path: list[str] | None = model_option(None, "adapters to merge: folders or hub names")
    adapter_weights: list[float] | None = option(
        None, "weight of each adapter; default: 1", needs=("--adapter-path FOLDER",)
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "dtype (auto = kept)")
    max_shard_size: str = option("5GB", "largest weight file, such as 5GB")
    overwrite: bool = option(False, "replace a model folder at --output-path")
    trust_remote_code: bool = option(False, "run and copy the Python code of the model folder")


def shard_bytes(config: ExportConfig) -> int:
    """Return the bytes of --max-shard-size."""
    return num_bytes(config.max_shard_size, "--max-shard-size")
