"""A pipelined decoding engine from the options of a run: for evaluate, infer, chat and serve.

with open_decoding(run) as decoding:
    if decoding is not None:      # the first rank of a replica; the others have followed it
        for answer in decoding.engine.answer(requests): ...
"""

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commands.stages import AnsweringModel, dtype_of
from stageline.checkpoint.layout import Ranks
from stageline.data.text.processor import get_tokenizer
from stageline.device import available_memory
from stageline.distributed.failure import name_stages
from stageline.distributed.process_group import distributed_context, wait_for_weights
from stageline.errors import UserError
from stageline.hub import title_of
from stageline.inference.decoding.chain import Chain, LocalChain, RankChain, follow, make_wire
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.grammars import Matchers
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import StageDecoder, cache_budget, cells_within
from stageline.inference.generation import stop_ids_of
from stageline.model_folder import find_folder, num_positions


@dataclass(frozen=True)
class Decoding:
    """An engine and where it stands.

    Attributes:
        config: of the model.
    """

    engine: DecodingEngine
    processor: Any
    config: Any


@contextlib.contextmanager
def open_decoding(
    run: Any, *, model_path: str | None = None, beside: Sequence[str] = ()
) -> Iterator[Decoding | None]:
    """Builds this rank's stage; the first rank of each replica gets an engine.

    Args:
        run: has the options of `DecodeOptions`, and model_path, adapter_path, precision, device,
            trust_remote_code; the number of stages is known (`place_stages`).
        beside: adapter folders of which a request has one or none, in place of adapter_path.

    Yields:
        None on the other ranks, when they have followed the engine to its end.
    """
    if getattr(run, "adapter_weights", None):
        raise UserError(
            "--adapter-weights came with pipelined decoding. Merge them with scripts/export.sh "
            "--merge --adapter-weights first, or use --engine device_map."
        )
    model = AnsweringModel(
        folder=find_folder(model_path or run.model_path),
        num_stages=run.num_stages,
        dtype=dtype_of(run),
        adapters=() if beside else tuple(run.adapter_path or ()),
        beside=tuple(beside),
        merges=run.merge_adapters,
        key=run.train_model,
        partition=tuple(run.partition) if run.partition else None,
        trust_remote_code=run.trust_remote_code,
    )
    with distributed_context(num_ranks=run.num_stages, device=run.device) as context:
        name_stages([context.pp_rank])
        say = functools.partial(print, file=sys.stderr, flush=True)  # stdout is for answers
        model.builder.verify(run.prove_split, ranks=Ranks.of(None), say=say, answers=True)
        ranks = Ranks.of(context.pp_group)
        model.builder.check_names([context.pp_rank], ranks=ranks, checkpoint=str(model.folder))
        stage = model.build(context.pp_rank, context.device)
        wait_for_weights(model.base)
        matchers = Matchers(lambda: get_tokenizer(model.processor))
        decoder = StageDecoder(stage, device=context.device, matchers=matchers)

        # as much at a time as the fullest stage has room for
        budget = cache_budget(
            context.device,
            gib=run.cache_gib,
            processes=int(os.environ.get("LOCAL_WORLD_SIZE", context.world_size)),
            host_bytes=available_memory(),
        )
        room = torch.tensor([cells_within(budget, decoder), decoder.pass_tokens()])
        if context.world_size > 1:
            dist.all_reduce(room, op=dist.ReduceOp.MIN)
        lengths = [n for n in (num_positions(model.config), run.max_length) if n is not None]
        limits = Limits(
            max_rows=run.max_running,
            prefill_tokens=run.prefill_tokens or int(room[1]),
            max_cells=int(room[0]),
            max_length=min(lengths, default=2**20),
            num_groups=run.num_groups,
            short_length=stage.short_length,
        )
        gc.freeze()  # what stands now stays; a server has looked for no garbage until here
        gc.enable()

        chain: Chain = LocalChain([decoder])
        if context.num_ranks > 1:
            wire = make_wire(
                context.rank,
                num_stages=context.num_ranks,
                num_replicas=context.num_replicas,
                device=context.device,
            )
            if context.pp_rank > 0:
                follow(decoder, wire, num_stages=context.num_ranks)
                yield None
                return
            chain = RankChain(decoder, wire, num_stages=context.num_ranks)
        engine = DecodingEngine(
            chain,
            tokenizer=get_tokenizer(model.processor),
            processor=model.processor,
            limits=limits,
            stop_ids=stop_ids_of(model.base, model.config, model.processor),
            device=context.device,
            model_name=title_of(model.folder),
            prompt_cells=stage.fixed_cells,
            has_cache=decoder.has_cache,
            reads_in_pieces=decoder.reads_in_pieces,
            matchers=matchers,
        )
        yield Decoding(engine, model.processor, model.config)
        # not in a `finally`: after an exception the other ranks hear of it, and end
        engine.close()
