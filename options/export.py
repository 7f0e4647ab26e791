"""The options of export.py."""

from typing import Literal

from options.fields import OptionError, Options, num_bytes, option


class ExportConfig(Options):
    """Export"""

    model_path: str | None = option(
        None, "checkpoint, model or hub name", is_path=True, takes_name=True, is_needed=True
    )
    output_path: str | None = option(None, "new folder", is_output=True, is_needed=True)
    merge: bool = option(False, "add an adapter to its base, not keep it for peft")
    adapter_path: list[str] | None = option(
        None, "adapters to add in turn, folders or hub names", is_path=True, takes_name=True
    )
    adapter_weights: list[float] | None = option(
        None, "share of each adapter; default: 1", needs=("--adapter-path FOLDER",)
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "type of the weights (auto = as they are)"
    )
    max_shard_size: str = option("5GB", "largest file")
    overwrite: bool = option(False, "replace a model folder at --output-path")
    trust_remote_code: bool = option(False, "run and copy Python code of the model folder")


def shard_bytes(config: ExportConfig) -> int:
    """Return the bytes of --max-shard-size."""
    try:
        return num_bytes(config.max_shard_size)
    except ValueError as error:
        raise OptionError(f"--max-shard-size cannot be read: {error}.") from error
