"""Sampling, stops and log-probabilities through the engine, against plain transformers."""

import pytest
import torch
from transformers.generation import logits_process as hf

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.checkpoint.load import quiet
from stageline.inference.decoding.answer import AnswerText, Running
from stageline.inference.decoding.request import Request, Sampling
from stageline.inference.decoding.sampler import SampledRow
from tests.helpers.decoded_models import decoded_text_model, load_whole
from tests.helpers.decoding_engines import built_stages, local_engine

NUM_TOKENS = 16
SAMPLED = {"temperature": 3.0, "top_k": 40, "top_p": 0.95, "min_p": 0.001}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return decoded_text_model("llama", folder, num_prompts=6, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def exact(model):
    """Return transformers' model in float64."""
    with quiet():
        return load_whole(model.folder).double()


@pytest.fixture(scope="module")
def engine_of(model):
    def make(num_stages=1, **limits):
        stages = built_stages(train_model_register["causal_lm"], model.folder, num_stages)
        return local_engine(stages, model.processor, **limits)

    return make


def _requests(model, **sampling):
    """Return a request for each prompt, with the seed of its number."""
    sampling = {"max_new_tokens": NUM_TOKENS, "stop_token_ids": (), **sampling}
    return [
        Request(str(place), prompt, Sampling(seed=place, **sampling))
        for place, prompt in enumerate(model.prompts)
    ]


def _answers(engine, requests):
    found = {answer.key: answer for answer in engine.answer(requests)}
    assert len(found) == len(requests)
    return [found[request.key] for request in requests]


@torch.inference_mode()
def _logits(exact, request, token_ids):
    """Return the logits of each token of an answer, read at once after its prompt."""
    prompt = request.prompt["input_ids"]
    ids = torch.cat([prompt, torch.tensor([list(token_ids)])], dim=1)
    return exact(ids).logits[0, prompt.shape[1] - 1 : -1], ids


def test_no_stop_comes_before_the_least_number_of_tokens(model, engine_of):
    """Draw no id that would end the answer early, like transformers' min_new_tokens."""
    whole, engine = load_whole(model.folder), engine_of(2)
    for prompt in model.prompts[:2]:
        ids = prompt["input_ids"]
        free = whole.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS)[0, ids.shape[1] :]
        stop = free[2].item()  # the third token would end it
        options = {"max_new_tokens": NUM_TOKENS, "stop_token_ids": (stop,)}
        for least in (0, 3, 7):
            settings = {"min_new_tokens": least, "eos_token_id": stop, "pad_token_id": 0}
            made = whole.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, **settings)
            expected = made[0, ids.shape[1] :].tolist()
            request = Request("a", prompt, Sampling(min_new_tokens=least, **options))
            (found,) = _answers(engine, [request])
            ended = [stop] if found.stopped_by == stop else []
            assert [*found.token_ids, *ended] == expected
            assert found.completion_tokens >= least


def test_a_seed_gives_the_same_answer_alone_and_among_others(model, engine_of):
    requests = _requests(model, repetition_penalty=1.1, **SAMPLED)
    together = _answers(engine_of(2, max_rows=6, num_groups=2), requests)
    alone = engine_of(max_rows=1)
    for request, answer in zip(requests, together, strict=True):
        assert _answers(alone, [request])[0].token_ids == answer.token_ids
    # in other company and another order
    some = _answers(engine_of(3, max_rows=2), requests[::-2])
    assert [a.token_ids for a in some] == [a.token_ids for a in together[::-2]]


def test_sampled_answers_are_those_of_the_librarys_processors(model, exact, engine_of):
    """The same numbers drawn from what transformers' classes make of the whole model's logits."""
    requests = _requests(model, repetition_penalty=1.3, **SAMPLED)
    warpers = [
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.TemperatureLogitsWarper(SAMPLED["temperature"]),
        hf.TopKLogitsWarper(SAMPLED["top_k"]),
        hf.TopPLogitsWarper(SAMPLED["top_p"]),
        hf.MinPLogitsWarper(SAMPLED["min_p"]),
    ]
    num_unlikely = 0
    answers = _answers(engine_of(2, max_rows=6, num_groups=2), requests)
    for request, answer in zip(requests, answers, strict=True):
        logits, ids = _logits(exact, request, answer.token_ids)
        length = request.prompt["input_ids"].shape[1]
        drawn = SampledRow(request.sampling, None, [])
        for index, token in enumerate(answer.token_ids):
            scores = logits[index : index + 1].clone()
            for warper in warpers:
                scores = warper(ids[:, : length + index], scores)
            sums = scores.softmax(-1)[0].cumsum(-1)
            assert token == int((sums <= drawn.next_number()).sum())
            num_unlikely += token != scores.argmax().item()
    assert num_unlikely > 10  # the answers are sampled ones indeed


def test_logprobs_are_those_of_the_whole_model_in_float64(model, exact, engine_of):
    for options in ({}, {"repetition_penalty": 1.3, "logit_bias": ((20, 2.0),), **SAMPLED}):
        requests = _requests(model, logprobs=3, **options)
        answers = _answers(engine_of(2, max_rows=4, num_groups=2), requests)
        for request, answer in zip(requests, answers, strict=True):
            expected = _logits(exact, request, answer.token_ids)[0].log_softmax(-1)
            assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
            for row, one in zip(expected, answer.logprobs, strict=True):
                assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-4)
                values, ids = row.topk(3)
                assert [token for token, _ in one.top] == ids.tolist()
                assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


def _stop_within(text):
    """Three characters of the text after its beginning, where it has three in a row."""
    parts = [text[place : place + 3] for place in range(3, len(text) - 3)]
    return next((one for one in parts if "\ufffd" not in one and text.index(one) > 2), None)


def test_stop_strings_end_one_answer_and_leave_the_others_alone(model, engine_of):
    engine = engine_of(2, max_rows=6, num_groups=2)
    free = _answers(engine, _requests(model))
    stops = [_stop_within(answer.text) for answer in free]
    place, stop = next((place, stop) for place, stop in enumerate(stops) if stop)
    text, requests = free[place].text, _requests(model)
    requests[place] = _requests(model, stop=(stop, "never"))[place]
    found = _answers(engine, requests)
    stopped = found[place]
    assert (stopped.reason, stopped.stopped_by) == ("stop", stop)
    assert stopped.text == text[: text.index(stop)]
    count = len(stopped.token_ids)
    assert stopped.token_ids == free[place].token_ids[:count]
    decode = model.processor.decode
    assert stop in decode(stopped.token_ids) and stop not in decode(stopped.token_ids[:-1])
    assert [one.text for one in found if one is not stopped] == [
        one.text for one in free if one is not free[place]
    ]


def test_a_stop_string_that_shows_only_at_the_end_is_the_reason(model):
    """Half a character at the last token: only then is it certain that no other half comes."""
    tokenizer = model.processor
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) > 2
    sampling = Sampling(max_new_tokens=1, stop=("\ufffd",))
    events = []
    text = AnswerText(tokenizer, sampling.stop, ())
    Running(Request("a", model.prompts[0], sampling), events.append, text).take(ids[0], None)
    assert (events[-1].reason, events[-1].stopped_by, events[-1].text) == ("stop", "\ufffd", "")
