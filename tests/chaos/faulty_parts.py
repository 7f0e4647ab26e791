"""Components that fail on some rank at some step, as the variable FAULTS sets. For chaos tests.

FAULTS='{"1": {"step": 2, "do": "ragged"}}': what rank 1 does when it collates step 2, from 0 on.
"""

import json
import os
import resource

import torch

from dataset import sft
from pp_models import CausalLMStage
from register import collate_fn_register, train_model_register
from stageline.progress import place

WORDS = ("input_ids", "labels", "attention_mask", "position_ids")


@train_model_register("two_dtypes")
def two_dtypes(*, stage, dtype, **kwargs):
    """Return a llama whose second stage computes in another type than the first."""
    return CausalLMStage.build(stage=stage, dtype=torch.bfloat16 if stage else dtype, **kwargs)


class _Calls:
    step = count = 0


@collate_fn_register("faulty")
def faulty(samples, **kwargs):
    """Collate like sft, until the step of the fault."""
    batch = sft(samples, **kwargs)
    here = place()
    if here.operation != "data":  # some ranks look at rows before the loop
        return batch
    step = here.step or 0
    _Calls.count = _Calls.count + 1 if step == _Calls.step else 1
    _Calls.step = step
    fault = json.loads(os.environ["FAULTS"]).get(os.environ.get("RANK", "0"))
    return ACTIONS[fault["do"]](batch) if fault and fault["step"] == step else batch


@collate_fn_register("silent")
def silent(samples, **kwargs):
    """Collate like sft, with no token in the loss if an answer has more than 20 characters."""
    batch = sft(samples, **kwargs)
    is_long = torch.tensor([len(sample["answer"]) > 20 for _, sample in samples])
    return {**batch, "labels": batch["labels"].masked_fill(is_long[:, None], -100)}


def ragged(batch):
    if _Calls.count != 3:
        return batch
    return {
        name: torch.cat([value, value[:, -1:]], dim=1) if name in WORDS else value
        for name, value in batch.items()
    }


def other_tokens(batch):
    return {**batch, "input_ids": batch["input_ids"].roll(1)}


def fill_memory(batch):
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 256 * 2**20, resource.RLIM_INFINITY))
    torch.empty(3 * 2**30, dtype=torch.uint8)


ACTIONS = {function.__name__: function for function in (ragged, other_tokens, fill_memory)}
