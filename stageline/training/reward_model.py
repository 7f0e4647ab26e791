"""Score answers with a model of any family: a sequence classifier with one label, on one device."""

import functools
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from stageline.checkpoint.adapter import base_of, processor_folder
from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.checkpoint.plain_model import CLASSIFIER, load_plain
from stageline.data.batches.batch import (
    Sample,
    add_image_inputs,
    encode_sample,
    pad_rows,
    sample_name,
)
from stageline.data.images.image_files import ImageSettings
from stageline.data.images.images import ImageExpander
from stageline.data.text.chat import render_chat
from stageline.data.text.chat_template import template_of
from stageline.data.text.encode import Encoded
from stageline.data.text.messages import tools_of, turns_of
from stageline.data.text.processor import get_pad_token_id, load_processor, num_token_ids
from stageline.data.text.rendered import place_image_text, plain_image_text
from stageline.errors import CheckpointError, UserError
from stageline.inference.generation import num_positions
from stageline.model_folder import find_folder

Precision = Literal["auto", "float32", "bfloat16", "float16"]
_loading = threading.Lock()  # a late call may still load when that of the next step comes


def reward_model(path: str, *, device: str = "cpu", dtype: Precision = "auto") -> "RewardModel":
    """Return the reward model of a folder, loaded the first time; see `RewardModel`."""
    with _loading:
        return _loaded(find_folder(path, option="`path` of the reward"), device, dtype)


class RewardModel:
    """Scores answers to prompts.

    Args:
        folder: of a classifier, or of an adapter with its `score`; only safetensors.
        device: as torch names it; an accelerator without a number is the current one.
        dtype: of its weights; auto: as in the files.

    Raises:
        UserError: there is no model that gives a score, or it has no chat template.
        CheckpointError: weights are missing or damaged, or the tokenizer is another model's.
    """

    def __init__(self, folder: Path, device: str, dtype: Precision) -> None:
        model: Any = load_plain(folder, dtype=None if dtype == "auto" else getattr(torch, dtype))
        name, count = type(model).__name__, getattr(model.config, "num_labels", 0)
        if not (has_head := name.endswith(CLASSIFIER)) or count != 1:
            came = f"with {count} labels" if has_head else "which has no score head"
            raise UserError(
                f"{folder} holds a {name}, {came}. Take a sequence classifier with one label: a "
                "checkpoint that `loss_fn` rm trained, or a reward model of transformers."
            )
        if (folder / ADAPTER_CONFIG).exists():
            folder = processor_folder(folder, base_of(folder))
        self.model, self.processor = model.to(device).requires_grad_(False), load_processor(folder)
        expander = ImageExpander.of(self.processor)
        self.sees = expander is not None
        if expander is not None:  # the run has looked at sizes by its own limit
            expander.use(ImageSettings(max_pixels=sys.maxsize))
        text = model.config.get_text_config(decoder=True)
        text.use_cache = False
        num_ids = num_token_ids(self.processor)
        num_rows = model.get_input_embeddings().weight.shape[0]
        if text.pad_token_id not in range(num_rows):  # None or, of older models, -1
            text.pad_token_id = get_pad_token_id(self.processor)
        # transformers finds the end of a row by it, where the score is read
        self.pad_token_id = int(text.pad_token_id)
        self.longest = num_positions(model)
        if num_ids > num_rows:
            raise CheckpointError(
                f"the tokenizer in {folder} has {num_ids} token ids, the reward model {num_rows} "
                "rows: the tokenizer is another model's. Copy the reward model's own there."
            )
        if template_of(self.processor) is None:
            raise UserError(
                f"the tokenizer in {folder} has no chat template. Put its chat_template.jinja "
                "there."
            )

    @torch.no_grad()
    def __call__(
        self,
        samples: Sequence[Sample],
        completions: Sequence[str],
        *,
        prompt: str,
        batch_size: int = 8,
    ) -> list[float | None]:
        """Return the score of each completion as an answer to its sample.

        None of one that is too long, or that the chat template would write as another text.

        Args:
            samples: with `messages`, or with the fields of `prompt`; `images` are PIL images, which
                a text model does not get.
            prompt: a template, whose text before [ANSWER] is the user's turn.
            batch_size: rows at once, those of near-equal length together.

        Raises:
            UserError: the chat template can write none of them.
        """
        images = [list(sample.get("images") or ()) if self.sees else [] for sample in samples]
        made = [self._encode(*one, prompt) for one in zip(samples, completions, images)]
        rows = {number: one for number, one in enumerate(made) if isinstance(one, Encoded)}
        if made and not rows:
            raise next(one for one in made if isinstance(one, UserError))
        fitting = [n for n, row in rows.items() if len(row) <= (self.longest or len(row))]
        fitting.sort(key=lambda number: len(rows[number]))
        scores: list[float | None] = [None] * len(made)
        for start in range(0, len(fitting), batch_size):
            chosen = fitting[start : start + batch_size]
            own = [rows[number] for number in chosen]
            batch = pad_rows(own, pad_token_id=self.pad_token_id, with_labels=False)
            add_image_inputs(
                batch,
                [images[number] for number in chosen],
                processor=self.processor,
                names=[sample_name(samples[number]) for number in chosen],
                with_pixels=True,
            )
            device, dtype = self.model.device, self.model.dtype
            given = {
                name: value.to(device, dtype if value.is_floating_point() else None)
                for name, value in batch.items()
            }
            found = self.model(**given).logits[:, 0].float().tolist()
            for number, score in zip(chosen, found, strict=True):
                scores[number] = score
        return scores

    def _encode(
        self, sample: Sample, completion: str, images: Sequence[Any], prompt: str
    ) -> Encoded | UserError:
        """Return the row of a conversation that ends with the completion, or why there is none."""
        name = sample_name(sample)
        answered = {**sample, "num_images": len(images)}
        if messages := sample.get("messages"):  # another last message
            messages = messages[:-1] if messages[-1].get("role") == "assistant" else messages
            answered["messages"] = [*messages, {"role": "assistant", "content": completion}]
        else:
            answered["answer"] = completion
        turns = turns_of(answered, prompt, system=None, for_generation=False)
        if not images:  # a place for one may be in a message
            texts = [tuple(one for one in turn.pieces if not one.is_image) for turn in turns]
            turns = [replace(turn, pieces=own) for turn, own in zip(turns, texts, strict=True)]
        try:
            rendered = render_chat(turns, self.processor, tools=tools_of(sample))
        except UserError as error:  # a run must not end for what one answer says
            return error
        if images:
            rendered = place_image_text(rendered, plain_image_text(self.processor))
        rendered = replace(rendered, name=name)
        return encode_sample(rendered, images, processor=self.processor, name=name)


_loaded = functools.cache(RewardModel)
