"""Tiny checkpoints with prompts and the answers of transformers' `generate`, in float32.

The weights are large, so that answers vary and are far from ties: no rounding can turn a token.
Shapes: [1, T] for the T tokens of one prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from stageline.checkpoint.load import quiet
from stageline.data.text.processor import get_tokenizer, save_processor
from tests.helpers.tiny_checkpoints import auto_class
from tests.helpers.tiny_models import (
    tiny_config,
    tiny_mllama_config,
    tiny_mllama_processor,
    tiny_processor,
    tiny_tokenizer,
)

Prompt = Mapping[str, Tensor]
# the second likeliest token is at least so far behind, in units of the logits' deviation
LEAST_MARGIN = 1e-3
FIRST_SEEDS = {"llama": 1, "gpt_neox": 11}  # earlier ones come near ties, or repeat one token
FIRST_TEXT_ID = 9  # below it are special tokens
PROMPT_LENGTHS = (1, 40, 7, 23, 2, 12, 31, 5, 17, 3, 28, 9, 36, 4, 14, 20)


@dataclass(frozen=True)
class DecodedModel:
    """A saved model and its answers.

    Attributes:
        prompts: tensors of one prompt each.
        answers: token ids of each answer, which continues past any end token.
    """

    family: str
    folder: Path
    processor: Any
    prompts: tuple[Prompt, ...]
    answers: tuple[tuple[int, ...], ...]


def decoded_text_model(
    family: str, folder: Path, *, num_prompts: int = 3, num_tokens: int = 30, tied: bool = False
) -> DecodedModel:
    """Return a decoder with prompts of mixed lengths, 1 to 40 tokens."""
    tokenizer = tiny_tokenizer()
    positions = {"max_position_embeddings": 128}
    if family == "gpt2":
        positions["n_positions"] = 128
    config = tiny_config(family, tied=tied, vocab_size=len(tokenizer), **positions)
    prompts = text_prompts(PROMPT_LENGTHS[:num_prompts], vocab_size=len(tokenizer))
    return _decoded(family, folder, tokenizer, config, prompts=prompts, num_tokens=num_tokens)


def decoded_vision_model(
    family: str, folder: Path, *, encode: Callable[[Any], Sequence[Prompt]], num_tokens: int = 16
) -> DecodedModel:
    """Return a vision-language model.

    Args:
        family: one of `VISION_LANGUAGE`, or "mllama".
        encode: processor -> prompts, with images or without.
    """
    if family == "mllama":
        processor, make = tiny_mllama_processor(), tiny_mllama_config
    else:
        processor, make = tiny_processor(family), lambda **fields: tiny_config(family, **fields)
    config = make(vocab_size=len(get_tokenizer(processor)), max_position_embeddings=1024)
    prompts = tuple(encode(processor))
    return _decoded(family, folder, processor, config, prompts=prompts, num_tokens=num_tokens)


def text_prompts(lengths: Sequence[int], *, vocab_size: int, seed: int = 0) -> tuple[Prompt, ...]:
    """Return prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(FIRST_TEXT_ID, vocab_size, (1, length), generator=generator)
        for length in lengths
    ]
    return tuple({"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows)


def load_whole(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load transformers' model, with answers that no end token cuts short."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    auto = transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        auto = transformers.AutoModelForImageTextToText
    # transformers 5.17 selects sdpa for Gemma 2, and sdpa ignores the cap of its attention scores
    own = {"attn_implementation": "eager"} if config.model_type == "gemma2" else {}
    model = auto.from_pretrained(folder, dtype=dtype, local_files_only=True, **own).eval()
    model.generation_config.eos_token_id = None
    return model


def generated(
    model: PreTrainedModel, prompts: Sequence[Prompt], num_tokens: int
) -> tuple[list[tuple[int, ...]], float]:
    """Return the greedy answer to each prompt alone, and the least margin of all their steps."""
    answers, least = [], float("inf")
    for prompt in prompts:
        options = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
        told = {"output_logits": True, "return_dict_in_generate": True}
        found = model.generate(**prompt, **options, **told)
        answers.append(tuple(found.sequences[0, prompt["input_ids"].shape[1] :].tolist()))
        logits_NV = torch.cat(found.logits).float()
        best_N2 = logits_NV.topk(2).values
        margins_N = (best_N2[:, 0] - best_N2[:, 1]) / logits_NV.std(dim=-1)
        least = min(least, margins_N.min().item())
    return answers, least


def _decoded(
    family: str,
    folder: Path,
    processor: Any,
    config: Any,
    *,
    prompts: tuple[Prompt, ...],
    num_tokens: int,
) -> DecodedModel:
    first = FIRST_SEEDS.get(family, 0)
    for seed in range(first, first + 20):
        model = _make_model(family, config, seed)
        with quiet():
            answers, margin = generated(model, prompts, num_tokens)
            vary = len(set(answers)) == len(answers) and all(len(set(ids)) > 5 for ids in answers)
            if margin > LEAST_MARGIN and vary:
                model.save_pretrained(folder)
                save_processor(processor, folder)
                return DecodedModel(family, folder, processor, prompts, tuple(answers))
    raise AssertionError(f"no seed gives a {family} whose answers vary and are far from ties")


def _make_model(family: str, config: Any, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    scale = 0.25 if family == "mllama" else 0.5  # above it, images drown all text there
    auto = transformers.AutoModelForImageTextToText if family == "mllama" else auto_class(family)
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
            if "gate" in name and parameter.numel() == 1:
                parameter.fill_(2.0)  # mllama's: closed, layers would not see images
    model.generation_config.eos_token_id = None
    return model
