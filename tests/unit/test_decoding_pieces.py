"""Prompts that are read in pieces while others are answered; faults; models that support it.

Expected are transformers' answers. All families: tests/distributed/test_decoding.py.
"""

import contextlib

import pytest
import torch
import transformers

import pp_models  # noqa: F401 (puts the parts on the shelf)
from stageline.inference.decoding.cache import GroupCache
from stageline.inference.decoding.request import EngineError, Finished, length_of
from stageline.stages.causal_lm import can_be_cut
from tests.helpers.decoded_models import decoded_text_model
from tests.helpers.decoding_engines import (
    answer_all,
    check_nothing_is_left,
    llama_engine,
    noted_orders,
    pieces_read,
    request_of,
)
from tests.helpers.tiny_models import tiny_config

NUM_TOKENS, PIECE = 12, 7
LONG = 1  # the prompt of 40 tokens: six pieces


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return decoded_text_model("llama", folder, num_prompts=6, num_tokens=NUM_TOKENS)


def engine_of(model, num_stages, **limits):
    return llama_engine(model, num_stages, **{"prefill_tokens": PIECE, **limits})


# -- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_stages", "num_groups"), [(1, 1), (4, 2)])
def test_answers_while_others_run(num_stages, num_groups, model):
    engine = engine_of(model, num_stages, num_groups=num_groups)
    orders = noted_orders(engine)
    assert answer_all(engine, model) == {}
    lengths = [length_of(prompt) for prompt in model.prompts]
    read = pieces_read(orders)
    assert [len(pieces) for pieces in read] == [-(-length // PIECE) for length in lengths]
    for length, pieces in zip(lengths, read, strict=True):
        if length > PIECE:
            ends = [end for _, end in pieces]
            assert [first for first, _ in pieces] == [0, *ends[:-1]] and ends[-1] == length
            assert max(end - first for first, end in pieces) <= PIECE
    assert engine.stats().prompt_tokens == sum(lengths)


def test_pieces_that_are_not_the_last_make_no_logits(model):
    engine = engine_of(model, 2)
    head, seen = engine.chain.decoders[-1].stage.whole.lm_head, []
    hook = head.register_forward_hook(lambda module, args, logits: seen.append(logits.shape[1]))
    (answer,) = engine.answer([request_of(model, LONG, max_new_tokens=2)])
    hook.remove()
    assert answer.token_ids == model.answers[LONG][:2]
    assert seen == [0] * 5 + [1, 1]


def test_a_repetition_is_one_of_all_pieces(model):
    """The penalty takes the tokens of the whole prompt, wherever it was cut."""
    settings = {"repetition_penalty": 1.9}
    (cut,) = engine_of(model, 2).answer([request_of(model, LONG, **settings)])
    whole_engine = engine_of(model, 2, prefill_tokens=2048)
    (whole,) = whole_engine.answer([request_of(model, LONG, **settings)])
    assert cut.token_ids == whole.token_ids != model.answers[LONG]


# -- faults ----------------------------------------------------------------------------------


@contextlib.contextmanager
def failing_piece(decoder, error, first):
    """Make the model raise where a piece begins with that token of its prompt."""
    read, forward, failed = decoder._passes["prefill"], decoder._forward, []

    def reads(order, tensors):
        def forwards(*args):
            output = forward(*args)  # keys and values are written
            if order.piece[:1] == [first]:
                failed.append(order)
                raise error
            return output

        decoder._forward = forwards
        try:
            return read(order, tensors)
        finally:
            decoder._forward = forward

    decoder._passes["prefill"] = reads
    yield
    decoder._passes["prefill"] = read
    assert len(failed) == 1


# the first piece, one in the middle, the last one
@pytest.mark.parametrize(("stage", "first"), [(0, 0), (1, 14), (0, 35), (1, 35)])
def test_a_piece_that_fails_ends_its_prompt_alone(stage, first, model):
    error = torch.OutOfMemoryError("no room")
    engine = engine_of(model, 2)
    with failing_piece(engine.chain.decoders[stage], error, first):
        answers = engine.answer(request_of(model, place) for place in (0, LONG, 2))
        found = {one.key: one for one in answers}
    assert str(found.pop("1").error) == f"stage {stage}: {type(error).__name__}: {error}"
    for key, one in found.items():
        assert one.token_ids == model.answers[int(key)]
    check_nothing_is_left(engine)
    (again,) = engine.answer([request_of(model, LONG)])
    assert again.token_ids == model.answers[LONG], "the engine is as before"


def test_a_prompt_that_is_cancelled_between_its_pieces_ends_at_once(model):
    engine = engine_of(model, 2, max_rows=2)
    events, orders, before = {}, noted_orders(engine), []

    def listen(event):
        events.setdefault(event.key, []).append(event)
        if event.key == "0" and len(events["0"]) == 3:  # it got steps, each after a piece
            before.extend(orders)
            engine.cancel("1")
        if all(isinstance(events.get(key, [None])[-1], Finished) for key in "012"):
            engine.stop()

    for place in (0, LONG, 2):
        engine.submit(request_of(model, place), listen)
    engine.run()
    (end,) = events["1"]
    assert (end.reason, end.token_ids) == ("cancelled", ())
    for key in "02":
        assert events[key][-1].token_ids == model.answers[int(key)]
    assert 2 <= len(pieces_read(before)[1]) < 6
    assert not any(order.piece for order in orders[len(before) :])
    assert not any(decoder.unfinished for decoder in engine.chain.decoders)
    assert engine.stats().running == engine.stats().cache_cells == 0


@pytest.mark.parametrize("at", [0, 1])
def test_a_finished_prompt_that_finds_no_room_in_its_group_ends_the_group(at, model, monkeypatch):
    """On the first stage, or on the second, where the first one has it."""
    engine, join, calls = engine_of(model, 2, max_rows=2), GroupCache.join, iter(range(99))

    def joined(self, other):
        if next(calls) == at:
            raise torch.OutOfMemoryError("no room")
        join(self, other)

    monkeypatch.setattr(GroupCache, "join", joined)
    found = {one.key: one for one in engine.answer(request_of(model, i) for i in (0, LONG))}
    assert isinstance(found["1"].error, EngineError) and "no room" in str(found["1"].error)
    assert isinstance(found["0"].error, EngineError) and "were lost" in str(found["0"].error)
    check_nothing_is_left(engine)


# -- which models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4,
                                      "long_factor": [2.0] * 4, "factor": 2.0}}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0},
                                        "sliding_attention": {"rope_type": "default"}}}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("qwen3", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    ],
)  # fmt: skip
def test_models_whose_pieces_are_not_parts_of_the_whole(family, fields):
    """Frequencies that follow the longest row, states, and attention that looks ahead."""
    config = tiny_config(family)
    assert can_be_cut(config)
    for name, value in fields.items():
        setattr(config, name, value)
    assert not can_be_cut(config)


def test_models_that_no_test_compares_are_read_whole():
    assert not can_be_cut(transformers.OPTConfig())
    assert not can_be_cut(tiny_config("gemma3_vl"))
