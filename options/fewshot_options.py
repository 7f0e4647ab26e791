"""The options of examples that a model is shown before each question of an evaluation."""

from dataclasses import dataclass
from typing import Literal

from options.fields import option

NAMES = ("num-fewshot", "fewshot-split", "fewshot-seed", "fewshot-per-sample")


@dataclass(kw_only=True)
class FewshotOptions:
    """Examples in the prompt"""

    num_fewshot: int = option(
        0, "solved samples before each question: turns of a chat, or filled templates", at_least=0
    )
    fewshot_split: Literal["train", "test"] = option(
        "train", "split that they are drawn from; a sample is never its own example"
    )
    fewshot_seed: int = option(0, "seed of the draw", at_least=0)
    fewshot_per_sample: bool = option(False, "draw for each sample anew; else all have the same")
