"""A tiny chat model for servers, what plain transformers answers with it, and when one is up."""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.small_run import ForkedRun
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer

NUM_TOKENS = 12
STOP_IDS = (2, 4)
SECONDS_TO_START = 100


@dataclass(frozen=True)
class ServedModel:
    """A model with its tokenizer, in a folder named `tiny`."""

    folder: Path
    whole: Any
    tokenizer: Any

    @classmethod
    def save(cls, parent: Path, *, positions: int) -> "ServedModel":
        """Makes one with random weights."""
        tokenizer = tiny_tokenizer(eos_token="<|im_end|>")
        config = {"vocab_size": len(tokenizer), "max_position_embeddings": positions}
        whole = tiny_whole("llama", parent / "tiny", noise=0.2, **config)
        tokenizer.save_pretrained(parent / "tiny")
        return cls(parent / "tiny", whole, tokenizer)

    def answer(self, question: str) -> str:
        """Return the likeliest answer of at most `NUM_TOKENS`, by `generate`."""
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        made = self.whole.generate(
            ids,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=list(STOP_IDS),
        )
        return self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def wait_for_url(run: ForkedRun) -> str:
    """Return the URL of a server, without `/v1`, as soon as the server prints it.

    Raises:
        AssertionError: it ended, or is not up in time.
    """
    until = time.monotonic() + SECONDS_TO_START
    while run.is_running() and time.monotonic() < until:
        if found := re.search(r"serving \S+ at (\S+)/v1", run.text("out")):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(run.wait(1).err)
