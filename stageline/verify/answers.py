"""The check of decoding: compares a scaled-down copy's stages with the whole copy.

Each stage keeps its own keys and values of earlier tokens, for rows of unequal lengths that come
and go. Each token of an answer is compared with one pass of the whole model over only that row,
which uses no cache.

Shapes: T tokens, V vocabulary.
"""

import copy as copies_of
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from stageline.cache_trial import randomise
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.request import PassOrder, Sampling, error_of, together
from stageline.inference.decoding.stage_decoder import StageDecoder
from stageline.stage import Stage
from stageline.training.loss_part import logits_of
from stageline.verify.batches import draw_ids, ordinary_ids
from stageline.verify.compare import run_library_model, run_stage_model
from stageline.verify.scaled_copy import Checked, ScaledCopy, WrongSplit, copy_weights, shown

LENGTHS = (9, 4, 7)  # tokens of prompts; the last joins later, is read in pieces and copied
NUM_TOKENS = 6  # tokens of each answer; the longest go beyond the window of a copy
NUM_CHOSEN = ("index_topk", "keep_window_size")  # keys that a query chooses
TOLERANCE = 1e-3  # largest difference of a log-probability, in float32


def answers(copy: ScaledCopy, small: PretrainedConfig, partition: list[int]) -> Checked:
    """Compare answers of the stages with those of the whole copy; for `verify`."""
    small = copies_of.deepcopy(small)
    text = small.get_text_config(decoder=True)
    for name in NUM_CHOSEN:
        if getattr(text, name, None):  # a random copy has equally good keys, of which any is chosen
            setattr(text, name, max(LENGTHS) + NUM_TOKENS)
    with copy.stages(small, partition) as build:
        torch.manual_seed(0)
        if copy.library_class(small) is None or not copy.is_ours:
            whole, forward = build(0, 1, torch.float32), run_stage_model
        else:
            whole, forward = copy.library_model(small, torch.float32), run_library_model
        randomise(whole)
        stages = [build(stage, len(partition), torch.float32) for stage in range(len(partition))]
        copy_weights(whole, stages)
    whole.eval()
    gaps = {}
    with torch.no_grad():
        for number, (ids, found) in enumerate(_drawn(stages, small)):
            ids_1T, mask_1T = torch.tensor([ids]), torch.ones(1, len(ids) - 1, dtype=torch.long)
            output = forward(whole, {"input_ids": ids_1T[:, :-1], "attention_mask": mask_1T})
            logits_TV = logits_of(output)[0, -len(found) :].float()
            expected_T = logits_TV.log_softmax(-1).gather(1, ids_1T[0, -len(found) :, None])[:, 0]
            apart_T = (torch.tensor(found) - expected_T).abs()
            worst = int(apart_T.argmax())
            gaps[f"token {worst} of answer {number}"] = apart_T[worst].item()
    place = max(gaps, key=lambda one: gaps[one])
    gap = gaps[place]
    if not gap <= TOLERANCE:
        raise WrongSplit(
            f"answers of {small.model_type} by {copy.name} are not those of the whole model. On a "
            f"scaled-down copy on {len(partition)} stages, the log-probability of {place} is "
            f"{gap:.1e} off, and at most {TOLERANCE:.0e} is rounding. The usual cause: the model "
            "remembers more of earlier tokens than keys and values, or uses their positions in "
            "another way. Set `can_decode` False in a stage model of your own, so that each token "
            "reads its whole row, or let transformers answer (device_map)."
        )
    told = f"answers of {shown(small, partition)}, equal the whole model's (within {gap:.0e} of a "
    return f"{told}log-probability)", {"gap": gap}


def _drawn(
    stages: Sequence[Stage], config: PretrainedConfig
) -> list[tuple[list[int], list[float]]]:
    """Draw answers with the passes that an engine makes, one after the other.

    Returns:
        Each row's tokens, and the log-probabilities of the tokens of its answer.
    """
    decoders = [StageDecoder(stage) for stage in stages]
    chain, first = LocalChain(decoders), decoders[0]
    ids, generator = ordinary_ids(config), torch.Generator().manual_seed(0)
    prompts = [draw_ids(config, length, generator=generator).tolist() for length in LENGTHS]
    others = set(range(int(ids.max()))).difference(ids.tolist())
    sampling = Sampling(
        temperature=1.0, logprobs=0, logit_bias=tuple((one, -1e4) for one in sorted(others))
    )
    rows = [list(prompt) for prompt in (*prompts, prompts[-1])]
    found: list[list[float]] = [[] for _ in rows]

    def run(kind: Any, numbers: Sequence[int], read: Sequence[Sequence[int]], **more: Any) -> None:
        lengths = [len(rows[number]) for number in numbers]
        order = PassOrder(kind, rows=list(numbers), lengths=lengths[: len(read)], **more)
        order.settings = [replace(sampling, seed=number) for number in numbers]
        inputs = together(
            [{"input_ids": torch.tensor([ids])} for ids in read], pads_right=kind == "whole"
        )
        chain.start(order, inputs)
        chain.result()
        if order.error is not None:
            raise RuntimeError(order.error)
        for place, number in enumerate(numbers if not order.is_part else ()):
            error = error_of(order, place)
            if error is not None:
                raise error
            logprob = order.logprobs[place]
            assert logprob is not None  # they were asked for
            rows[number].append(order.tokens[place])
            found[number].append(logprob.logprob)

    def step(*numbers: int, **order: Any) -> None:
        run("decode", numbers, [rows[number][-1:] for number in numbers], **order)

    if not first.has_cache:
        for _ in range(NUM_TOKENS):
            run("whole", range(len(rows)), rows)
        return list(zip(rows, found, strict=True))
    run("prefill", (0, 1), rows[:2])
    step(0, 1)
    step(0, 1)
    cut = 3 if first.reads_in_pieces else 0
    copied: dict[str, Any] = {"group": 1, "copies": 2}
    if cut:
        run("prefill", (2, 3), [prompts[-1][:cut]], piece=[0, cut], **copied)
        copied["piece"] = [cut, len(prompts[-1])]
    run("prefill", (2, 3), [prompts[-1][cut:]], **copied)
    step(0, 1, 2, 3, join=[(1, 0)])
    step(0, 2, 3, leave=[(0, 1)])
    for _ in range(NUM_TOKENS - 5):
        step(0, 2, 3)
    return list(zip(rows, found, strict=True))
