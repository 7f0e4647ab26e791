"""--save-best through the real entry: the kept checkpoint has the best score of the log."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stageline.checkpoint.layout import verify
from tests.helpers.forked_entry import run_entry
from tests.helpers.house import ROOT
from tests.helpers.small_run import Job
from tests.helpers.tiny_datasets import write_lines

NUM_HELD_OUT = 11  # neither whole batches nor whole micro-batches

METRIC = """
from register import metric_register

@metric_register("ones")
def ones(predictions, samples):
    return {"per_sample": [float("1" in one["prediction"]) for one in predictions], "groups": {}}
"""


@pytest.fixture
def job(tmp_path):
    """Return a job with rows that a tiny llama learns by heart, and held-out ones."""
    for name, start, count in (("train", 0, 16), ("test", 30, NUM_HELD_OUT)):
        rows = range(start, start + count)
        lines = [{"id": str(i), "question": f"{i}?", "answer": f"{i % 7}!"} for i in rows]
        write_lines(tmp_path / f"{name}.jsonl", lines)
    return Job(tmp_path, num_layers=4)


@torch.no_grad()
def plain_figures(checkpoint, rows):
    """Loss and accuracy over the file's rows, one by one, in plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    loss, hits, targets = 0.0, 0, 0
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        text = f"Question: {row['question']}\nAnswer: {row['answer']}{tokenizer.eos_token}"
        ids = tokenizer(text, return_tensors="pt").input_ids
        wanted = ids[0, -4:]
        assert tokenizer.decode(wanted) == f" {row['answer']}{tokenizer.eos_token}"
        logits = model(input_ids=ids).logits[0, -5:-1].double()
        loss += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
        hits += int((logits.argmax(-1) == wanted).sum())
        targets += len(wanted)
    return loss / targets, hits / targets, targets


def test_the_kept_weights_compute_the_best_figures_of_the_log(job):
    folder = job.folder
    part = folder / "ones.py"
    part.write_text(METRIC)
    options = "--eval-steps 4 --eval-samples all --learning-rate 0.05 --lr-scheduler constant"
    more = ("--dataset-path", folder, "--save-best", "loss", "--save-steps", 4)
    more += ("--eval-completions", 5, "--eval-max-new-tokens", 6)
    more += ("--metric", "ones", "--import", part)
    done = job.train("run", *options.split(), *more)
    evaluations = job.records("run", "eval")
    assert [line["step"] for line in evaluations] == [0, 4, 8, 12]
    best = min(evaluations, key=lambda line: line["loss"])
    assert best["step"] > 0 and best["is_best"]

    checkpoints = folder / "run" / "checkpoints"
    manifest = verify(checkpoints / "best")
    figures = {name: best[name] for name in ("loss", "perplexity", "token_accuracy", "num_targets")}
    figures |= {name: best[name] for name in best if name.startswith("ones")}
    assert manifest["best"] == {"metric": "loss", "step": best["step"], "figures": figures}
    assert plain_figures(checkpoints / "best", folder / "test.jsonl") == (
        pytest.approx(best["loss"], rel=1e-5),
        best["token_accuracy"],
        best["num_targets"],
    )
    names = {path.name for path in checkpoints.iterdir()}
    steps = ("step-00000004", "step-00000008", "step-00000012")
    assert names == {"best", f"best-step-{best['step']:08d}", *steps}
    assert f"{best['loss']:.4f} at step {best['step']}: saved {checkpoints / 'best'}" in done.out

    # the stages that train answer as `stageline eval` does with their checkpoint, byte by byte
    samples = [json.loads(line) for line in (folder / "run" / "samples.jsonl").open()]
    assert len(samples) == 5 * len(evaluations)
    scores = [line["ones"] for line in evaluations]
    assert scores[0] == 0 < max(scores)
    line = evaluations[-1]
    out, checkpoint = folder / "evaluation", checkpoints / f"step-{line['step']:08d}"
    words = "--model generate --builder auto --dataset jsonl --prompt question --prompt-fn fill"
    words += " --image-token none --metric ones --max-new-tokens 6 --limit 5"
    paths = ("--model-path", checkpoint, "--dataset-path", folder, "--output-dir", out)
    ran = run_entry([ROOT / "evaluate.py", *words.split(), *paths, "--import", part])
    assert ran.returncode == 0, ran.stderr
    predictions = map(json.loads, (out / "predictions.jsonl").open())
    expected = {one["id"]: one["prediction"] for one in predictions}
    own = [one for one in samples if one["step"] == line["step"]]
    assert {one["id"]: one["answers"][0]["text"] for one in own} == expected
    report = json.loads((out / "report.json").read_text())
    interval = [line["ones_low"], line["ones_high"]]
    assert (line["ones"], interval) == (report["score"], report["interval_95"])
