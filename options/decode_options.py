"""The options of pipelined decoding: how a model is spread over processes that answer together."""

from dataclasses import dataclass
from typing import Literal

from options.fields import option


@dataclass(kw_only=True)
class DecodeOptions:
    """Pipelined decoding (--engine pipeline)"""

    num_stages: int | None = option(
        None, "stages, one process and device each; default: all GPUs, 1 on the CPU", at_least=1
    )
    num_replicas: int | None = option(
        None,
        "copies of the pipeline that share the work; default: as many as the GPUs allow",
        at_least=1,
    )
    partition: list[int] | None = option(
        None, "layers of each stage, 12,10; default: what evens out a decoding step"
    )
    prove_split: Literal["auto", "always", "never"] = option(
        "auto",
        "compare the stages with the whole model first, on a cut-down copy; auto: unless that is "
        "recorded of this model, these versions and options",
    )
    train_model: str | None = option(
        None, "key of the stages' train_model part; default: that of the model's architecture"
    )
    max_running: int = option(64, "sequences that are answered at a time", at_least=1)
    num_groups: int | None = option(
        None,
        "groups that these are divided into, so that all stages work; default: what short "
        "measurements at the start advise",
        at_least=1,
    )
    prefill_tokens: int = option(
        2048,
        "tokens of prompts that are read in one pass; longer ones are read in pieces",
        at_least=1,
    )
    max_length: int | None = option(
        None,
        "longest prompt with its answer, in tokens; default: the model's positions",
        at_least=2,
    )
    cache_gib: float | None = option(
        None,
        "GiB on each device for keys and values; default: 0.8 of what is free on a GPU, 0.25 of "
        "the host's free memory",
        at_least=0,
    )
    merge_adapters: bool = option(
        False, "add adapters to the weights: fewer operations, rounded differently"
    )
