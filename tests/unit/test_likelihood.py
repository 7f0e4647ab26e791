"""Likelihoods of continuations and texts against plain transformers and lm-evaluation-harness."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from metric import answer_likelihood, choice_accuracy, text_perplexity
from models.generate import generate
from models.likelihood import loglikelihood, perplexity
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError
from stageline.inference.decoding.request import Failed, Finished, Scored
from stageline.inference.generation import continuation_row, first_token, windows
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

TOKENIZERS = {
    "bytes": tiny_tokenizer(),
    "bytes, bos": tiny_tokenizer(adds_bos=True),
    "low lines, bos": tiny_metaspace_tokenizer(prepend_scheme="first"),
}
CASES = [
    ("Question: Which digit is this?\nAnswer:", [" 7", " not true", " the cat, of the dog"]),
    ("Is the statement true or false? ", ["true", "false"]),
    ("The cat is left of the dog.\n\n", ["yes", "no and no"]),
    ("", ["Which digit", "What"]),
]


def rendered(text, **options):
    return Rendered((Piece(text, is_user=True),), name="a sample", **options)


def lines(found):
    """Return lines as the runner writes them."""
    return [{**found[place], "prediction": found[place]["text"]} for place in sorted(found)]


def tiny_model(family="llama", **options):
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(tiny_config(family, vocab_size=400, **options)).eval()


def logprobs(model, ids, num_targets):
    """Return log-probabilities of one row, by itself, in float64."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([ids])).logits[0]
    found = torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]]
    greedy = logits.argmax(-1)[:-1] == torch.tensor(ids[1:])
    return found[-num_targets:].sum().item(), bool(greedy[-num_targets:].all())


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_at_the_border_are_those_of_lm_eval(kind):
    TemplateLM = pytest.importorskip("lm_eval.api.model").TemplateLM
    tokenizer = TOKENIZERS[kind]

    class Theirs(TemplateLM):
        eot_token_id = prefix_token_id = tokenizer.bos_token_id
        loglikelihood_rolling = generate_until = None

        def tok_encode(self, text, add_special_tokens=None, **_):
            options = {} if add_special_tokens is None else {"add_special_tokens": False}
            return tokenizer.encode(text, **options)

        def _loglikelihood_tokens(self, requests, **_):
            return [(before, after) for _, before, after in requests]

    pairs = [(context, text) for context, texts in CASES for text in texts]
    asked = [type("Request", (), {"args": pair})() for pair in pairs]
    for (before, after), (context, text) in zip(
        Theirs().loglikelihood(asked, disable_tqdm=True), pairs, strict=True
    ):
        row = continuation_row(rendered(context), text, images=None, processor=tokenizer)
        assert row.input_ids == [*before, *after]
        assert row.num_targets == len(after)


def test_choices_have_the_likelihoods_that_each_has_alone_in_float64():
    tokenizer, model = TOKENIZERS["bytes, bos"], tiny_model()
    samples = [
        {"id": str(n), "choices": [text.strip() for text in texts], "answer_index": 1}
        for n, (_, texts) in enumerate(CASES)
    ]
    prompts = [rendered(context.rstrip()) for context, _ in CASES]
    options = {"images": [None] * 4, "prompts": prompts, "samples": samples}
    found = dict(loglikelihood(model, tokenizer, **options, batch_size=3))
    wanted = tiny_model().double()
    for place, sample in enumerate(samples):
        for choice, own in zip(sample["choices"], found[place]["choice_scores"], strict=True):
            row = continuation_row(prompts[place], f" {choice}", images=None, processor=tokenizer)
            total, is_greedy = logprobs(wanted, row.input_ids, row.num_targets)
            assert own["logprob"] == pytest.approx(total, abs=1e-4)
            assert own["is_greedy"] == is_greedy and own["num_tokens"] == row.num_targets
    figures = choice_accuracy(lines(found), samples)
    places = [{**sample, "answer": 1, "answer_index": None} for sample in samples]
    assert choice_accuracy(lines(found), places) == figures
    for name, size in (("acc", lambda text: 1), ("acc_norm", len), ("acc_bytes", len)):
        right = 0
        for place, sample in enumerate(samples):
            scores = [
                choice["logprob"] / size(text)
                for choice, text in zip(
                    found[place]["choice_scores"], sample["choices"], strict=True
                )
            ]
            right += scores.index(max(scores)) == 1
        assert figures[name] == right / 4


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_rows_of_one_forward_leave_each_other_alone(family):
    """Cover learned positions and windows of attention."""
    tokenizer, model = TOKENIZERS["bytes"], tiny_model(family)
    samples = [{"id": "0", "choices": ["a", "of the dog and the cat, yes"]}]
    prompt = rendered("Which digit is this? What digit")
    options = {"images": [None], "prompts": [prompt], "samples": samples}
    ((_, found),) = loglikelihood(model, tokenizer, **options, batch_size=2)
    for choice, own in zip(samples[0]["choices"], found["choice_scores"], strict=True):
        row = continuation_row(prompt, f" {choice}", images=None, processor=tokenizer)
        assert own["logprob"] == pytest.approx(
            logprobs(tiny_model(family), row.input_ids, row.num_targets)[0], abs=1e-4
        )


@pytest.mark.parametrize(("count", "length", "stride"), [(1, 4, 4), (9, 4, 4), (10, 5, 2)])
def test_windows_are_those_of_lm_eval_and_score_each_token_once(count, length, stride):
    utils = pytest.importorskip("lm_eval.utils")
    tokens = list(range(100, 100 + count))
    theirs = [
        (*context, *targets)
        for context, targets in map(
            utils.make_disjoint_window,
            utils.get_rolling_token_windows(tokens, 0, length, length - stride + 1),
        )
    ]
    found = list(windows(count, max_length=length, stride=stride))
    ours = [tuple([0, *tokens][w.start : w.stop]) for w in found]
    assert ours == theirs
    scored = [token for w in found for token in [0, *tokens][w.start : w.stop][-w.step :]]
    assert scored == tokens
    assert all(w.stop - w.start <= length + 1 for w in found)


def test_perplexity_of_texts_longer_than_the_model_reads():
    stride = 5
    tokenizer, model = TOKENIZERS["bytes, bos"], tiny_model(max_position_embeddings=12)
    texts = ["The cat is left of the dog. " * 3, "yes", "Which number is written héré?"]
    prompts = [rendered(text) for text in texts]
    options = {"images": [None] * 3, "prompts": prompts, "batch_size": 2, "stride": stride}
    found = dict(perplexity(model, tokenizer, **options))
    reference = tiny_model(max_position_embeddings=12).double()
    for place, text in enumerate(texts):
        ids = [first_token(tokenizer), *tokenizer.encode(text, add_special_tokens=False)]
        total = 0.0
        for end in range(1, len(ids)):  # each token after all that its window has before it
            number = max(0, math.ceil((end - 12) / stride))
            last = 12 + number * stride
            start = max(0, min(last, len(ids) - 1) - 12)
            total += logprobs(reference, ids[start : end + 1], 1)[0]
        assert found[place]["logprob"] == pytest.approx(total, abs=2e-4)
        assert found[place]["num_tokens"] == len(ids) - 1
    figures = text_perplexity(lines(found), [{}] * 3)
    assert figures["lower_is_better"]
    total = sum(found[place]["logprob"] for place in range(3))
    num_bytes = sum(len(text.encode()) for text in texts)
    assert figures["byte_perplexity"] == pytest.approx(math.exp(-total / num_bytes))
    assert figures["bits_per_byte"] == pytest.approx(math.log2(figures["byte_perplexity"]))
    assert figures["word_perplexity"] == pytest.approx(math.exp(-total / (22 + 1 + 5)))


class FakeEngine:
    """An engine that answers score() like a decoding engine, with a model; in reversed order."""

    def __init__(self, model, max_length=64):
        self.model, self.max_length = model, max_length

    def score(self, items):
        for item in reversed(list(items)):
            ids = item.prompt["input_ids"][0]
            if len(ids) > 30:
                yield Failed(item.key, UserError("too long"))
                continue
            with torch.no_grad():
                table = torch.log_softmax(self.model(ids[None]).logits[0], -1)
            found = table[range(len(ids) - 1), ids[1:]][-item.num_targets :]
            yield Scored(item.key, tuple(found.tolist()), False)


def test_an_engine_gives_what_the_model_gives_and_failures_are_told():
    tokenizer, model = TOKENIZERS["bytes"], tiny_model()
    samples = [{"id": "0", "choices": ["a", "b c d"]}, {"id": "1", "choices": ["x" * 40, "y"]}]
    prompts = [rendered("What is this?"), rendered("Which digit?")]
    options = {"images": [None] * 2, "prompts": prompts, "samples": samples, "batch_size": 4}
    here = dict(loglikelihood(model, tokenizer, **options))
    there = dict(loglikelihood(FakeEngine(model), tokenizer, **options))
    for own, other in zip(here[0]["choice_scores"], there[0]["choice_scores"], strict=True):
        assert own["logprob"] == pytest.approx(other["logprob"], abs=1e-5)
    assert there[1] == {"error": "UserError: too long"}


class EncodingEngine:
    """An engine that answers as vLLM does, with prompts in its own form; the last one first."""

    def encode(self, rendered, images):
        return {"text": rendered.text, "images": images}

    def answer(self, requests):
        for request in reversed(list(requests)):
            if request.prompt["images"]:
                yield Failed(request.key, UserError("no pictures"))
                continue
            ids = tuple(TOKENIZERS["bytes"].encode(request.prompt["text"]))
            ids = ids[: request.sampling.max_new_tokens]
            yield Finished(request.key, "length", 3, len(ids), "as the engine has it", ids)


def test_an_engine_answers_as_generation_does():
    prompts = [rendered("What is this?"), rendered("Which digit?"), rendered("see")]
    found = generate(
        EncodingEngine(),
        TOKENIZERS["bytes"],
        images=[None, None, ["a.png"]],
        prompts=prompts,
        max_new_tokens=2,
    )
    found = list(found)
    assert found[0] == (2, {"error": "UserError: no pictures"})
    for place, answer in found[1:]:
        ids = TOKENIZERS["bytes"].encode(prompts[place].text)[:2]
        text = TOKENIZERS["bytes"].decode(ids)
        assert answer == {"text": text, "token_ids": ids, "finish_reason": "length"}


def test_what_cannot_be_scored_is_refused():
    tokenizer, model = TOKENIZERS["bytes"], tiny_model(max_position_embeddings=12)
    options = {"images": [None], "batch_size": 1}

    def ask(prompt="What is this?", processor=tokenizer, sample=None, **own):
        samples = [sample or {"id": "0", "choices": ["a", "b"]}]
        parts = {**options, "prompts": [rendered(prompt)], "samples": samples, **own}
        return list(loglikelihood(model, processor, **parts))

    with pytest.raises(DataError, match="the field choices is None"):
        ask(sample={"id": "0"})
    with pytest.raises(DataError, match="no token is left of the continuation ''"):
        ask(delimiter="", sample={"id": "0", "choices": ["", "b"]})
    with pytest.raises(DataError, match="tokens, the model reads 12"):
        ask("What is this? " * 9)
    ((_, cut),) = ask("What is this? " * 9, overlong="cut")
    assert cut["num_context_tokens"] == [11, 10]
    with pytest.raises(UserError, match="does not go with a remote model"):
        ask(processor=None)
    with pytest.raises(UserError, match="stride 13 does not fit windows of 12"):
        list(perplexity(model, tokenizer, **options, prompts=[rendered("a")], stride=13))
    with pytest.raises(UserError, match="no choice_scores.*Use --model loglikelihood"):
        choice_accuracy([{"prediction": "a"}], [{"choices": ["a", "b"], "answer": "a"}])
    with pytest.raises(DataError, match="the answer 'c'"):
        choice_accuracy(
            [{"choice_scores": []}], [{"id": "0", "choices": ["a", "b"], "answer": "c"}]
        )


def test_the_answer_alone_is_scored():
    tokenizer, model = TOKENIZERS["bytes"], tiny_model()
    sample = {"id": "0", "question": "q", "answer": "of the dog"}
    options = {"images": [None], "prompts": [rendered("The cat")], "samples": [sample]}
    ((_, found),) = loglikelihood(model, tokenizer, **options, batch_size=1, continuations="answer")
    figures = answer_likelihood(lines({0: found}), [sample])
    own = found["choice_scores"][0]
    assert figures["token_perplexity"] == pytest.approx(
        math.exp(-own["logprob"] / own["num_tokens"])
    )
    assert figures["score"] == own["is_greedy"]
