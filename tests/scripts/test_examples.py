"""Every file of examples/: its options exist, and it runs for two steps with a tiny model.

The first comment line says which command a file is for. A tiny model takes the place of the one
that a file wants prepared; a checkpoint of another example is made by running that one.
"""

import json
import math
import re
import runpy
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM

from commands import train as train_pp  # noqa: F401 - its engines
from commands.command_line import COMMANDS, rewritten
from options.command_line import read_options
from parse_args import parse_evaluate_args, parse_infer_args, parse_train_args
from register import import_shelf
from stageline.data.images.images import ImageExpander
from tests.helpers.small_run import ForkedRun
from tests.helpers.tiny_corpora import documents, tiny_corpus
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

import_shelf()
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PARSERS = {
    "train": parse_train_args,
    "eval": parse_evaluate_args,
    "infer": parse_infer_args,
}
# tiny tokenizers write more tokens
TRAIN = "--total-steps 2 --warmup-steps 0 --eval-samples 2 --max-token-num 2000 --timeline-step 0"
SMALLER = {
    "train": f"{TRAIN} --batch-size 4 --micro-batch-size 2 --partition uniform".split(),
    "eval": "--limit 2 --bootstrap.resamples 20".split(),
    "infer": "--limit 2 --max-new-tokens 3".split(),
}
_done: dict[str, Path] = {}  # example -> the folder of its run


def command_of(path):
    """Return the command that the first line names."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    match = re.fullmatch(rf"# stageline (\w+) examples/{re.escape(path.name)}", first)
    assert match and match[1] in PARSERS, f"the first line of {path.name} is {first!r}"
    return match[1]


def options_of(path):
    return read_options(path.read_text(encoding="utf-8"))[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Path as examples name it -> a tiny model there."""
    folder = tmp_path_factory.mktemp("models")
    make_digits = runpy.run_path(str(ROOT / "scripts/make_digits_model.py"))["main"]
    make_digits(str(folder / "digits-model"))
    tokenizer = tiny_tokenizer(eos_token="<|im_end|>")
    tokenizer.save_pretrained(folder / "smollm2")
    torch.manual_seed(1)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    config = tiny_config("llama", tied=True, **size)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "smollm2")
    lengths = [(40, 30), (50,), (20, 20)] * 12
    corpus = tiny_corpus(folder / "corpus", [documents(lengths)] * 2, seq_length=64)
    return {
        ".cache/digits-model": folder / "digits-model",
        ".cache/smollm2": folder / "smollm2",
        "Qwen/Qwen2.5-7B-Instruct": folder / "smollm2",
        "Qwen/Qwen2.5-32B-Instruct": folder / "smollm2",
        ".cache/corpus-model": folder / "smollm2",
        ".cache/corpus/guides": corpus,
    }


def path_here(value, models, folder):
    """Return the path to read instead of one that an example names."""
    if value in models:
        return models[value]
    for other in EXAMPLES:
        output = options_of(other).get("output-dir")
        if output and value.startswith(f"{output}/"):
            return run(other, models, folder) / value.removeprefix(f"{output}/")
    assert list(ROOT.glob(value)), f"{value} is not shipped, and no other example makes it"
    return value


def words_of(path, models, folder):
    """Return the words after `stageline COMMAND`, with smaller values."""
    words = [
        str(path.relative_to(ROOT)),
        "--device",
        "cpu",
        "--output-dir",
        str(folder / path.stem),
    ]
    for name, value in options_of(path).items():
        if name.endswith("-path"):
            words += [f"--{name}", str(path_here(value, models, folder))]
    smaller = list(SMALLER[command_of(path)])
    if int(options_of(path).get("num-stages", 1)) > 2:  # a micro-batch for each stage at least
        smaller += ["--batch-size", "8"]
    if "rollouts" in options_of(path):  # whole groups in a batch
        smaller += ["--rollouts.group_size", "2"]
    return rewritten([*words, *smaller])


def run(path, models, folder):
    """Runs an example, once; the folder of its run."""
    if path.name not in _done:
        words = words_of(path, models, folder)
        ranks = int(options_of(path).get("num-stages", 1))
        name = command_of(path)
        door = COMMANDS[name].door
        entry = [str(ROOT / door)] if door else ["-m", "stageline", name]
        done = ForkedRun([*entry, *words], ranks=ranks).wait(200)
        assert done.code == 0, done.out + done.err
        _done[path.name] = folder / path.stem
    return _done[path.name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    _done.clear()
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_parses_and_runs(path, models, folder, monkeypatch):
    monkeypatch.chdir(ROOT)  # where examples are run from
    command = command_of(path)
    made = run(path, models, folder)
    arguments = PARSERS[command](words_of(path, models, folder))
    assert arguments.run.output_dir == str(made)
    if command == "train":
        lines = map(json.loads, (made / "log.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if line["kind"] == "train"]
        assert len(losses) == 2 and all(map(math.isfinite, losses))
        assert list((made / "checkpoints").glob("step-*"))
    else:
        assert len((made / "predictions.jsonl").read_text().splitlines()) == 2
        assert (made / "report.json").exists() == (command == "eval")


def test_the_default_job_reads_a_picture_as_one_tile():
    """So its four tokens; tiles took most of its time, on the first stage, and taught nothing."""
    module = runpy.run_path(str(ROOT / "scripts/make_digits_model.py"))
    processor = module["make_processor"](module["make_tokenizer"]())
    expander = ImageExpander.of(processor)
    text = expander.facts((32, 32)).text
    assert text.count("<IMG_CONTEXT>") == module["num_image_tokens"]() == 4
    assert len(expander.pixels([[Image.new("RGB", (32, 32))]])["pixel_values"]) == 1
