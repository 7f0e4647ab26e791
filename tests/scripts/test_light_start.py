"""Help, lists and what is wrong with a command line need no transformers and no datasets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (
    "train_pp.py --train-model llama --dataset jsonl --prompt vqa --prompt-fn chat "
    "--image-token auto --collate-fn sft"
)
EVALUATE = (
    "evaluate.py --model generate --builder auto --dataset sets --prompt vqa --prompt-fn chat "
    "--image-token auto --metric exact_match"
)
COMMANDS = [
    *("train_pp.py", "evaluate.py", "serve.py", "export.py", "corpus.py", "corpus.py write"),
    *("corpus.py find-trained", "-m stageline check", "-m stageline infer"),
    *("-m stageline chat", "-m stageline lm-eval"),
]


# Run each command in a fork of one process, up to where it would start its ranks. A fork leaves
# without the interpreter's own end, which frees all of torch: a second of each command.
START = """
import json, os, runpy, sys, tempfile, traceback
import torch  # allowed, and imported once for all forks, like the rest that is light
import torch.distributed.elastic.multiprocessing, torch.distributed.pipelining
import commands, parse_args
from register import import_shelf
from stageline.distributed import launch
import_shelf()
launch._launch = lambda *_, **__: sys.exit(40)
leave = os._exit

def tell_and_leave(code):
    heavy = {"transformers", "datasets", "huggingface_hub"} & set(sys.modules)
    print("HEAVY", sorted(heavy), flush=True)
    leave(code)

tell_nothing = {"transformers", "datasets", "huggingface_hub"} & set(sys.modules)
assert not tell_nothing, tell_nothing
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile("w+") as out:
        if os.fork():
            code = os.waitstatus_to_exitcode(os.wait()[1])
            out.seek(0)
            print(json.dumps([code, out.read()]))
            continue
        os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
        first, *rest = words.split()
        is_module = first == "-m"
        sys.argv = rest if is_module else [first, *rest]
        os._exit = tell_and_leave  # which an error of a user ends in
        code = 0
        try:
            (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        tell_and_leave(code)
"""


HELP = [f"{command} --help" for command in COMMANDS]
LISTS = [f"{one} --list" for one in ("train_pp.py", "corpus.py stats", "-m stageline chat")]
SLIPS = {
    f"{TRAIN} --loss-fn sftt": "'sftt'. Did you mean 'sft'?",
    f"{EVALUATE} --metric exact": "'exact'",
    "serve.py --model-path . --prompt-fn chatt": "'chatt'",
    "corpus.py write --language klingon": "'klingon'",
    "-m stageline check --train-model lama": "'lama'",
    "-m stageline infer --text a --builder autoo": "'autoo'",
    "-m stageline chat --builder autoo": "'autoo'",
    "-m stageline trian": "is not a command",
    f"{TRAIN} --total-steps many": "--total-steps many has a wrong value",
    "export.py --model-path . --output-path new --nonsense 3": "--nonsense",
    "corpus.py find-trained --nonsense 3": "--nonsense",
    "-m stageline lm-eval --nonsense 3": "--nonsense",
}
LAUNCHERS = [
    f"train_pp.py {TRAIN.partition(' ')[2]} --num-stages 2 --device cpu",
    f"{EVALUATE} --engine pipeline --num-stages 2 --model-path .",
    "-m stageline infer --engine pipeline --num-stages 2 --model-path . --text a",
    "serve.py --num-stages 2 --model-path .",
]


@pytest.fixture(scope="module")
def told():
    """Command -> its exit code, and the text in which it names what heavy modules it imported."""
    words = [*HELP, *LISTS, *SLIPS, *LAUNCHERS]
    done = subprocess.run(
        [sys.executable, "-c", START],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(words), done.stderr
    return dict(zip(words, map(json.loads, lines), strict=True))


def texts_of(told, commands, *, code):
    """Command -> what it writes; it must not have imported what takes seconds, or what fetches."""
    texts = {}
    for words in commands:
        found, text = told[words]
        texts[words], _, modules = text.partition("HEAVY ")
        assert found == code, (words, text)
        assert modules.partition("\n")[0] == "[]", (words, text)
    return texts


def test_help_imports_no_transformers(told):
    texts = texts_of(told, HELP, code=0)
    assert all("usage: " in text for text in texts.values())


def test_a_list_imports_no_transformers(told):
    texts = texts_of(told, LISTS, code=0)
    assert all("[train_model.py:" in text for text in texts.values())


def test_a_slip_imports_no_transformers(told):
    texts = texts_of(told, SLIPS, code=2)
    assert [words for words, wanted in SLIPS.items() if wanted not in texts[words]] == []


def test_what_starts_the_ranks_imports_no_transformers(told):
    """Its ranks do, each for itself: in their launcher it is three seconds that all wait."""
    texts_of(told, LAUNCHERS, code=40)
