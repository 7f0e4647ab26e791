"""Pipelined decoding on GPUs: transformers' tokens, memory for the cache, and NCCL with two.

Expected are transformers' answers on the same GPU, which may be an emulated one.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.checkpoint.load import quiet
from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.request import EngineError, Failed, Request, Sampling
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import (
    SHARE_OF_A_GPU,
    StageDecoder,
    cache_budget,
    cells_within,
)
from tests.helpers.decoded_models import decoded_text_model, generated, load_whole
from tests.helpers.decoding_engines import answers_of, on_ranks
from tests.helpers.host_waits import host_waits
from tests.helpers.ports import free_port

NUM_TOKENS = 8
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with quiet():
        return decoded_text_model(
            "llama", tmp_path_factory.mktemp("llama"), num_prompts=6, num_tokens=NUM_TOKENS
        )


def stage_of(folder, stage, num_stages, *, device=GPU, dtype=torch.float32):
    with quiet():
        return train_model_register["llama"](
            config_path=None,
            processor_path=None,
            checkpoint_path=str(folder),
            stage=stage,
            num_stages=num_stages,
            dtype=dtype,
            device=device,
        )[0]


def engine_of(model, num_stages=1, *, dtype=torch.float32, **limits):
    decoders = [
        StageDecoder(stage_of(model.folder, stage, num_stages, dtype=dtype), device=GPU)
        for stage in range(num_stages)
    ]
    return DecodingEngine(
        LocalChain(decoders),
        tokenizer=get_tokenizer(model.processor),
        limits=Limits(**{"max_rows": 4, "num_groups": 1, **limits}),
        device=GPU,
    )


@pytest.fixture(scope="module")
def library(model):
    """Return transformers' answers by type."""

    @functools.cache
    def answers(dtype):
        whole = load_whole(model.folder, dtype).to(GPU)
        prompts = [{name: value.to(GPU) for name, value in one.items()} for one in model.prompts]
        return generated(whole, prompts, NUM_TOKENS)[0]

    return answers


@pytest.mark.parametrize("num_stages", [1, 2])
def test_tokens_equal_the_librarys_in_float32(model, library, num_stages):
    found = answers_of(engine_of(model, num_stages), model.prompts, max_new_tokens=NUM_TOKENS)
    assert found == library(torch.float32)


def test_most_tokens_agree_in_bfloat16(model, library):
    """Rows of a batch are summed in another order than a single one: a tie may turn a token."""
    engine = engine_of(model, dtype=torch.bfloat16)
    found = answers_of(engine, model.prompts, max_new_tokens=NUM_TOKENS)
    expected = library(torch.bfloat16)
    firsts = [ours[0] == theirs[0] for ours, theirs in zip(found, expected, strict=True)]
    assert sum(firsts) >= len(firsts) - 1
    same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    assert same >= len(found) // 2, f"{same} of {len(found)} answers agree"


def test_a_step_of_all_rows_waits_once(model, cards):
    """Wait once, when the likeliest tokens are read; a pass over prompts waits a few times more."""
    engine = engine_of(model)
    (decoder,) = engine.chain.decoders
    run, kinds = decoder.run, []
    decoder.run = lambda order, tensors: kinds.append(order.kind) or run(order, tensors)
    with host_waits() as waits:
        answers_of(engine, model.prompts, max_new_tokens=NUM_TOKENS)
    num_prefills = kinds.count("prefill")
    assert kinds.count("decode") > 5 * num_prefills > 0
    often = {place: count for place, count in waits.items() if count > num_prefills}
    ((place, count),) = often.items()
    assert place.startswith("stageline/inference/decoding/sampler.py")
    assert count == kinds.count("decode") + num_prefills


def test_the_budget_is_a_share_of_free_memory():
    free, _ = torch.cuda.mem_get_info(GPU)
    found = cache_budget(GPU, gib=None, processes=8)
    assert found == pytest.approx(free * SHARE_OF_A_GPU, rel=0.05)
    taken = torch.empty(free // 4, dtype=torch.uint8, device=GPU)
    assert cache_budget(GPU, gib=None, processes=8) < 0.85 * found
    del taken
    assert cache_budget(GPU, gib=2.0, processes=8) == 2 * 2**30


def test_the_cache_takes_no_more_than_its_cells(model):
    engine = engine_of(model, max_cells=None)
    (decoder,) = engine.chain.decoders
    budget = 2**22
    cells = cells_within(budget, decoder)
    engine = engine_of(model, max_cells=cells, max_rows=64)
    (decoder,) = engine.chain.decoders
    most, start = [], engine.chain.start

    def watched(*order):
        start(*order)
        most.append(sum(group.cache.num_bytes() for group in decoder.groups.values()))

    engine.chain.start = watched
    answers_of(engine, [*model.prompts] * 10, max_new_tokens=NUM_TOKENS)
    assert 0 < max(most) <= 2 * budget  # buffers grow by steps of 64 columns


def test_a_request_too_large_for_memory_fails_alone(model, library, monkeypatch):
    """Leave room for all prompts but one, next to other work on this GPU."""
    engine = engine_of(model)
    (decoder,) = engine.chain.decoders
    forward = decoder.stage.forward
    longest = max(one["input_ids"].shape[1] for one in model.prompts)

    def hungry(ids, *args, **kwargs):
        if ids.shape[1] == longest:
            free, _ = torch.cuda.mem_get_info(GPU)
            torch.empty(2 * free, dtype=torch.uint8, device=GPU)
        return forward(ids, *args, **kwargs)

    monkeypatch.setattr(decoder.stage, "forward", hungry)
    sampling = Sampling(max_new_tokens=NUM_TOKENS, stop_token_ids=())
    expected = library(torch.float32)
    for place, prompt in enumerate(model.prompts):  # one at a time: none shares its pass
        (found,) = engine.answer([Request(str(place), prompt, sampling)])
        if prompt["input_ids"].shape[1] == longest:
            assert isinstance(found, Failed) and isinstance(found.error, EngineError)
            assert "OutOfMemoryError" in str(found.error)
        else:
            assert found.token_ids == expected[place]
    assert not decoder.groups and engine.is_healthy


def _answer_on(rank, folder, processor, prompts):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    stage = stage_of(folder, rank, 2, device=device)
    return on_ranks(
        stage,
        processor,
        lambda engine: answers_of(engine, prompts, max_new_tokens=NUM_TOKENS),
        device=device,
        max_rows=4,
        num_groups=2,
    )


def _answer_by_nccl(rank, port, found, *model):
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=rank, world_size=2)
    answers = _answer_on(rank, *model)
    if rank == 0:
        found.put(answers)
    dist.destroy_process_group()


@pytest.mark.real
@pytest.mark.cards(2)
def test_two_stages_on_two_gpus(model, library):
    found = mp.get_context("spawn").SimpleQueue()
    of_model = str(model.folder), model.processor, [dict(one) for one in model.prompts]
    context = mp.spawn(_answer_by_nccl, (free_port(), found, *of_model), nprocs=2, join=False)
    answers = found.get()
    context.join()
    assert answers == library(torch.float32)
