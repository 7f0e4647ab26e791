"""A pipelined decoding engine from the options of a run: for evaluate, infer, lm_eval and serve.

with open_decoding(run) as engine:
    if engine is not None:      # the first rank of a replica; the others have followed it
        for answer in engine.answer(requests): ...
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from commands.stages import StageBuilder, dtype_of, lora_options, stage_key
from options.parts import chosen_part
from stageline.checkpoint.adapter import config_folder, find_base, processor_folder, refuse_two_ways
from stageline.checkpoint.adapter_start import attach_beside
from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.data.text.chat_template import template_of
from stageline.data.text.processor import get_tokenizer, load_processor
from stageline.device import available_memory
from stageline.distributed.failure_record import name_stages
from stageline.distributed.process_group import (
    DistributedContext,
    distributed_context,
    wait_for_weights,
)
from stageline.distributed.ranks import Ranks
from stageline.errors import UserError
from stageline.hub import title_of
from stageline.inference.decoding.chain import Chain, LocalChain, RankChain, Wire, follow, make_wire
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.grammars import Matchers
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import StageDecoder, cache_budget, cells_within
from stageline.inference.generation import num_positions, stop_ids_of
from stageline.model_folder import find_folder, load_config
from stageline.modules.lora import merge_lora
from stageline.planner.partition import decode_partition


@dataclass(frozen=True)
class AnsweringModel:
    """Source of the stages of one model."""

    folder: Path  # a model folder, a checkpoint of a run, or an adapter folder
    num_stages: int
    dtype: torch.dtype
    adapters: tuple[str, ...] = ()  # folders that are put on it; all but the last are merged
    beside: tuple[str, ...] = ()  # adapter folders of which each row of a pass has one or none
    merges: bool = False  # the last adapter is merged too
    key: str | None = None  # train_model component; None: that of the architecture
    partition: tuple[int, ...] | None = None  # None: equal times of a decoding step
    trust_remote_code: bool = False

    @functools.cached_property
    def base(self) -> Path:
        """Return the folder of the weights under all adapters."""
        return find_base(self.folder) if (self.folder / ADAPTER_CONFIG).exists() else self.folder

    @functools.cached_property
    def config_folder(self) -> Path:
        """Return the folder with config.json: an adapter's, if its run changed the base's."""
        return config_folder(self.folder, self.adapters)

    @functools.cached_property
    def config(self) -> PretrainedConfig:
        """Return the configuration of the unsplit model."""
        return load_config(self.config_folder, trust_remote_code=self.trust_remote_code)

    @functools.cached_property
    def builder(self) -> StageBuilder:
        """Return the builder of its stages."""
        key = self.key or stage_key(self.config)
        if key is None or key == "reward":
            raise UserError(
                f"{self.folder} holds {(self.config.architectures or ['a model'])[0]}, which has "
                "no train_model component. Name your own with --train-model, or use --engine "
                "device_map."
            )
        partition: Sequence[int] | None = self.partition
        if partition is None and self.num_stages > 1 and stage_key(self.config) is not None:
            partition = decode_partition(
                self.config,
                self.num_stages,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
            )
        return StageBuilder(
            chosen_part("train_model", key),
            str(self.config_folder),
            self.num_stages,
            checkpoint_path=str(self.folder),
            partition=partition,
            trust_remote_code=self.trust_remote_code,
            options={"is_piece": True},  # the processor is loaded apart
        )

    def build(self, stage: int, device: torch.device | str) -> Any:
        """Build one stage with its weights."""
        is_adapter = (self.folder / ADAPTER_CONFIG).exists()
        model = self.builder.build(
            stage,
            dtype=self.dtype,
            device=device,
            adapter_path=list(self.adapters) or None,
            **(lora_options(self.folder, self.builder) if is_adapter else {}),
        )
        if self.merges:
            merge_lora(model)
        if self.beside:
            refuse_two_ways(self.folder, self.beside if is_adapter else ())
            attach_beside(model, self.beside)
        return model

    @functools.cached_property
    def processor(self) -> Any:
        """Return the tokenizer or processor: the last adapter's, if it has one."""
        last = Path(self.adapters[-1]) if self.adapters else self.folder
        folder = processor_folder(last, self.base)
        load = functools.partial(load_processor, trust_remote_code=self.trust_remote_code)
        found = load(folder)
        facts = get_tokenizer(found).get_vocab(), template_of(found)
        for path in map(Path, self.beside):
            if processor_folder(path, self.base) != path:
                continue
            other = load(path)
            if (get_tokenizer(other).get_vocab(), template_of(other)) != facts:
                raise UserError(
                    f"{path} has another tokenizer or chat template than {folder}. Serve that "
                    "adapter by itself, or remove its tokenizer files if the base's are right."
                )
        return found


def wire_of(context: DistributedContext) -> Wire | None:
    """Return the wire of this process's pipeline; None: it is the only one of it."""
    if context.num_ranks == 1:
        return None
    ranks = {"num_stages": context.num_ranks, "num_replicas": context.num_replicas}
    return make_wire(context.rank, **ranks, device=context.device)


@contextlib.contextmanager
def open_decoding(run: Any, *, beside: Sequence[str] = ()) -> Iterator[DecodingEngine | None]:
    """Build this rank's stage; yield an engine on the first rank of each replica.

    The others follow it to its end, then get None. `place_stages` has settled the number of stages.
    A request has one or none of the adapter folders `beside`, which replace adapter_path.
    """
    if getattr(run, "adapter_weights", None):
        raise UserError(
            "--adapter-weights does not go with pipelined decoding. Merge first with "
            "scripts/export.sh --merge --adapter-weights, or use --engine device_map."
        )
    model = AnsweringModel(
        folder=find_folder(run.model_path),
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
        model.builder.verify(run.prove_split, say=say, answers=True)
        ranks = Ranks.of(context.pp_group)
        model.builder.check_names([context.pp_rank], ranks=ranks, checkpoint=str(model.folder))
        stage = model.build(context.pp_rank, context.device)
        wait_for_weights(model.base)
        matchers = Matchers(lambda: get_tokenizer(model.processor))
        decoder = StageDecoder(stage, device=context.device, matchers=matchers)

        # the fullest stage limits tokens and rows of all stages
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

        chain: Chain = LocalChain([decoder])
        if (wire := wire_of(context)) is not None:
            if context.pp_rank > 0:
                follow(decoder, wire, num_stages=context.num_ranks)
                yield None
                return
            chain = RankChain(decoder, wire, num_stages=context.num_ranks)
        engine = DecodingEngine(
            chain,
            tokenizer=get_tokenizer(model.processor),
            processor=model.processor,
            config=stage.config,
            limits=limits,
            stop_ids=stop_ids_of(model.base, model.config, model.processor),
            device=context.device,
            model_name=title_of(model.folder),
            prompt_cells=stage.fixed_cells,
            has_cache=decoder.has_cache,
            reads_in_pieces=decoder.reads_in_pieces,
            matchers=matchers,
        )
        yield engine
        # not in a `finally`: after an exception the other ranks are told, and end
        engine.close()
