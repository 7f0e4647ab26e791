"""The options of a model that answers, where there is no run with data around it."""

from dataclasses import dataclass
from typing import Any, Literal

from options.fields import OptionError, option


@dataclass(kw_only=True)
class ModelOptions:
    """Model and machine"""

    model_path: str | None = option(
        None, "model folder, checkpoint of a run, or adapter folder", is_path=True
    )
    adapter_path: list[str] | None = option(
        None,
        "LoRA adapter folder in peft's format; several are merged one after the other",
        is_path=True,
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes GPUs where there are any")
    bf16: bool = option(False, "compute in bfloat16")
    fp16: bool = option(False, "compute in float16")
    trust_remote_code: bool = option(False, "run Python code that lies in the model folder")

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The compute type by its short name."""
        return precision_of(self)


def precision_of(config: Any) -> Literal["fp32", "bf16", "fp16"]:
    """The compute type that the options bf16 and fp16 say."""
    return "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"


def check_has_model(config: ModelOptions) -> None:
    """Refuses options that name no model."""
    if config.model_path is None:
        raise OptionError(
            "--model-path is missing. A folder with config.json and weights, or an adapter folder, "
            "was expected, because it is what answers: give the checkpoint of a run, such as "
            "runs/digits/checkpoints/step-00000400."
        )
