"""Runs over the sample files of tests/samples through the real entries, in forked processes.

The model is a tiny llava with random weights. It generates, and then its words are replaced by
written ones: figures of a model that knows nothing would tell nothing apart.
"""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration

from tests.helpers.small_run import ROOT, Finished, ForkedRun
from tests.helpers.tiny_models import tiny_config, tiny_processor

# forked processes need not import these again
for _module in ("pipeline.runner", "training.run_log", "inference.generation", "plotting.pictures"):
    importlib.import_module(f"stageline.{_module}")

SAMPLES = ROOT / "tests" / "samples"
# name -> folder and dataset, its options, prompt, metric
SETS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "vsr": ("vsr", {}, "vsr", "vsr"),
    "whats_up_a": ("whats_up", {"test_size": 8}, "vqa", "whats_up"),
}
_SCRIPTED = '''
"""Generates, and then says what is written in a file."""

import json
from pathlib import Path

from register import model_register
from stageline.inference import generation


@model_register("scripted")
def scripted(
    model, processor, *, images, prompts, samples, max_new_tokens, temperature, seed, texts: str
):
    """Answers by the id of the sample, whatever the order in which it is asked.

    Args:
        texts: file with the text of each id; that of "*" is for all others.
    """
    answers = generation.generate(
        model, processor, prompts=prompts, images=images, max_new_tokens=max_new_tokens
    )
    said = json.loads(Path(texts).read_text())
    for answer, image, sample in zip(answers, images, samples, strict=True):
        assert len(image) == 1 and isinstance(answer["text"], str)
        answer["text"] = said[sample["id"] if "*" not in said else "*"]
    return answers
'''


def sample_rows(file: str) -> list[Any]:
    """Return the rows of a sample file, read plainly."""
    text = (SAMPLES / file).read_text(encoding="utf-8")
    return json.loads(text) if file.endswith(".json") else [*map(json.loads, text.splitlines())]


def changed_copy(name: str, folder: Path, file: str, change: Callable[[list[Any]], object]) -> Path:
    """Copy a sample folder and change the rows of a file."""
    shutil.copytree(SAMPLES / name, folder / name)
    rows = sample_rows(f"{name}/{file}")
    change(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name / file).write_text(json.dumps(rows) if file.endswith(".json") else lines)
    return folder / name


def make_llava(folder: Path) -> Path:
    """Saves model and processor."""
    processor = tiny_processor("llava")
    processor.save_pretrained(folder)
    torch.manual_seed(0)
    config = tiny_config("llava", vocab_size=len(processor.tokenizer), max_position_embeddings=512)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def train(model: Path, name: str, folder: Path, *words: object, ranks: int = 2) -> Finished:
    """Run one optimizer step over a sample set, with one stage on each rank."""
    return _run(
        *("train_pp.py", "--train-model", "llava", "--model-path", model, *_data_words(name)),
        *("--collate-fn", "sft", "--num-stages", ranks, "--batch-size", 4),
        *("--micro-batch-size", 2, "--total-steps", 1, "--max-token-num", 400),
        *("--eval-samples", 0, "--timeline-step", 0, "--learning-rate", 1e-2),
        *("--output-dir", folder, *words),
        ranks=ranks,
    )


def evaluate(model: Path, name: str, folder: Path, *words: object) -> Finished:
    """Evaluates the held-out rows of a sample set."""
    return _run(
        *("evaluate.py", "--builder", "auto", "--model-path", model, *_data_words(name)),
        *("--metric", SETS[name][3], "--output-dir", folder, "--batch-size", 3),
        *("--max-new-tokens", 3, *words),
    )


def scripted(folder: Path, texts: dict[str, str]) -> tuple[object, ...]:
    """Return the words of a command that answers each id with its text; "*" stands for all ids."""
    (folder / "scripted_part.py").write_text(_SCRIPTED)
    (folder / "texts.json").write_text(json.dumps(texts))
    part = ("--import", folder / "scripted_part.py", "--model", "scripted")
    return (*part, "--model.texts", folder / "texts.json")


def assert_refused(done: Finished, code: int, *words: str) -> None:
    """One message with all the words, without a traceback."""
    assert done.code == code, done.out + done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("error[")]
    assert "Traceback" not in done.err
    for word in words:
        assert word in line, line


def _data_words(name: str) -> list[object]:
    key, options, prompt, _ = SETS[name]
    words: list[object] = [
        "--import",
        "examples.spatial.parts",
        "--dataset",
        key,
        "--dataset-path",
        SAMPLES / key,
    ]
    for option, value in options.items():
        words += [f"--dataset.{option}", value]
    texts = ("--prompt", prompt, "--prompt-fn", "fill", "--image-token", "auto")
    return [*words, *texts, "--device", "cpu"]


def _run(program: str, *words: object, ranks: int = 1) -> Finished:
    return ForkedRun([str(word) for word in (ROOT / program, *words)], ranks=ranks).wait(90)
