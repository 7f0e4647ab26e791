"""The ways to answer a batch of prompts that benchmarks/decoding.py compares: one class each.

A way is made on each process that takes part and called there with the same prompts; it returns
the answers that this process has, by the row of the prompt. All but ours are plain transformers.
Shapes: B prompts of T tokens, H features.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DummyLayer

Answers = dict[int, list[int]]
Way = Callable[[Tensor, int], Answers]
NUM_RANKS = 2


def load(folder: Path, dtype: torch.dtype, **options: object) -> PreTrainedModel:
    """The library's model, whose answers no end token cuts short."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model


class Replica:
    """A share of the prompts on a whole model of its own: a bare loop, no generate around it."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, rank: int = 0, num_ranks: int = 1):
        self.rank, self.num_ranks = rank, num_ranks
        self.model = load(folder, dtype)

    def __call__(self, ids_BT: Tensor, num_tokens: int) -> Answers:
        rows = list(range(self.rank, len(ids_BT), self.num_ranks))
        if not rows:
            return {}
        cache, chosen, last_BT = DynamicCache(config=self.model.config), [], ids_BT[rows]
        for _ in range(num_tokens):
            output = self.model(last_BT, past_key_values=cache, logits_to_keep=1)
            last_BT = output.logits[:, -1:].argmax(dim=-1)
            chosen.append(last_BT)
        return dict(zip(rows, torch.cat(chosen, dim=1).tolist(), strict=True))


class Hold(nn.Module):
    """Stands for a module of the other device."""

    def forward(self, hidden: Tensor, *_: object, **__: object) -> Tensor:
        return hidden


class Naive:
    """One model over two processes, one batch: each waits while the other computes."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, rank: int, cut: int) -> None:
        self.rank, self.model = rank, load(folder, dtype)
        base = self.model.model
        num_layers = len(base.layers)
        own = range(cut) if rank == 0 else range(cut, num_layers)
        self.others = [index for index in range(num_layers) if index not in own]
        for index in self.others:
            base.layers[index] = Hold()
        if rank == 0:
            base.norm = self.model.lm_head = Hold()

    def __call__(self, ids_BT: Tensor, num_tokens: int) -> Answers:
        cache = DynamicCache(config=self.model.config)
        for index in self.others:
            cache.layers[index] = DummyLayer()
        (num_rows, num_old), last_BT, chosen = ids_BT.shape, ids_BT, []
        positions_1T = torch.arange(num_old)[None]
        for _ in range(num_tokens):
            options = {"past_key_values": cache, "position_ids": positions_1T, "use_cache": True}
            if self.rank == 0:
                hidden_BTH = self.model.model(last_BT, **options).last_hidden_state
                dist.send(hidden_BTH, 1)
                last_BT = torch.empty(num_rows, 1, dtype=torch.long)
                dist.recv(last_BT, 1)
            else:
                shape = (*last_BT.shape, self.model.config.hidden_size)
                hidden_BTH = torch.empty(shape, dtype=self.model.dtype)
                dist.recv(hidden_BTH, 0)
                output = self.model(inputs_embeds=hidden_BTH, **options, logits_to_keep=1)
                last_BT = output.logits[:, -1:].argmax(dim=-1)
                dist.send(last_BT, 0)
            positions_1T = positions_1T[:, -1:] + 1
            chosen.append(last_BT)
        return dict(enumerate(torch.cat(chosen, dim=1).tolist())) if self.rank == 0 else {}


class LibraryPipeline:
    """The library's own pipeline parallelism under its own generate."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, rank: int) -> None:
        from transformers.distributed import DistributedConfig

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
        self.rank = rank
        config = DistributedConfig(pp_size=NUM_RANKS)
        self.model = load(folder, dtype, distributed_config=config)

    def __call__(self, ids_BT: Tensor, num_tokens: int) -> Answers:
        found = self.model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return dict(enumerate(found[:, ids_BT.shape[1] :].tolist())) if self.rank == 0 else {}


class ContinuousBatching:
    """The library's continuous batching on one process; its manager lives on between calls."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import ContinuousBatchingConfig

        self.model = load(folder, dtype)
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        # room for what is asked here; by default it takes nearly all memory of the machine
        sizes = ContinuousBatchingConfig(
            page_size=64, num_blocks=256, max_batch_tokens=4096, allow_block_sharing=False
        )
        self.manager = self.model.init_continuous_batching(
            generation_config=config, continuous_batching_config=sizes
        )
        self.manager.start()

    def __call__(self, ids_BT: Tensor, num_tokens: int) -> Answers:
        names = self.manager.add_requests(ids_BT.tolist(), max_new_tokens=num_tokens)
        rows, answers = {name: row for row, name in enumerate(names)}, {}
        while len(answers) < len(rows):
            result = self.manager.get_result(timeout=60)
            assert result is not None, "continuous batching gave nothing in a minute"
            if result.is_finished():
                answers[rows[result.request_id]] = list(result.generated_tokens)
        return answers

    def close(self) -> None:
        self.manager.stop(hard_stop=True)


def reference(model: PreTrainedModel, ids_BT: Tensor, num_tokens: int) -> tuple[Answers, list]:
    """Greedy answers by the library's generate, and the least margin over each of them."""
    found = model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best_NB2 = torch.stack([logits.topk(2).values for logits in found.logits])
    margins_B = (best_NB2[..., 0] - best_NB2[..., 1]).min(dim=0).values
    return dict(enumerate(found.sequences[:, ids_BT.shape[1] :].tolist())), margins_B.tolist()
