"""Prompts of single requests -> the inputs of one pass, padded on the left."""

from collections.abc import Mapping, Sequence

import torch

Prompt = Mapping[str, torch.Tensor]
MASK = "attention_mask"  # made from the lengths, on each stage


def length_of(prompt: Prompt) -> int:
    """Tokens of a prompt."""
    return prompt["input_ids"].shape[1]


def no_cells(prompt: Prompt) -> int:
    """What images take in the cache besides their tokens, where models see them as tokens."""
    return 0


def is_alone(prompt: Prompt) -> bool:
    """Whether it is read by itself: what images bring is not padded to that of others."""
    shape = prompt["input_ids"].shape
    return any(value.shape != shape or value.is_floating_point() for value in prompt.values())


def padded_right(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Rows of ids of several lengths as `input_ids` [B, T]."""
    ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for place, row in enumerate(rows):
        ids_BT[place, : len(row)] = torch.tensor(row)
    return {"input_ids": ids_BT}


def without_last(prompt: Prompt) -> Prompt:
    """The prompt without its last token, and what else has a value for each token."""
    return part_of(prompt, range(length_of(prompt) - 1))


def part_of(prompt: Prompt, piece: range) -> Prompt:
    """Some tokens of the prompt that follow one another, and what else has a value for each."""
    shape = prompt["input_ids"].shape
    own = slice(piece.start, piece.stop)
    return {name: v[:, own] if v.shape == shape else v for name, v in prompt.items()}


def together(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """The inputs [B, T] of several prompts that are not alone, or those of one."""
    if len(prompts) == 1:
        return {name: value for name, value in prompts[0].items() if name != MASK}
    width = max(length_of(prompt) for prompt in prompts)
    names = [name for name in prompts[0] if name != MASK]
    padded = {}
    for name in names:
        rows = torch.zeros(len(prompts), width, dtype=prompts[0][name].dtype)
        for place, prompt in enumerate(prompts):
            if name in prompt:
                rows[place, width - length_of(prompt) :] = prompt[name][0]
        padded[name] = rows
    return padded
