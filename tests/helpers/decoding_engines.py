"""Decoding engines over stages in this process, or over one on each rank, for tests."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.checkpoint.load import quiet
from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.chain import LocalChain, RankChain, follow, make_wire
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.grammars import Matchers
from stageline.inference.decoding.request import Failed, PassOrder, Request, Sampling
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import StageDecoder
from tests.helpers.decoded_models import DecodedModel

CPU = torch.device("cpu")


def built_stages(
    build: Callable[..., Any], folder: Path, num_stages: int, **options: Any
) -> list[nn.Module]:
    """Return all stages of a model folder, by a train_model part."""
    with quiet():
        return [
            build(
                config_path=None,
                processor_path=None,
                checkpoint_path=str(folder),
                stage=stage,
                num_stages=num_stages,
                **options,
            )[0]
            for stage in range(num_stages)
        ]


def local_engine(stages: Sequence[nn.Module], processor: Any, **limits: Any) -> DecodingEngine:
    """Return all stages in this process, one after the other."""
    matchers = Matchers(lambda: get_tokenizer(processor))
    chain = LocalChain([StageDecoder(stage, matchers=matchers) for stage in stages])
    first = chain.decoders[0]
    return DecodingEngine(
        chain,
        tokenizer=get_tokenizer(processor),
        processor=processor,
        limits=Limits(short_length=first.stage.short_length, **limits),
        has_cache=first.has_cache,
        reads_in_pieces=first.reads_in_pieces,
    )


@functools.cache
def _llama_stages(folder: Path, num_stages: int) -> list[nn.Module]:
    return built_stages(train_model_register["llama"], folder, num_stages)


def llama_engine(
    model: DecodedModel,
    num_stages: int = 1,
    *,
    max_rows: int = 3,
    num_groups: int = 1,
    **limits: Any,
) -> DecodingEngine:
    """Return an engine on the stages of a decoded llama, which are built once."""
    limits |= {"max_rows": max_rows, "num_groups": num_groups}
    return local_engine(_llama_stages(model.folder, num_stages), model.processor, **limits)


def request_of(model: DecodedModel, place: int, key: str | None = None, **sampling: Any) -> Request:
    """Return a request for one of the model's prompts, with an answer as long as the known one."""
    settings = {"max_new_tokens": len(model.answers[place]), "stop_token_ids": (), **sampling}
    return Request(key or str(place), model.prompts[place], Sampling(**settings))


def answer_all(engine: DecodingEngine, model: DecodedModel) -> dict[str, Exception]:
    """Return the error of each request that failed; check the others, and that nothing is left."""
    places = range(len(model.prompts))
    found = {one.key: one for one in engine.answer(request_of(model, place) for place in places)}
    assert sorted(found) == list(map(str, places))
    failed = {key: one.error for key, one in found.items() if isinstance(one, Failed)}
    for key in found.keys() - failed.keys():
        assert found[key].token_ids == model.answers[int(key)], key
    check_nothing_is_left(engine)
    return failed


def check_nothing_is_left(engine: DecodingEngine) -> None:
    """Check that the stages hold no row, and that the engine counts none."""
    for decoder in engine.chain.decoders:
        assert not decoder.groups and not decoder.sampled and not decoder.unfinished
    stats = engine.stats()
    assert (stats.running, stats.queued, stats.cache_cells, stats.num_groups) == (0, 0, 0, 0)
    assert stats.is_healthy


def noted_orders(engine: DecodingEngine) -> list[PassOrder]:
    """Return a list that gets each order that the engine starts later."""
    orders, start = [], engine.chain.start

    def noted(order: PassOrder, tensors: dict[str, Tensor]) -> None:
        orders.append(order)
        start(order, tensors)

    engine.chain.start = noted
    return orders


def pieces_read(orders: Sequence[PassOrder]) -> list[list[tuple[int, int]]]:
    """Return (first, end) of the pieces of each prompt in turn; () if it was read in one pass."""
    found: dict[int, list] = {}
    for order in orders:
        for row in order.rows if order.kind == "prefill" else ():
            found.setdefault(row, []).append(tuple(order.piece))
    return list(found.values())


def on_ranks(
    stage: nn.Module,
    processor: Any,
    work: Callable[[DecodingEngine], Any],
    *,
    device: torch.device = CPU,
    decoder_class: type[StageDecoder] = StageDecoder,
    **limits: Any,
) -> Any:
    """Run the stage of each rank; rank 0 does `work` with the engine.

    Args:
        decoder_class: a stage that does something else in a test.

    Returns:
        What `work` returns; on other ranks None.
    """
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    matchers = Matchers(lambda: get_tokenizer(processor))
    decoder = decoder_class(stage, device=device, matchers=matchers)
    wire = make_wire(rank, num_stages=num_stages, device=device)
    if rank > 0:
        follow(decoder, wire, num_stages=num_stages)
        return None
    chain = RankChain(decoder, wire, num_stages=num_stages)
    engine = DecodingEngine(
        chain,
        tokenizer=get_tokenizer(processor),
        processor=processor,
        limits=Limits(**limits),
        device=device,
        reads_in_pieces=decoder.reads_in_pieces,
    )
    found = work(engine)
    engine.close()
    return found


def answers_of(
    engine: DecodingEngine, prompts: Sequence[Mapping[str, Tensor]], **sampling: Any
) -> list[tuple[int, ...]]:
    """Return token ids of each answer, which by default no end token cuts short.

    Raises:
        Exception: what a request failed with.
    """
    sampling.setdefault("stop_token_ids", ())
    requests = (
        Request(str(place), prompt, Sampling(**sampling)) for place, prompt in enumerate(prompts)
    )
    found = {}
    for event in engine.answer(requests):
        if isinstance(event, Failed):
            raise event.error
        found[int(event.key)] = event.token_ids
    return [found[place] for place in range(len(prompts))]
