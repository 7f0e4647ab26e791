"""Prompts in front of their answers, with log-probabilities, against transformers' model."""

import json
import threading
from types import SimpleNamespace

import httpx
import pytest
import torch

from prompt_fn import auto, chat
from register import import_shelf
from stageline.data.text.processor import save_processor
from stageline.errors import UserError
from stageline.inference.decoding import stage_decoder
from stageline.inference.decoding import stage_decoder as scores
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.request import (
    Request,
    Sampling,
    Scored,
    ScoreRequest,
    TokenLogprob,
)
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import StageDecoder
from stageline.serving.service import TokenTexts
from stageline.training.distillation import TeacherServer
from tests.helpers.served import served
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer

pytest.importorskip("fastapi")
from commands.decode_run import AnsweringModel  # noqa: E402

import_shelf("pp_models")
POSITIONS = 128
PATH = "/v1/completions"
TEXTS = ["The cat sat on the mat. ", "ü😀 or not", "a"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer(["The cat sat on the mat.", "Dogs do not sit, or do they?"])
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
    whole = tiny_whole("llama", folder, noise=0.3, **sizes)
    save_processor(tokenizer, folder)
    return folder, whole.eval(), tokenizer


def engine_of(folder, tokenizer, **limits):
    built = AnsweringModel(folder, 2, torch.float32)
    stages = [StageDecoder(built.build(stage, "cpu")) for stage in range(2)]
    limits = {"max_length": POSITIONS, "num_groups": 1, **limits}
    return DecodingEngine(
        LocalChain(stages), tokenizer=tokenizer, limits=Limits(**limits), stop_ids=()
    )


@pytest.fixture(scope="module")
def client(model):
    engine = engine_of(model[0], model[2])
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    with (
        served(engine, render=chat, image_token=auto, max_echo_tokens=100) as running,
        httpx.Client(base_url=running.url, timeout=30) as made,
    ):
        made.service = running.service
        yield made
    engine.stop()
    thread.join(10)


def ask(client, prompt, **fields):
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "echo": True, **fields}
    return client.post(PATH, json=body)


@torch.no_grad()
def by_the_library(whole, ids):
    """Log-probabilities of all tokens but the first, and the likeliest two in their places."""
    logprobs = whole(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    values = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return values.tolist(), logprobs.topk(2)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_log_probabilities_of_prompts_are_those_of_the_library(model, client, max_tokens):
    _, whole, tokenizer = model
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    for given in (TEXTS, ids):
        answer = ask(client, given, max_tokens=max_tokens, logprobs=2).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        for text, row, choice in zip(TEXTS, ids, answer["choices"], strict=True):
            assert choice["text"].startswith(text)
            found, size = choice["logprobs"], len(row)
            assert all(len(values) == size + max_tokens for values in found.values())
            # the answer gets log-probabilities, too
            row = row + whole.generate(
                torch.tensor([row]), max_new_tokens=max(1, max_tokens), do_sample=False,
                eos_token_id=None,
            )[0, size:].tolist()[:max_tokens]  # fmt: skip
            if len(row) == 1:
                assert found["token_logprobs"] == [None] == found["top_logprobs"]
                continue
            values, best = by_the_library(whole, row)
            assert found["token_logprobs"][0] is None is found["top_logprobs"][0]
            assert found["token_logprobs"][1:] == pytest.approx(values, abs=1e-4)
            for place, top in enumerate(found["top_logprobs"][1:]):
                assert max(top.values()) == pytest.approx(best.values[place, 0].item(), abs=1e-4)
                assert tokenizer.decode(best.indices[place, :1]) in top
                assert found["tokens"][place + 1] in top and len(top) <= 3
            reason = choice["finish_reason"]
            assert reason == "length" and choice["text"] == tokenizer.decode(row)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["usage"]["completion_tokens"] == 3 * max_tokens


def test_offsets_point_at_the_text(client):
    choice = ask(client, "The cat 😀 sat", max_tokens=2, logprobs=0).json()["choices"][0]
    found = choice["logprobs"]
    assert found["top_logprobs"] is None
    places = list(zip(found["tokens"], found["text_offset"], strict=True))
    whole = [(token, place) for token, place in places if "\ufffd" not in token]
    assert len(whole) > 5
    assert all(choice["text"].startswith(token, place) for token, place in whole)


def test_an_echo_without_log_probabilities_asks_the_engine_for_none(client):
    answer = ask(client, ["The cat", "a"], max_tokens=0).json()
    assert answer["choices"][0]["text"] == "The cat"
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}
    one = ask(client, "The cat", max_tokens=4, n=2).json()["choices"]
    plain = ask(client, "The cat", max_tokens=4, echo=False).json()["choices"][0]
    assert [choice["text"] for choice in one] == ["The cat" + plain["text"]] * 2


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_says_the_same(client, max_tokens):
    fields = {"max_tokens": max_tokens, "logprobs": 1, "n": 2, "seed": 1}
    whole = ask(client, TEXTS[:2], **fields).json()
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = [line[6:] for line in ask(client, TEXTS[:2], **fields).text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert chunks.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [one for chunk in chunks for one in chunk["choices"]]
        parts = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == "length"
        told = {
            name: sum((part["logprobs"][name] for part in parts if part["logprobs"]), [])
            for name in choice["logprobs"]
        }
        for name, values in choice["logprobs"].items():
            assert len(told[name]) == len(values) and told[name][0] == values[0]
            # sums of floats depend on which rows a pass has
            is_number = name == "token_logprobs"
            near = pytest.approx(values[1:], abs=1e-4) if is_number else values[1:]
            assert name == "top_logprobs" or told[name][1:] == near


def test_the_token_that_ends_a_text_is_listed_with_the_others(model, client):
    _, whole, tokenizer = model
    row = tokenizer("The cat")["input_ids"]
    made = whole.generate(torch.tensor([row]), max_new_tokens=2, do_sample=False)[0].tolist()
    engine = client.service.engine
    engine.stop_ids = (made[-1],)
    try:
        answer = ask(client, "The cat", max_tokens=9, logprobs=1).json()["choices"][0]
    finally:
        engine.stop_ids = ()
    assert answer["finish_reason"] == "stop" and answer["text"] == tokenizer.decode(made[:-1])
    assert answer["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in made]
    values, _ = by_the_library(whole, made)
    assert answer["logprobs"]["token_logprobs"][1:] == pytest.approx(values, abs=1e-4)


def test_what_cannot_be_echoed_is_refused(client):
    def told(answer):
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["param"], answer.json()["error"]["code"]

    assert told(ask(client, "a", max_tokens=0, echo=False)) == ("max_tokens", "invalid_value")
    long = [7] * POSITIONS
    assert ask(client, long, max_tokens=0).status_code == 200
    too_long = ("prompt", "context_length_exceeded")
    assert told(ask(client, [*long, 7], max_tokens=0)) == too_long
    assert told(ask(client, long, max_tokens=0, logprobs=0)) == ("echo", too_long[1])
    assert told(ask(client, long, max_tokens=1, logprobs=0)) == ("max_tokens", too_long[1])
    assert client.service.queue.num_places == 0


def test_a_model_that_gives_no_numbers_is_told(client, monkeypatch):
    def no_numbers(logits_TV, targets, *, num_top):
        return [float("nan")] * len(targets), False, [[(0, float("nan"))]] * len(targets)

    monkeypatch.setattr(stage_decoder, "score_row", no_numbers)
    answer = ask(client, "The cat", max_tokens=0, logprobs=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")


def test_long_rows_are_judged_in_pieces(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(7, 11).bfloat16()
    best = logits.argmax(-1).tolist()
    for targets in (best, [*best[:2], (best[2] + 1) % 11, *best[3:]]):
        whole = scores.score_row(logits, targets, num_top=3)
        expected = logits.float().log_softmax(-1)
        assert whole[0] == expected[range(7), targets].tolist()
        assert whole[1] == (targets == best)
        assert [[token for token, _ in top] for top in whole[2]] == expected.topk(3)[1].tolist()
        with monkeypatch.context() as patch:
            patch.setattr(scores, "PIECE", 25)
            assert scores.score_row(logits, targets, num_top=3) == whole
    assert scores.score_row(logits, best, num_top=99)[2][0][0][0] == best[0]


def test_of_two_tokens_with_one_text_the_likelier_is_told(model):
    texts = TokenTexts(model[2])
    texts.text = lambda token_id: "same" if token_id < 8 else "other"
    one = TokenLogprob(7, -3.0, ((5, -0.5), (9, -1.0), (6, -2.0)))
    found = texts.plain([one], offset=0, num_top=3)["top_logprobs"]
    assert found == [{"same": -0.5, "other": -1.0}]


def rows(count, length=5):
    ids = torch.arange(length)[None] + 3
    one = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return [ScoreRequest(str(number), one, length - 1, 1) for number in range(count)]


def test_scores_and_answers_take_turns(model):
    """Many rows that are scored do not keep an answer waiting, nor it them."""
    engine, order = engine_of(model[0], model[2], prefill_tokens=5), []
    answer = Request("answer", rows(1)[0].prompt, Sampling(max_new_tokens=20, stop_token_ids=()))
    for row in rows(12):
        engine.submit(row, order.append)
    engine.submit(answer, order.append)
    ends = []
    engine.submit(rows(13)[-1], lambda event: (ends.append(event), engine.stop()))
    engine.run()
    kinds = [type(event) for event in order]
    first_piece = next(n for n, event in enumerate(order) if not isinstance(event, Scored))
    assert kinds.count(Scored) == 12 and isinstance(ends[0], Scored)
    assert first_piece < 6, "the answer began before all rows were scored"


def test_a_teacher_behind_the_server_is_a_teacher_in_the_pipeline(model, client):
    """Check rows padded and packed: the likeliest tokens of each supervised place, as ids."""
    _, whole, tokenizer = model
    rows = [tokenizer(text)["input_ids"] for text in TEXTS[:2]]
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for row, own in enumerate(rows):
        ids[row, : len(own)], mask[row, : len(own)] = torch.tensor(own), 1
    labels = torch.where(mask.bool() & (torch.arange(width) > 1), ids, -100)
    padded = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    joined, numbers = sum(rows, []), [0] * len(rows[0]) + [1] * len(rows[1])
    packed = {
        "input_ids": torch.tensor([joined]),
        "attention_mask": torch.ones(1, len(joined), dtype=torch.long),
        "sample_ids": torch.tensor([numbers]),
        "labels": torch.cat([labels[row, : len(own)] for row, own in enumerate(rows)])[None],
    }
    runner = SimpleNamespace(schedule=SimpleNamespace(last_stage_rank=0), pp_rank=0)
    ask = TeacherServer(runner, str(client.base_url.join("/v1")), top_k=3, model="tiny")
    for values, found in ask([padded, packed]):
        wanted = [whole(torch.tensor([own])).logits[0, 1:-1].log_softmax(-1) for own in rows]
        best = torch.cat(wanted).topk(3)
        assert torch.equal(found, best.indices)
        torch.testing.assert_close(values, best.values, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="top_k that it allows"):
        TeacherServer(runner, str(client.base_url.join("/v1")), top_k=50, model="tiny")([padded])
