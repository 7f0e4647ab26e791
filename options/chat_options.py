"""The options of chat.py."""

from dataclasses import dataclass

from options.chat_server_options import ChatServerOptions
from options.fields import option
from options.model_options import ModelOptions
from options.placement_options import PlacementOptions


@dataclass(kw_only=True)
class ChatConfig(ChatServerOptions, PlacementOptions, ModelOptions):
    """Chat"""

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
    num_devices: int | None = option(
        None, "devices that the model is spread over; default: all", at_least=1
    )
