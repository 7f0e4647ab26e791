"""Pipelined decoding against transformers' generate, token by token, in float32.

Answers of `decoded_models.py` vary and are far from ties, so that tokens must be equal. Prompts
have 1 to 40 tokens; a window of 8 tokens (Mistral, Gemma) is left behind during the answer. Pieces
of prompts have at most 9, so that it ends within a piece and in the one before.
"""

import functools

import peft
import pytest
import torch

import pp_models  # noqa: F401 (puts the parts on the shelf)
from prompt_fn import auto, chat
from register import train_model_register
from stageline.checkpoint.load import quiet
from stageline.errors import UserError
from stageline.inference.decoding.request import (
    Failed,
    Finished,
    Request,
    Sampling,
    ScoreRequest,
    is_alone,
    length_of,
)
from stageline.modules.lora import merge_lora
from tests.helpers import decoded_models
from tests.helpers.decoding_engines import (
    answers_of,
    local_engine,
    noted_orders,
    on_ranks,
    pieces_read,
)
from tests.helpers.pictured_prompts import pictured_prompts
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import DECODERS, VISION_LANGUAGE

NUM_TOKENS, PIECE = 30, 9
SEEING = (*VISION_LANGUAGE, "mllama")
# their text prompts are read in pieces
CUT = tuple(name for name in VISION_LANGUAGE if name != "gemma3_vl")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Family -> a saved model with prompts and transformers' answers, made once."""

    @functools.cache
    def make(family, tied=False):
        folder = tmp_path_factory.mktemp(family)
        with quiet():
            if family not in SEEING:
                count = 16 if family == "llama" and not tied else 3
                return decoded_models.decoded_text_model(
                    family, folder, num_prompts=count, num_tokens=NUM_TOKENS, tied=tied
                )
            try:
                encode = functools.partial(pictured_prompts, prompt_fn=chat, image_token=auto)
                return decoded_models.decoded_vision_model(family, folder, encode=encode)
            except ImportError as error:  # older releases want torchvision for some
                pytest.skip(str(error))

    return make


def stage_of(model, stage, num_stages, **options):
    """Return a stage by the part that serves every model of its kind."""
    generic = "vision_language" if model.family in VISION_LANGUAGE else "causal_lm"
    key = "mllama" if model.family == "mllama" else generic
    with quiet():
        return train_model_register[key](
            config_path=None,
            processor_path=None,
            checkpoint_path=str(model.folder),
            stage=stage,
            num_stages=num_stages,
            **options,
        )[0]


def engine_of(model, num_stages, *, max_rows, num_groups=1, **options):
    stages = [stage_of(model, stage, num_stages, **options) for stage in range(num_stages)]
    return local_engine(stages, model.processor, max_rows=max_rows, num_groups=num_groups)


def in_pieces(engine):
    """Return an engine with the same stages that reads at most `PIECE` prompt tokens in a pass."""
    stages = [decoder.stage for decoder in engine.chain.decoders]
    limits = {"max_rows": engine.limits.max_rows, "num_groups": 1, "prefill_tokens": PIECE}
    return local_engine(stages, engine.processor, **limits)


def assert_same(found, expected):
    """Names the first token that differs."""
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        places = [
            place
            for place in range(len(theirs))
            if ours[place : place + 1] != theirs[place : place + 1]
        ]
        assert not places, f"row {row} differs from token {places[0]} on: {ours} {theirs}"
        assert len(ours) == len(theirs)


# -- every family ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_llama_over_stages_and_batches(num_stages, num_rows, model_of):
    model = model_of("llama")
    engine = engine_of(model, num_stages, max_rows=num_rows, num_groups=min(2, num_rows))
    count = max(num_rows, 3)
    found = answers_of(engine, model.prompts[:count], max_new_tokens=NUM_TOKENS)
    assert_same(found, model.answers[:count])


@pytest.mark.parametrize("family", [name for name in DECODERS if name != "llama"])
def test_decoders(family, model_of):
    model = model_of(family)
    engine = engine_of(model, 2, max_rows=3)
    assert_same(answers_of(engine, model.prompts, max_new_tokens=NUM_TOKENS), model.answers)
    assert_same_in_pieces(engine, model, cuts=True)


def assert_same_in_pieces(engine, model, *, cuts):
    """Prompts of text are read in pieces, if the model is cut; those with images whole."""
    engine = in_pieces(engine)
    orders, num_tokens = noted_orders(engine), len(model.answers[0])
    assert_same(answers_of(engine, model.prompts, max_new_tokens=num_tokens), model.answers)
    for prompt, pieces in zip(model.prompts, pieces_read(orders), strict=True):
        is_cut = cuts and not is_alone(prompt)
        length = length_of(prompt)
        assert len(pieces) == (-(-length // PIECE) if is_cut else 1)


def test_tied_embeddings(model_of):
    model = model_of("qwen2", tied=True)
    engine = engine_of(model, 3, max_rows=3)
    assert_same(answers_of(engine, model.prompts, max_new_tokens=NUM_TOKENS), model.answers)


@pytest.mark.parametrize("family", SEEING)
def test_models_that_see(family, model_of):
    """Prompts with no, one and two pictures in one group."""
    model = model_of(family)
    engine = engine_of(model, 2, max_rows=4)
    num_tokens = len(model.answers[0])
    assert_same(answers_of(engine, model.prompts, max_new_tokens=num_tokens), model.answers)
    negatives = [
        {name: -value if name == "pixel_values" else value for name, value in one.items()}
        for one in model.prompts
    ]
    changed = answers_of(engine, negatives, max_new_tokens=num_tokens)
    assert [a != b for a, b in zip(changed, model.answers, strict=True)].count(True) >= 2
    assert changed[1] == model.answers[1]
    assert_same_in_pieces(engine, model, cuts=family in CUT)


# -- sequences come and go -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_others_take_the_place_of_those_that_are_done(family, model_of):
    """More requests than rows, answers of many lengths."""
    model = model_of(family)
    engine = engine_of(model, 2, max_rows=4, num_groups=2)
    prompts = [model.prompts[place % len(model.prompts)] for place in range(16)]
    most = [1 + 7 * place % NUM_TOKENS for place in range(16)]
    requests = [
        Request(str(place), prompt, Sampling(max_new_tokens=count, stop_token_ids=()))
        for place, (prompt, count) in enumerate(zip(prompts, most, strict=True))
    ]
    done = {int(one.key): one for one in engine.answer(iter(requests))}
    expected = [
        model.answers[place % len(model.prompts)][:count] for place, count in enumerate(most)
    ]
    assert_same([done[place].token_ids for place in range(16)], expected)
    assert {one.reason for one in done.values()} == {"length"}
    assert list(done) != sorted(done), "short answers must not wait for long ones"
    stats = engine.stats()
    assert (stats.running, stats.queued, stats.cache_cells) == (0, 0, 0)


def test_groups_become_one_when_few_are_left(model_of, monkeypatch):
    model = model_of("llama")
    monkeypatch.setattr("stageline.inference.decoding.engine.ROWS_OF_A_GROUP", 4)
    engine = engine_of(model, 2, max_rows=8, num_groups=None)
    seen = []
    requests = [
        Request(str(place), prompt, Sampling(max_new_tokens=2 + 4 * place, stop_token_ids=()))
        for place, prompt in enumerate(model.prompts[:8])
    ]
    found = {}
    for one in engine.answer(requests):
        seen.append(engine.stats().num_groups)
        found[int(one.key)] = one.token_ids
    expected = [model.answers[place][: 2 + 4 * place] for place in range(8)]
    assert_same([found[place] for place in range(8)], expected)
    assert max(seen) == 2 and seen[-2] == 1, seen


def test_an_end_token_ends_one_answer_alone(model_of):
    model = model_of("llama")
    engine = engine_of(model, 2, max_rows=6, num_groups=2)
    stop = model.answers[2][9]
    expected = [ids[: ids.index(stop)] if stop in ids else ids for ids in model.answers[:6]]
    assert sum(len(ids) < NUM_TOKENS for ids in expected) in range(1, 6)
    found = answers_of(engine, model.prompts[:6], max_new_tokens=NUM_TOKENS, stop_token_ids=(stop,))
    assert found == expected


def test_a_cancelled_answer_leaves_the_others_alone(model_of):
    model = model_of("llama")
    engine = engine_of(model, 2, max_rows=5)
    events = {}

    def listen(event):
        events.setdefault(event.key, []).append(event)
        if event.key == "1" and len(events["1"]) == 1:
            engine.cancel("1")
        if sum(isinstance(found[-1], Finished | Failed) for found in events.values()) == 5:
            engine.stop()

    sampling = Sampling(max_new_tokens=NUM_TOKENS, stop_token_ids=())
    for place in range(5):
        engine.submit(Request(str(place), model.prompts[place], sampling), listen)
    engine.run()
    ends = [events[str(place)][-1] for place in range(5)]
    assert [end.reason for end in ends] == ["length", "cancelled", *["length"] * 3]
    assert 0 < len(ends[1].token_ids) < NUM_TOKENS
    kept = [(end.token_ids, model.answers[place]) for place, end in enumerate(ends) if place != 1]
    assert_same(*zip(*kept, strict=True))
    assert ends[1].token_ids == model.answers[1][: len(ends[1].token_ids)]


def test_a_prompt_without_room_fails_alone(model_of):
    model = model_of("llama")
    stages = [stage_of(model, 0, 1)]
    engine = local_engine(stages, model.processor, max_rows=3, max_length=20)
    sampling = Sampling(max_new_tokens=NUM_TOKENS, stop_token_ids=())
    requests = [Request(str(i), model.prompts[i], sampling) for i in range(3)]
    found = {one.key: one for one in engine.answer(requests)}
    assert isinstance(found["1"].error, UserError)
    assert found["0"].token_ids == model.answers[0][:19]
    assert found["2"].token_ids == model.answers[2][:13]


# -- other weights ---------------------------------------------------------------------------


def test_lora_unmerged_and_merged(model_of, tmp_path):
    model = model_of("llama")
    prompts = model.prompts[:3]
    whole = decoded_models.load_whole(model.folder)
    settings = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules=["q_proj", "v_proj", "up_proj"])
    adapted = peft.get_peft_model(whole, settings)
    torch.manual_seed(6)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(tmp_path)
    expected, margin = decoded_models.generated(adapted.eval(), prompts, NUM_TOKENS)
    assert margin > decoded_models.LEAST_MARGIN and expected != list(model.answers[:3])
    stages = [stage_of(model, stage, 2, adapter_path=[tmp_path]) for stage in range(2)]
    engine = local_engine(stages, model.processor, max_rows=3, num_groups=1)
    assert_same(answers_of(engine, prompts, max_new_tokens=NUM_TOKENS), expected)
    for stage in stages:
        merge_lora(stage)
    engine = local_engine(stages, model.processor, max_rows=3, num_groups=1)
    assert_same(answers_of(engine, prompts, max_new_tokens=NUM_TOKENS), expected)


def test_bfloat16(model_of, record_property):
    """Compute one row at a time as transformers does; batches may round in another way.

    Where a batch first chooses another token, transformers' own logits of the two are close: each
    value is rounded at the 9th bit, to 0.4 %, and logits are up to about 4 deviations large.
    """
    model = model_of("llama")
    whole, prompts = decoded_models.load_whole(model.folder, torch.bfloat16), model.prompts[:6]
    expected, _ = decoded_models.generated(whole, prompts, NUM_TOKENS)
    alone = engine_of(model, 2, max_rows=1, dtype=torch.bfloat16)
    assert_same(answers_of(alone, prompts, max_new_tokens=NUM_TOKENS), expected)
    together = engine_of(model, 2, max_rows=6, num_groups=2, dtype=torch.bfloat16)
    found = answers_of(together, prompts, max_new_tokens=NUM_TOKENS)
    same = [ours == theirs for ours, theirs in zip(found, expected, strict=True)]
    record_property("answers as the library's", f"{sum(same)} of {len(same)}")
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        assert distance_at_parting(whole, prompt, ours, theirs) < 0.1


def distance_at_parting(whole, prompt, ours, theirs):
    """Return how far our first other token is behind transformers', in deviations of the logits."""
    parted = [place for place in range(len(theirs)) if ours[place] != theirs[place]]
    if not parted:
        return 0.0
    ids = torch.cat([prompt["input_ids"], torch.tensor([theirs[: parted[0]]]).long()], dim=1)
    with torch.no_grad():
        logits = whole(ids).logits[0, -1].float()
    return ((logits.max() - logits[ours[parted[0]]]) / logits.std()).item()


# -- scores ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_scores_are_the_librarys(family, model_of):
    model = model_of(family)
    engine = engine_of(model, 2, max_rows=3)
    rows = [
        torch.cat([prompt["input_ids"], torch.tensor([answer[:5]])], dim=1)
        for prompt, answer in zip(model.prompts[:3], model.answers[:3], strict=True)
    ]
    rows[2][0, -2] = (rows[2][0, -2] + 1) % 200  # no longer the likeliest
    items = [
        ScoreRequest(str(i), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 5)
        for i, ids in enumerate(rows)
    ]
    found = {one.key: one for one in engine.score(items)}
    whole = decoded_models.load_whole(model.folder)
    for place, ids in enumerate(rows):
        with torch.no_grad():
            logprobs = whole(ids).logits[0, -6:-1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, -5:, None])[:, 0]
        scored = found[str(place)]
        torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=1e-4, atol=1e-4)
        assert scored.is_greedy == (place < 2)


# -- real ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "num_ranks", "num_groups"),
    [("llama", 2, 2), ("qwen3_vl", 2, 2), ("gemma3", 4, None)],
)
def test_ranks(family, num_ranks, num_groups, model_of):
    """Each rank its stage; the number of groups given, or by the rule."""
    model = model_of(family)
    num_tokens = len(model.answers[0])

    def work(engine):
        return [answers_of(engine, model.prompts, max_new_tokens=num_tokens) for _ in range(2)]

    def run(rank):
        stage = stage_of(model, rank, num_ranks)
        return on_ranks(stage, model.processor, work, max_rows=6, num_groups=num_groups)

    first, second = run_ranks(run, num_ranks)[0]
    assert_same(first, model.answers)
    assert first == second
