"""Options that collate parts get besides the samples, for tests."""

from typing import Any

from prompt_fn import fill, none


def collate_options(processor: Any, **changes: Any) -> dict[str, Any]:
    """Return the options of a collate part on one stage: a question and its answer, no images."""
    texts = {"prompt": "[QUESTION]\n[ANSWER]", "prompt_fn": fill, "image_token": none}
    fixed = {"pad_token_id": 0, "max_token_num": 200, "stage": 0, "num_stages": 1}
    return {**texts, **fixed, "processor": processor, **changes}
