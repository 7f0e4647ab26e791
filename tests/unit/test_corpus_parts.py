"""The document and splitter parts, and the options of corpus.py."""

import functools
import pickle
import shlex
from pathlib import Path

import pytest

from commands import command_line
from options.command_line import command_words
from options.fields import OptionError
from parse_args import parse_corpus_args
from register import document_register, import_shelf, splitter_register
from stageline.corpus.input import BadDocument
from stageline.distributed import failure
from stageline.errors import UserError

import_shelf("corpus_parts")
TEXT = document_register["text"]
COLUMNS_OF = document_register.entry("text").facts.columns_of
ROW = {"title": "A", "body": "b [BODY]", "n": 7, "meta": {"by": "me"}, "list": [], "none": None}


@pytest.mark.parametrize(
    ("row", "options", "wanted"),
    [
        ("a line", {}, "a line"),
        ({"text": "t\n", "x": 1}, {}, "t\n"),
        (ROW, {"fields": ["title", "body"]}, "A\nb [BODY]"),
        (' {"text": "t"}', {"template": "<[TEXT]>"}, "<t>"),
        ('{"text": "t"}', {}, '{"text": "t"}'),
        (ROW, {"fields": ["n", "meta.by"], "separator": "\\t"}, "7\tme"),
        # text that comes from the row is not substituted again; double brackets are text
        (ROW, {"template": "[TITLE]: [BODY]\\n[[BODY]]"}, "A: b [BODY]\n[BODY]"),
    ],
)
def test_a_row_becomes_a_document(row, options, wanted):
    document = functools.partial(TEXT, **options)
    assert document(row) == wanted
    assert pickle.loads(pickle.dumps(document))(row) == wanted  # it goes to workers


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ["text"]),
        ({"fields": ["meta.by", "meta.at", "a"]}, ["a", "meta"]),
        ({"template": "[B] [A] [B]"}, ["a", "b"]),
    ],
)
def test_the_columns_that_are_needed_of_a_table(options, wanted):
    assert COLUMNS_OF(**options) == wanted


@pytest.mark.parametrize(
    ("options", "kind", "wanted"),
    [
        ({}, "missing field", "no field 'text'; the row has the fields title, body"),
        ({"fields": ["none"]}, "missing field", "no field 'none'"),
        ({"fields": ["meta.at"]}, "missing field", "no field 'meta.at'"),
        ({"fields": ["list"]}, "not text", "the field 'list' is a list"),
        ({"template": "[META]"}, "not text", "the field 'meta' is a dict"),
    ],
)
def test_a_row_without_the_text_says_why(options, kind, wanted):
    with pytest.raises(BadDocument) as error:
        TEXT(ROW, **options)
    assert error.value.args[0] == kind and wanted in error.value.args[1]


def test_options_that_go_wrong_in_every_row_are_refused_before_any():
    with pytest.raises(UserError, match="Leave one out"):
        COLUMNS_OF(fields=["a"], template="[A]")
    with pytest.raises(UserError, match="'nothing' names no field"):
        COLUMNS_OF(template="nothing")


def test_the_splitters_keep_their_contract():
    text = 'He said so. "Yes!" 他说。好。\nlast'
    for key in sorted(set(splitter_register) - {"icu"}):
        ends = splitter_register[key](text).tolist()
        assert ends == sorted(set(ends)) and ends[-1] == len(text), key
        assert splitter_register[key]("").tolist() == []
    assert splitter_register["none"](text).tolist() == [len(text)]
    assert text[:11] == "He said so." and 11 in splitter_register["english"](text)


WRITE = "write --file-path README.md --save-prefix a --tokenizer-path docs"


def parsed(words):
    return parse_corpus_args(shlex.split(words))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("wirte", ["'wirte' is not an action", "Did you mean write"]),
        ("write", ["--file-path and --save-prefix and --tokenizer-path are missing"]),
        (WRITE + " --seq-length 2", ["--seq-length 2 is out of range"]),
        (WRITE + " --pieces even", ["--pieces even: there is no such option", "greedily"]),
        (WRITE.replace("README.md", "no.txt"), ["--file-path no.txt: there is no such file"]),
        (
            "merge --merge-path-type \"__import__('os')\"",
            ["wrong value", "list of whole"],
        ),
    ],
)
def test_a_wrong_line_is_one_message_with_its_cure(words, wanted):
    with pytest.raises(OptionError) as error:
        parsed(words)
    assert not [text for text in wanted if text not in str(error.value)], error.value


def test_the_action_stands_first_behind_the_command(monkeypatch):
    ran = []
    monkeypatch.setattr(failure, "run_entry", lambda main: ran.append(command_words()))
    words = "stageline corpus find-trained a.yaml seed=1"
    monkeypatch.setattr(command_line.sys, "argv", words.split())
    command_line.main()
    assert ran == [["find-trained", "--config", "a.yaml", "--seed=1"]]
    assert Path(command_line.sys.argv[0]).name == "corpus.py"
