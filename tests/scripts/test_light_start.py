"""What needs no torch does not import it: help, lists, and what is wrong with a command line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTION = re.compile(r"^  (--[a-z0-9._-]+) ", re.MULTILINE)
HEAVY = re.compile(r"\| +(torch|transformers|huggingface_hub)$", re.MULTILINE)
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
DATASETS = "digits jsonl groups sets corpus"
COLLATE_FNS = ("sft", "contrastive", "dpo", "kto", "pt", "rm")


def start(words: str, *, code: int) -> str:
    """What a command writes; it must not have imported torch, transformers or what fetches."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    text = done.stdout + "\n".join(told)
    assert done.returncode == code, text
    assert HEAVY.findall(done.stderr) == [], words
    return text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_no_torch(command):
    assert "usage: " in start(f"{command} --help", code=0)


@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "export.py"])
def test_a_list_imports_no_torch(command):
    if command == "corpus.py":
        command = "corpus.py stats"
    assert "[pp_models.py:" in start(f"{command} --list", code=0)


NEEDED = {  # by the command, before it looks at other options
    "train_pp.py": TRAIN,
    "evaluate.py": EVALUATE,
    "export.py": "export.py --model-path . --output-path new",
    "-m stageline check": "-m stageline check --train-model llama",
}


@pytest.mark.parametrize("command", [NEEDED.get(one, one) for one in COMMANDS])
def test_an_unknown_option_imports_no_torch(command):
    assert "--nonsense" in start(f"{command} --nonsense 3", code=2)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (f"{TRAIN} --loss-fn sftt", "no key 'sftt'. Did you mean 'sft'?"),
        (f"{EVALUATE} --metric exact", "no key 'exact'"),
        ("serve.py --model-path . --prompt-fn chatt", "no key 'chatt'"),
        ("corpus.py write --language klingon", "no key 'klingon'"),
        ("-m stageline check --train-model lama", "no key 'lama'"),
        ("-m stageline infer --text a --builder autoo", "no key 'autoo'"),
        ("-m stageline chat --builder autoo", "no key 'autoo'"),
        ("-m stageline trian", "no command of stageline"),
        (f"{TRAIN} --total-steps many", "--total-steps many has a wrong value"),
    ],
)
def test_a_slip_imports_no_torch(words, wanted):
    assert wanted in start(words, code=2)


def test_options_of_every_dataset_and_collate_part_are_read_without_torch():
    for key in DATASETS.split():
        assert f"--dataset {key}" in start(f"{TRAIN} --dataset {key} --help", code=0)
    for key in COLLATE_FNS:
        shown = start(f"{TRAIN} --collate-fn {key} --help", code=0)
        assert "--collate-fn.overlong" in shown


@pytest.mark.parametrize("command", ["train_pp.py", "evaluate.py"])
def test_help_shows_a_dozen_options_and_all_the_others_by_group(command):
    short, whole = (start(f"{command} {words}", code=0) for words in ("--help", "--help all"))
    few, many = (
        set(re.findall(r"^  (--[a-z0-9._-]+) ", text, re.MULTILINE)) for text in (short, whole)
    )
    assert "--model-path" in few and "--visual-gpu-ratio" in many - few
    section = short.partition("Options that most runs need:")[2].partition("\n\n")[0]
    assert 10 <= len(OPTION.findall(section)) <= 14
    left = int(re.search(r"--help all +(\d+) more options", short)[1])
    assert left == len(many - few)
    assert "more options" not in whole and "\nFiles and machine:\n" in whole


@pytest.mark.parametrize("words", ["--help", "--help all", "--list"])
def test_a_reader_that_leaves_early_is_no_failure(words):
    """As `train_pp.py --help | head -1`: nobody reads any more when the text is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "train_pp.py", *words.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


LAUNCHERS = [
    f"train_pp.py {TRAIN.partition(' ')[2]} --num-stages 2 --device cpu",
    f"{EVALUATE} --engine pipeline --num-stages 2 --model-path .",
    "-m stageline infer --engine pipeline --num-stages 2 --model-path . --text a",
    "-m stageline check --train-model llama --num-stages 2",
    "serve.py --num-stages 2 --model-path .",
]
# runs each command in a fork, up to where it would start its ranks
START = """
import os, runpy, sys
from stageline.distributed import launch
launch._launch = lambda *_, **__: os._exit(40 + ("transformers" in sys.modules))
for words in sys.stdin.read().splitlines():
    if not os.fork():
        first, *rest = words.split()
        is_module = first == "-m"
        sys.argv = rest if is_module else [first, *rest]
        (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_what_starts_the_ranks_imports_no_transformers():
    """Its ranks do, each for itself: in their launcher it is three seconds that all wait."""
    done = subprocess.run(
        [sys.executable, "-c", START],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="\n".join(LAUNCHERS),
        capture_output=True,
        text=True,
        timeout=120,
    )
    codes = dict(zip(LAUNCHERS, done.stdout.split(), strict=True))
    assert set(codes.values()) == {"40"}, (codes, done.stderr)


def test_a_training_rank_draws_nothing_at_its_start():
    """matplotlib takes a rank half a second; one of them needs it, when it draws."""
    words = "import sys, commands.train_engines; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], cwd=ROOT, timeout=120).returncode == 0
