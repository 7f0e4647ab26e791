"""What a model answers to a probe, on the CPU: logits and a few greedy tokens.

Computed twice for an export and compared: by the stages of training, chained in one process, and by
the exported folder in plain transformers.

Shapes: B rows, T tokens, N new tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig

from stageline.checkpoint.probes import Inputs
from stageline.checkpoint.tasks import CLASSIFIER
from stageline.data.cross_mask import CROSS_MASK, grow_cross_mask

NEW_TOKENS = 6
_TYPES = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True)
class Answer:
    """The answer to one probe.

    Attributes:
        logits: [B, T, V] in float32; of a reward model [B, 1], the rewards.
        tokens: [B, N] greedy ones; None: the model does not generate.
        steps: [B, N, V], the logits that the tokens were chosen by; None: not kept.
    """

    logits: torch.Tensor
    tokens: torch.Tensor | None
    steps: torch.Tensor | None = None


@dataclass(frozen=True)
class Comparison:
    """How far two answers are apart.

    Attributes:
        difference: largest difference of a logit, as a share of the largest logit.
        wrong_tokens: greedy tokens that differ, and by more than the tolerance explains.
    """

    difference: float
    wrong_tokens: int


@torch.no_grad()
def answer_of_stages(stages: Sequence[nn.Module], inputs: Inputs) -> Answer:
    """Runs stages one after the other, each as training runs it; no cache."""
    if getattr(stages[-1], "gives_scores", False):  # of rows without padding
        return Answer(_chain(stages, inputs)[:, -1], None)
    return _answer_step_by_step(lambda grown: _chain(stages, grown), inputs)


@torch.no_grad()
def answer_of_model(model: nn.Module, inputs: Inputs, *, steps: bool = False) -> Answer:
    """Runs a model of transformers.

    Args:
        steps: chooses tokens one by one without the library's `generate`, and keeps their logits.
    """

    def run(grown: Inputs) -> torch.Tensor:
        if is_classifier:  # one without a padding token takes single rows only
            rows = zip(*(value.split(1) for value in grown.values()), strict=True)
            return torch.cat([model(**dict(zip(grown, row, strict=True))).logits for row in rows])
        output = model(**grown, use_cache=False) if can_generate else model(**grown)
        return getattr(output, "logits", output[0]).float()

    can_generate = model.can_generate()
    is_classifier = type(model).__name__.endswith(CLASSIFIER)
    if can_generate and steps:
        return _answer_step_by_step(run, inputs)
    return Answer(run(inputs), _generate(model, inputs) if can_generate else None)


def compare_answers(expected: Answer, found: Answer, *, tolerance: float) -> Comparison:
    """Compares logits and tokens; a choice between two equally likely tokens is free."""
    largest = expected.logits.abs().max()
    difference = ((found.logits - expected.logits).abs().max() / largest).item()
    wrong = 0
    if expected.tokens is not None and found.tokens is not None and expected.steps is not None:
        for row, (own, other) in enumerate(zip(expected.tokens, found.tokens, strict=True)):
            places = (own != other).nonzero().flatten().tolist()
            if not places:
                continue
            first = places[0]  # what follows has other words before it
            scores = expected.steps[row, first]
            gap = (scores[own[first]] - scores[other[first]]).item()
            wrong += not gap <= 2 * tolerance * largest.item()
    return Comparison(difference, wrong)


def _chain(stages: Sequence[nn.Module], inputs: Inputs) -> torch.Tensor:
    """Logits [B, T, V]."""
    values: tuple[torch.Tensor, ...] = (inputs["input_ids"],)
    for stage in stages:
        output = stage(*values, **inputs)
        values = output if isinstance(output, tuple) else (output,)
    return values[0].float()


def _answer_step_by_step(run: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> Answer:
    logits = run(inputs)
    last, grown, steps = logits[:, -1], inputs, []
    for number in range(NEW_TOKENS):
        steps.append(last)
        grown = _grow(grown, last.argmax(-1, keepdim=True))
        if number < NEW_TOKENS - 1:
            last = run(grown)[:, -1]
    tokens = grown["input_ids"][:, inputs["input_ids"].shape[1] :]
    return Answer(logits, tokens, torch.stack(steps, dim=1))


def _grow(inputs: Inputs, tokens: torch.Tensor) -> Inputs:
    """The inputs with one more token in each row."""
    more = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    more |= {name: torch.zeros_like(tokens) for name in _TYPES}
    if CROSS_MASK in inputs:
        inputs = {**inputs, CROSS_MASK: grow_cross_mask(inputs[CROSS_MASK])}
    return {
        name: torch.cat([value, more[name]], dim=1) if name in more else value
        for name, value in inputs.items()
    }


def _generate(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    # the model's own would add penalties and stop early
    model.generation_config = GenerationConfig()
    wanted = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS)
    tokens = model.generate(**inputs, generation_config=wanted)
    return tokens[:, inputs["input_ids"].shape[1] :]
