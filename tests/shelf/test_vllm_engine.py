"""The engine vllm against a stand-in of the package: what it passes and what it gets."""

import sys

import pytest
import torch

from stageline.data.text.processor import save_processor
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import UserError
from stageline.inference.decoding.request import Failed, Request, Sampling, ScoreRequest
from stageline.inference.vllm_engine import VllmEngine
from tests.helpers import fake_vllm
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.whole_engine import WholeEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported")
    tokenizer = tiny_tokenizer()
    tiny_whole("llama", path, vocab_size=len(tokenizer), noise=0.3)
    save_processor(tokenizer, path)
    return path


@pytest.fixture
def vllm(monkeypatch):
    module = fake_vllm.make_module()
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


@pytest.fixture
def engine(vllm, folder):
    return VllmEngine(folder)


def prompt(*ids):
    row = torch.tensor([ids])
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


def by_key(events):
    return {event.key: event for event in events}


REQUESTS = [
    Request("a", prompt(5, 6, 7), Sampling(max_new_tokens=6)),
    Request("b", prompt(9, 8), Sampling(max_new_tokens=9, stop_token_ids=())),
    Request("c", prompt(5, 9), Sampling(max_new_tokens=5, temperature=1.0, top_p=0.9, seed=3)),
]


def test_answers_are_those_of_the_model(engine):
    expected = by_key(WholeEngine(engine.llm.whole.model, engine.processor).answer(REQUESTS))
    assert by_key(engine.answer(REQUESTS)) == expected
    assert [len(call["prompts"]) for call in fake_vllm.LLM.calls] == [3]


SAME = "temperature top_k min_p repetition_penalty presence_penalty frequency_penalty".split()
SAME += ["seed", "logprobs"]


def test_every_setting_of_the_sampling_arrives(engine):
    sampling = Sampling(
        max_new_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.0,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias=((5, -1.0),),
        seed=11,
        stop=("x",),
        logprobs=2,
        min_new_tokens=2,
    )
    list(engine.answer([Request("a", prompt(5), sampling)]))
    (params,) = fake_vllm.LLM.calls[0]["params"]
    given = {name: getattr(sampling, name) for name in SAME} | {"logit_bias": {5: -1.0}}
    given |= {"max_tokens": 3, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [2]}
    assert {name: getattr(params, name) for name in given} == given
    assert 0 < params.top_p < 1e-5 and params.ignore_eos is False


@pytest.mark.parametrize("is_own", [True, False])
def test_the_token_that_ends_an_answer_is_told_apart(engine, is_own):
    plain = Sampling(max_new_tokens=4, stop_token_ids=())
    (free,) = engine.answer([Request("a", prompt(5, 6), plain)])
    end = free.token_ids[1]
    if is_own:  # one that ends every answer of the model
        engine.stop_ids = engine.llm.whole.stop_ids = (end,)
    ids = None if is_own else (end,)
    sampling = Sampling(max_new_tokens=4, stop_token_ids=ids, logprobs=1)
    (found,) = engine.answer([Request("a", prompt(5, 6), sampling)])
    kept = free.token_ids[: free.token_ids.index(end)]
    assert (found.token_ids, found.stopped_by, found.reason) == (kept, end, "stop")
    assert len(found.logprobs) == len(kept)


def test_log_probabilities_are_of_the_token_and_of_the_likeliest(engine):
    sampling = Sampling(max_new_tokens=3, temperature=2.0, seed=1, stop_token_ids=(), logprobs=2)
    (found,) = engine.answer([Request("a", prompt(5, 6), sampling)])
    row = torch.tensor([[5, 6, *found.token_ids]])
    rows = engine.llm.whole.model(input_ids=row).logits[0].detach()
    for one, row in zip(found.logprobs, rows[1:-1].log_softmax(-1), strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-5)
        assert [token_id for token_id, _ in one.top] == row.topk(2).indices.tolist()


def test_scores_are_those_of_the_model(engine):
    items = [
        ScoreRequest("a", prompt(5, 6, 7, 8), 2),
        ScoreRequest("b", prompt(9, 3, 4), 1),
    ]
    expected = by_key(WholeEngine(engine.llm.whole.model, engine.processor).score(items))
    for found in engine.score(items):
        assert found.logprobs == pytest.approx(expected[found.key].logprobs, abs=1e-5)
        assert found.is_greedy == expected[found.key].is_greedy


def test_a_prompt_that_does_not_fit_fails_alone(engine):
    long = prompt(*[5] * 64)
    found = by_key(engine.answer([Request("long", long, Sampling()), REQUESTS[0]]))
    assert isinstance(found["long"], Failed)
    assert "prompt has 64 tokens" in str(found["long"].error)
    assert found["a"].text
    (failed,) = engine.score([ScoreRequest("long", long, 1)])
    assert isinstance(failed, Failed)


def test_a_rendered_prompt_keeps_its_placeholder_and_its_images(engine, monkeypatch):
    rendered = Rendered((Piece("Which digit is this?"),))
    expected = engine.processor.encode("Which digit is this?")
    assert engine.encode(rendered)["input_ids"].tolist() == [expected]
    made = engine.encode(rendered, ["picture"])
    (failed,) = engine.answer([Request("a", made, Sampling())])
    assert "takes only text" in str(failed.error)
    monkeypatch.setattr("stageline.inference.vllm_engine.get_image_processor", lambda _: object())
    list(engine.answer([Request("a", made, Sampling(max_new_tokens=2))]))
    (handed,) = fake_vllm.LLM.calls[-1]["prompts"]
    assert handed == {"prompt_token_ids": expected, "multi_modal_data": {"image": ["picture"]}}


def test_it_says_how_to_install_vllm(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"pip install 'stageline\[vllm\]'"):
        VllmEngine(folder)
