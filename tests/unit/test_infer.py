"""infer.py: prompts of files and of the command line are answered as plain transformers does."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from options.command_line import by_name, read_config, read_words
from options.fields import OptionError
from parse_args import parse_infer_args
from register import import_shelf
from stageline.data.rows.json_lines import PromptRows
from stageline.errors import DataError
from tests.helpers.faulty_files import rewrite
from tests.helpers.small_run import ForkedRun, Job

import_shelf()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"), num_rows=1).model


def infer(model, folder, *options):
    words = (
        "-m",
        "stageline",
        "infer",
        "--model-path",
        model,
        "--device",
        "cpu",
        "--output-dir",
        folder,
    )
    return ForkedRun([str(word) for word in (*words, "--max-new-tokens", "6", *options)], ranks=1)


def records(folder):
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    return {record["sample"]["question"]: record for record in map(json.loads, lines)}


def expected(model, messages):
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    whole = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        made = whole.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_texts_are_answered_as_by_transformers_and_asked_once(model, tmp_path):
    model = shutil.copytree(model, tmp_path / "model")
    texts = ["Which digit, if any?", 'say "yes", or no']
    options = [word for text in texts for word in ("--text", text)]
    done = infer(model, tmp_path, *options).wait(200)
    assert done.code == 0, done.err
    found = records(tmp_path)
    for text in texts:
        wanted = expected(model, [{"role": "user", "content": text}])
        assert found[text]["prediction"] == wanted
        assert f"> {text}\n{wanted}\n" in done.out
    done = infer(model, tmp_path, *options, "--text", "Question:", "--print-answers", 2).wait(200)
    assert done.code == 0, done.err
    assert set(records(tmp_path)) == {*texts, "Question:"}
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == 3
    assert "> " not in done.out and "3 answers are in" in done.out
    # other weights under the same name: their own answers, not the old ones
    rewrite(model / "model.safetensors", lambda state: [one.neg_() for one in state.values()])
    done = infer(model, tmp_path, *options).wait(200)
    assert done.code == 0, done.err
    wanted = expected(model, [{"role": "user", "content": texts[0]}])
    assert records(tmp_path)[texts[0]]["prediction"] == wanted != found[texts[0]]["prediction"]


def test_rows_without_answers_are_answered_by_template_or_messages(model, tmp_path):
    messages = [
        {"role": "user", "content": "yes?"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "not?"},
    ]
    rows = [{"prompt": "Which?"}, {"id": "m", "messages": messages}]
    rows += [{"instruction": "Add.", "input": "1 2"}]
    file = tmp_path / "ask.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = infer(model, tmp_path, "--prompts", file).wait(200)
    assert done.code == 0, done.err
    found = records(tmp_path)
    assert found["not?"]["prediction"] == expected(model, messages)
    assert found["not?"]["id"] == "m"
    assert found["Add.\n1 2"]["prompt"].count("Add.\n1 2<|im_end|>") == 1
    assert found["Which?"]["prediction"] == expected(model, [{"role": "user", "content": "Which?"}])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), "0 of --prompts, --text and --dataset were given"),
        (("--text", "a", "--dataset", "digits"), "2 of --prompts, --text and --dataset were given"),
        (("--text", "a", "b"), "--text a b has 2 words. Put it in quotes"),
    ],
)
def test_one_source_of_prompts_is_wanted(model, options, wanted):
    with pytest.raises(OptionError, match=wanted):
        parse_infer_args(["--model-path", str(model), *options])


def test_prompts_of_a_text_file_are_its_lines(tmp_path):
    file = tmp_path / "ask.txt"
    file.write_text("\ufeffone, two\n\n  three\u2028four\r\n")
    samples = [PromptRows(path=file)[row][1] for row in range(2)]
    assert [sample["question"] for sample in samples] == ["one, two", "three\u2028four"]
    first = [sample["id"] for sample in samples]
    file.write_text("one, two\n\nfour\n")
    again = [PromptRows(path=file)[row][1]["id"] for row in range(2)]
    assert again[0] == first[0] and again[1] != first[1], "another prompt is another sample"
    file.write_text("\n \n")
    with pytest.raises(DataError, match="ask.txt has no rows"):
        PromptRows(path=file)
    file.write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match="ask.txt:1: not UTF-8: .* at byte 3 of"):
        PromptRows(path=file)


def test_a_row_that_asks_nothing_is_named(tmp_path):
    file = tmp_path / "ask.jsonl"
    file.write_text('{"question": "a"}\n{"answer": "b"}\n')
    with pytest.raises(
        DataError, match=r"ask.jsonl:2: the row asks nothing.*has the fields answer"
    ):
        PromptRows(path=file)
    file.write_text('{"question": "a", "image": 3}\n')
    with pytest.raises(DataError, match=r"ask.jsonl:1: the image is \[?3"):
        PromptRows(path=file)


def test_texts_are_not_parted_at_commas_and_the_command_line_replaces_a_file(tmp_path):
    given = by_name(read_words(["--text", "a, b", "--text=[c]", "--x", "1"]), ["text", "none"])
    assert list(given) == ["text", "x"]
    assert json.loads(given["text"].values[0]) == ["a, b", "[c]"]
    file = tmp_path / "run.yaml"

    def texts(content, *words):
        file.write_text(content)
        given = by_name([*read_config(file), *read_words(words)], ["text"])
        return json.loads(given["text"].values[0])

    assert texts("text: [a, 'b, c', 1]\n") == ["a", "b, c", "1"]
    assert texts("text: '[a] b, c'\n") == ["[a] b, c"]
    assert texts("text: null\n") is None, "as a saved config has it"
    assert texts("text: [a, b]\n", "--text", "c") == ["c"]
