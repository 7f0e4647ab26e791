"""The options of a run that answers: evaluate.py and infer.py."""

from dataclasses import dataclass

from options.fields import option


@dataclass(kw_only=True)
class AnswerOptions:
    """Answers"""

    adapter_path: list[str] | None = option(
        None,
        "LoRA adapter folder in peft's format; several are merged one after the other",
        is_path=True,
    )
    adapter_weights: list[float] | None = option(
        None, "how much of each adapter is added; default: all of it"
    )
    batch_size: int = option(8, "samples generated together", at_least=1)
    max_new_tokens: int = option(64, "longest answer, in tokens", at_least=1)
    temperature: float = option(0.0, "0 takes the likeliest token, more samples", at_least=0)
    num_devices: int | None = option(
        None, "devices that the model is spread over; default: all", at_least=1
    )
    limit: int | None = option(None, "answer only the first samples", at_least=1)
