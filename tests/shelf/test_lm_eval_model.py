"""lm_eval's tasks through our model against the same tasks through lm_eval's own `hf` model."""

import os
from pathlib import Path

import pytest

from stageline.errors import UserError
from tests.helpers.lm_eval_results import TASKS, assert_same_results
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.whole_engine import WholeEngine

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # lm_eval imports what reads them
    os.environ.setdefault(name, "1")
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from stageline.evaluation.lm_eval import StagelineLM  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["commands_choice", "commands_name", "descriptions"]


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=str(TASKS), include_defaults=False)


def make_model(vocab_size):
    return tiny_whole("llama", vocab_size=vocab_size, noise=0.3)


def evaluate(model, manager, monkeypatch, **options):
    monkeypatch.chdir(ROOT)  # the data files of the tasks are relative to it
    return lm_eval.simple_evaluate(
        model, tasks=NAMES, task_manager=manager, bootstrap_iters=0, **options
    )


def reference(model, tokenizer, **options):
    return HFLM(model, tokenizer=tokenizer, device="cpu", dtype="float32", **options)


@pytest.mark.parametrize(("num_fewshot", "adds_bos"), [(0, True), (2, False)])
def test_same_figures_and_answers_as_hf(manager, monkeypatch, num_fewshot, adds_bos):
    texts = (TASKS / "commands.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = tiny_tokenizer(texts, adds_bos=adds_bos)
    model = make_model(len(tokenizer))
    options = {"num_fewshot": num_fewshot}
    if num_fewshot:  # longer than the model: both cut from the left
        options["apply_chat_template"] = True
    ours = evaluate(StagelineLM(WholeEngine(model, tokenizer)), manager, monkeypatch, **options)
    theirs = evaluate(reference(model, tokenizer), manager, monkeypatch, **options)
    assert ours["results"].keys() == set(NAMES)
    assert_same_results(ours, theirs, NAMES, pair={"abs": 1e-4}, whole={"abs": 1e-4})


@pytest.fixture(scope="module")
def plain():
    tokenizer = tiny_tokenizer((TASKS / "commands.jsonl").read_text(encoding="utf-8").splitlines())
    return make_model(len(tokenizer)), tokenizer


def instances(kind, *arguments):
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


PAIRS = (
    ("", " cat"),
    ("", "<s>cat"),
    ("ls ", "or sort"),
    ("<s>What", " is this?"),
    ("x" * 90, "y"),
)


@pytest.mark.parametrize(
    "options",
    [{}, {"add_bos_token": True}, {"max_length": 16}],
    ids=lambda options: "-".join(options) or "none",
)
def test_same_log_likelihoods_at_the_borders(plain, options, tmp_path):
    for part in plain:
        part.save_pretrained(tmp_path)
    ours = StagelineLM(WholeEngine(*plain), **options)
    theirs = HFLM(str(tmp_path), device="cpu", dtype="float32", **options)
    assert ours.tok_encode("What is") == theirs.tok_encode("What is")
    pairs = instances("loglikelihood", *PAIRS)
    assert ours._encode_pair("ls ", "or") == theirs._encode_pair("ls ", "or")
    for mine, answer in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert mine == (pytest.approx(answer[0], abs=1e-4), answer[1])
    texts = instances("loglikelihood_rolling", ("short",), ("long " * 70,))
    expected = theirs.loglikelihood_rolling(texts)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-6, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"until": ["<|im_end|>", "e"], "max_gen_toks": 20},
        {"until": "a", "max_tokens": 9},
        {"until": [], "max_gen_toks": 3, "repetition_penalty": 1.3},
        {"until": [], "max_gen_toks": 9, "max_length": 40},
    ],
    ids=lambda options: "-".join(options),
)
def test_same_answers_whatever_the_options(plain, options):
    prompts = ("Which command sorts", "<s>cat", "long " * 90)[: 2 if "max_length" in options else 3]
    asked = instances("generate_until", *((prompt, options) for prompt in prompts))
    engine = WholeEngine(*plain)
    assert StagelineLM(engine).generate_until(asked) == reference(*plain).generate_until(asked)
    im_end = plain[1].convert_tokens_to_ids("<|im_end|>")
    stops = engine.requests[0].sampling.stop_token_ids
    assert (im_end in stops) == ("<|im_end|>" in options["until"])


def test_a_prompt_that_begins_with_the_first_token_gets_no_second():
    tokenizer = tiny_tokenizer(adds_bos=True)
    engine = WholeEngine(make_model(len(tokenizer)), tokenizer)
    options = {"until": [], "max_gen_toks": 2}
    asked = [("<s>cat", options), ("cat", options)]
    StagelineLM(engine).generate_until(instances("generate_until", *asked))
    rows = {one.key: one.prompt["input_ids"][0].tolist() for one in engine.requests}
    assert rows["0"] == rows["1"]
    assert rows["0"].count(tokenizer.bos_token_id) == 1


def test_a_sampled_answer_has_a_seed_of_its_own(plain):
    options = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "until": [], "max_gen_toks": 8}
    engine = WholeEngine(*plain)
    texts = StagelineLM(engine, seed=5).generate_until(
        instances("generate_until", ("ls", options), ("ls", options))
    )
    sampling = {request.key: request.sampling for request in engine.requests}
    assert (sampling["0"].temperature, sampling["0"].top_p) == (1.5, 0.9)
    assert [sampling[key].seed for key in "01"] == [5, 6]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4. Override it with 1"),
        ({"typical_p": 0.5}, "typical_p=0.5.*the engine knows until"),
        ({"max_gen_toks": 64}, "max_gen_toks is 64 and the model has 64 positions"),
    ],
)
def test_options_that_can_not_be_kept_are_refused(plain, options, message):
    lm = StagelineLM(WholeEngine(*plain))
    with pytest.raises(UserError, match=message):
        lm.generate_until(instances("generate_until", ("ls", {"until": [], **options})))
