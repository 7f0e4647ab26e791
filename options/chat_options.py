"""The options of chat.py."""

from dataclasses import dataclass
from typing import Literal

from options.chat_server_options import ChatServerOptions
from options.fields import option
from options.placement_options import PlacementOptions
from options.run_options import EvaluateConfig


@dataclass(kw_only=True)
class ChatConfig(ChatServerOptions, PlacementOptions):
    """Chat"""

    model_path: str | None = option(
        None, "model folder, checkpoint of a run, or adapter folder", is_path=True
    )
    adapter_path: list[str] | None = option(
        None,
        "LoRA adapter folder in peft's format; several are merged one after the other",
        is_path=True,
    )
    adapter_weights: list[float] | None = option(
        None, "how much of each adapter is added; default: all of it"
    )
    max_new_tokens: int = option(512, "longest answer, in tokens", at_least=1)
    temperature: float = option(0.0, "0 takes the likeliest token, more samples", at_least=0)
    top_p: float = option(
        1.0, "with a temperature: the likeliest tokens that hold this share", at_least=0, at_most=1
    )
    top_k: int = option(50, "with a temperature: so many of the likeliest tokens", at_least=0)
    repetition_penalty: float = option(
        1.0, "above 1 makes tokens that were there before less likely", at_least=0.01
    )
    seed: int = option(0, "seed of sampling", at_least=0)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes GPUs where there are any")
    num_devices: int | None = option(
        None, "devices that the model is spread over; default: all", at_least=1
    )
    bf16: bool = option(False, "compute in bfloat16")
    fp16: bool = option(False, "compute in float16")
    trust_remote_code: bool = option(False, "run Python code that lies in the model folder")

    precision = EvaluateConfig.precision
