"""Answers that keep to a grammar, through the engine: against trying each token by its text."""

import math
import re
import string
import sys

import pytest
import torch

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.checkpoint.load import quiet
from stageline.errors import UserError
from stageline.inference.decoding.grammars import (
    JSON_OBJECT,
    LONGEST,
    Grammar,
    Matchers,
    json_grammar,
)
from stageline.inference.decoding.request import EngineError, Failed, Finished, Request, Sampling
from tests.helpers.decoded_models import text_prompts
from tests.helpers.decoding_engines import built_stages, local_engine
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import TEXTS, tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

pytest.importorskip("llguidance")
by_regex = pytest.importorskip("regex")

LETTERS = '{"answer": "yes", "no": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]} {" ": " "} ' + string.printable
TOKENIZERS = {
    "byte": tiny_tokenizer,
    "metaspace": lambda: tiny_metaspace_tokenizer([*TEXTS, *[LETTERS] * 20]),
}
SINGLE_BYTES = tiny_tokenizer(vocab_size=261)
NUM_COLUMNS = 420  # the logits have more columns than any of the tokenizers has tokens
END, OTHER_END = "</s>", "<|im_end|>"
DIGITS = "[0-9]{2,4}(-[a-f ]{1,3})?"
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"enum": ["yes", "no"]},
        "sure": {"type": "boolean"},
        "n": {"type": "array", "items": {"enum": [1, 2, 33]}, "maxItems": 3},
    },
    "required": ["answer", "n"],
    "additionalProperties": False,
}
S = r"[ \t\n]{0,40}"
N = r"(1|2|33)"
# the language that the schema allows, written by hand
AS_REGEX = (
    rf'\{{{S}"answer"{S}:{S}"(yes|no)"{S}(,{S}"sure"{S}:{S}(true|false){S})?'
    rf',{S}"n"{S}:{S}\[{S}({N}{S}(,{S}{N}{S}){{0,2}})?\]{S}\}}'
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return the whole model, its folder, and stages by their number."""
    folder = tmp_path_factory.mktemp("llama")
    with quiet():
        sizes = {"vocab_size": NUM_COLUMNS, "max_position_embeddings": 512}
        whole = tiny_whole("llama", folder, noise=0.4, **sizes)
    build = train_model_register["causal_lm"]
    return whole, {count: built_stages(build, folder, count, is_piece=True) for count in (1, 2)}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]() if request.param else SINGLE_BYTES


@pytest.fixture
def engine(parts, tokenizer):
    return local_engine(parts[1][1], tokenizer, max_rows=4)


def ids_of(tokenizer, *names):
    return tuple(tokenizer.convert_tokens_to_ids(name) for name in names)


def requests_of(tokenizer, count=3, **sampling):
    prompts = text_prompts((5, 1, 12, 7)[:count], vocab_size=len(tokenizer))
    options = {"max_new_tokens": 400, "stop_token_ids": ids_of(tokenizer, END), **sampling}
    return [
        Request(str(place), prompt, Sampling(seed=place, **options))
        for place, prompt in enumerate(prompts)
    ]


def answers(engine, requests):
    found = {answer.key: answer for answer in engine.answer(requests)}
    return [found[request.key] for request in requests]


@torch.inference_mode()
def by_trying(whole, tokenizer, prompt, pattern, stop_ids):
    """Append the likeliest token that still fits the pattern, again and again.

    Returns:
        The text, and the stop token that came where more text might have.
    """
    texts = texts_of(tokenizer)

    def fits(text):
        return by_regex.fullmatch(pattern, text, partial=True) is not None

    ids, text = prompt["input_ids"], ""
    while True:
        order = whole(ids).logits[0, -1].argsort(descending=True).tolist()
        is_whole = by_regex.fullmatch(pattern, text) is not None
        for token_id in order:
            if token_id in stop_ids and is_whole:
                return text, token_id if any(fits(text + n) for n in texts.values()) else None
            new = texts.get(token_id)
            if new and fits(text + new):
                break
        else:
            assert is_whole
            return text, None
        text += new
        ids = torch.cat([ids, torch.tensor([[token_id]])], dim=1)


def texts_of(tokenizer):
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    if "▁" in tokenizer.get_vocab():
        return {
            token_id: token.replace("▁", " ")
            for token, token_id in tokenizer.get_vocab().items()
            if token_id not in special
        }
    return {i: tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in special}


# forced text comes in the tokens that the tokenizer writes it with, so names of fields are tried
# with tokens that leave one choice
@pytest.mark.parametrize(
    ("tokenizer", "grammar", "pattern"),
    [
        *((kind, Grammar("regex", DIGITS), DIGITS) for kind in TOKENIZERS),
        (None, json_grammar(SCHEMA), AS_REGEX),
    ],
    ids=["byte-regex", "metaspace-regex", "json"],
    indirect=["tokenizer"],
)
def test_greedy_answers_are_those_of_trying_each_token(parts, tokenizer, grammar, pattern):
    whole, stages = parts
    stop_ids = ids_of(tokenizer, END, OTHER_END)
    requests = requests_of(tokenizer, 2, grammar=grammar, stop_token_ids=stop_ids, logprobs=0)
    found = answers(local_engine(stages[1], tokenizer, max_rows=4), requests)
    for request, answer in zip(requests, found, strict=True):
        wanted, ended_by = by_trying(whole, tokenizer, request.prompt, pattern, stop_ids)
        assert (answer.text, answer.reason) == (wanted, "stop")
        assert answer.stopped_by == ended_by  # None: nothing could follow
        # log-probabilities are those of the model, as without a grammar
        ids = torch.cat([request.prompt["input_ids"], torch.tensor([answer.token_ids])], dim=1)
        with torch.inference_mode():
            logprobs = whole(ids).logits[0, -len(answer.token_ids) - 1 : -1].log_softmax(-1)
        for one, row in zip(answer.logprobs, logprobs, strict=True):
            assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-4)
    split = answers(local_engine(stages[2], tokenizer, max_rows=2), requests)
    assert [one.token_ids for one in split] == [one.token_ids for one in found]


def test_sampled_answers_keep_to_it_and_others_stay_as_they_are(engine, tokenizer):
    free = requests_of(tokenizer, 2, temperature=2.0, max_new_tokens=12)
    alone = answers(engine, free)
    assert not engine.matchers._vocabulary.cache_info().currsize  # it is built at the first use
    special = set(tokenizer.all_special_ids) - set(ids_of(tokenizer, END))
    drawn = {"temperature": 3.0, "top_k": 30, "top_p": 0.99, "repetition_penalty": 1.1}
    drawn["logit_bias"] = tuple((token_id, 100.0) for token_id in special)
    for grammar, check in [
        (Grammar("regex", DIGITS), lambda text: re.fullmatch(DIGITS, text)),
        (json_grammar(SCHEMA), lambda text: re.fullmatch(AS_REGEX, text)),
        (Grammar("lark", 'start: "a" ("-" start)?'), lambda t: re.fullmatch("a(-a)*", t)),
    ]:
        bound = [
            Request(f"bound {one.key}", one.prompt, one.sampling)
            for one in requests_of(tokenizer, 4, grammar=grammar, **drawn)
        ]
        found = answers(engine, [*bound, *free])
        assert all(one.reason == "stop" and check(one.text) for one in found[:4])
        assert len({one.text for one in found[:4]}) > 1
        assert not special & {token_id for one in found[:4] for token_id in one.token_ids}
        assert [one.token_ids for one in found[4:]] == [one.token_ids for one in alone]


def test_stop_tokens_come_just_where_the_grammar_may_end(engine, tokenizer):
    end, other = ids_of(tokenizer, END, OTHER_END)
    letters = Grammar("regex", "[a-c]{3,}")
    bias = ((other, 100.0), (end, -100.0))
    hurried = {"grammar": letters, "logit_bias": bias, "max_new_tokens": 60}
    for stop_ids, length in [((end, other), 3), ((end,), 60), ((), 60)]:
        [answer] = answers(engine, requests_of(tokenizer, 1, stop_token_ids=stop_ids, **hurried))
        is_short = other in stop_ids
        assert answer.reason == ("stop" if is_short else "length")
        assert answer.stopped_by == (other if is_short else None)
        assert re.fullmatch("[a-c]+", answer.text) and len(answer.text) >= length
        if is_short:  # the text has at most as many letters as the token that completed it brought
            assert len(answer.text) < 3 + max(map(len, tokenizer.get_vocab()))


BAD = {
    "objekt": json_grammar({"type": "objekt"}),
    r'\["not"\]': json_grammar({"type": "object", "not": {"minProperties": 1}}),
    "look-around": Grammar("regex", "(?=a)b"),
    'unknown name: "foo"': Grammar("lark", "start: foo"),
}


@pytest.mark.parametrize("tokenizer", ["byte"], indirect=True)
def test_bad_grammars_are_refused_at_once(engine, tokenizer):
    for text, grammar in BAD.items():
        [request] = requests_of(tokenizer, 1, grammar=grammar)
        with pytest.raises(UserError, match=text):
            engine.submit(request, lambda event: None)
    [failed, good] = answers(engine, [request, *requests_of(tokenizer, 2, max_new_tokens=3)[1:]])
    assert isinstance(failed, Failed) and isinstance(good, Finished)


def test_what_is_no_grammar_is_refused():
    json_grammar({"type": "object", "not": {}}, is_strict=False)
    for text in ("", "a" * (LONGEST + 1)):
        with pytest.raises(UserError, match="letters"):
            Grammar("regex", text)
    with pytest.raises(UserError, match="not JSON"):
        json_grammar({"const": math.nan})


@pytest.mark.parametrize("tokenizer", ["byte"], indirect=True)
def test_loose_schemas_leave_out_what_cant_be_kept_to(engine, tokenizer):
    loose = json_grammar({**SCHEMA, "not": {"minProperties": 1}}, is_strict=False)
    for answer in answers(engine, requests_of(tokenizer, 1, grammar=loose)):
        assert re.fullmatch(AS_REGEX, answer.text)


def test_a_row_that_fails_ends_its_own_request_only(engine, tokenizer, monkeypatch):
    free = requests_of(tokenizer, 2, max_new_tokens=6)
    alone = [one.token_ids for one in answers(engine, free)]
    bound = requests_of(tokenizer, 3, grammar=Grammar("regex", "[0-9]{3}"), max_new_tokens=6)[2]
    nowhere = requests_of(tokenizer, 4, grammar=Grammar("regex", "\ue000[a-z]"))[3]

    def check(broken, kind, text):
        found = answers(engine, [*free, broken, bound])
        assert [one.token_ids for one in found[:2]] == alone
        assert isinstance(found[2].error, kind) and re.search(text, str(found[2].error))
        assert re.fullmatch("[0-9]{3}", found[3].text)
        assert not engine.chain.decoders[-1].sampled and engine.is_healthy

    if "▁" in tokenizer.get_vocab():  # it can't write that letter
        check(nowhere, UserError, "the grammar can't be followed any more")
    make = Matchers.make  # by a last stage that can't make it

    def fail(self, grammar, **options):
        if grammar == JSON_OBJECT:
            raise RuntimeError("no room")
        return make(self, grammar, **options)

    monkeypatch.setattr(Matchers, "make", fail)
    check(requests_of(tokenizer, 4, grammar=JSON_OBJECT)[3], EngineError, "no room")


@pytest.mark.parametrize("tokenizer", ["byte"], indirect=True)
def test_without_the_library_the_request_is_told_what_to_install(tokenizer, parts, monkeypatch):
    engine = local_engine(parts[1][1], tokenizer)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    [request] = requests_of(tokenizer, 1, grammar=JSON_OBJECT, max_new_tokens=3)
    with pytest.raises(UserError, match="setup.sh serve, or pip install llguidance"):
        engine.submit(request, lambda event: None)
    [free] = answers(engine, requests_of(tokenizer, 1, max_new_tokens=3))
    assert isinstance(free, Finished)


def test_tokenizers_that_have_no_bytes_are_refused():
    with pytest.raises(UserError, match="is a object"):
        Matchers(object).check(JSON_OBJECT)
