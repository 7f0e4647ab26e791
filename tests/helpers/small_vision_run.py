"""`small_run.Job` for a vision-language model: a tower of 3 blocks, rows with an image and without.

An image is one of three pictures of noise of unequal sizes; every third row has none.
"""

import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, PretrainedConfig

from tests.helpers.small_run import Job
from tests.helpers.tiny_models import tiny_config, tiny_processor

VISION_OPTIONS = ("--image-token", "auto", "--prompt", "vqa", "--max-token-num", 128)


def with_blocks(config: PretrainedConfig, num_blocks: int) -> PretrainedConfig:
    """Return the configuration with a tower of `num_blocks` blocks."""
    vision = config.vision_config
    setattr(vision, "depth" if hasattr(vision, "depth") else "num_hidden_layers", num_blocks)
    return config


class VisionJob(Job):
    """A folder with a tiny vision-language model, its processor and 24 rows."""

    def __init__(
        self, folder: Path, *, family: str = "internvl", num_rows: int = 24, dropout: float = 0.0
    ) -> None:
        self.folder = folder
        self.family = family
        self.model = folder / "model"
        self.rows = folder / "rows.jsonl"
        processor = tiny_processor(family)
        processor.save_pretrained(self.model)
        torch.manual_seed(1)
        config = with_blocks(tiny_config(family, vocab_size=len(processor.tokenizer)), 3)
        config.vision_config.hidden_dropout_prob = dropout  # where the family has it
        AutoModelForImageTextToText.from_config(config).save_pretrained(self.model)
        for number in range(3):
            picture = Image.effect_noise((20 + 10 * number, 24), 90).convert("RGB")
            picture.save(folder / f"{number}.png")
        rows = [
            {"id": str(i), "question": f"{i}?", "answer": "!" * (1 + i % 7)}
            | ({"image": f"{i % 4}.png"} if i % 4 < 3 else {})
            for i in range(num_rows)
        ]
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(
        self, name: str, *options: str | Path | int, torchrun: tuple[str | int, ...] = ()
    ) -> list[str]:
        """Return the command as for text, with image tokens; `options` win."""
        return super().command(name, *VISION_OPTIONS, *options, torchrun=torchrun)
