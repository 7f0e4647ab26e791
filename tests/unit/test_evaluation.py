"""Predictions that continue after a kill; intervals against brute force."""

import json

import pytest
import torch

from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError
from stageline.evaluation.predictions import Asking, PredictionFile, check_ids, fingerprint, predict
from stageline.evaluation.report import make_report, wilson_interval, write_report

ROWS = [(None, {"id": f"r{i}", "question": str(i), "answer": str(i)}) for i in range(7)]
TEXTS = {
    "prompt": "",
    "prompt_fn": lambda sample, prompt, **_: Rendered((Piece(sample["question"]),)),
    "image_token": lambda rendered, images, **_: rendered,
}


class Answerer:
    """A model that answers with the prompt and fails after `fails_after` prompts."""

    def __init__(self, fails_after=None):
        self.asked = []
        self.fails_after = fails_after

    def __call__(self, *, images, prompts):
        if self.fails_after is not None and len(self.asked) >= self.fails_after:
            raise KeyboardInterrupt
        self.asked += [prompt.text for prompt in prompts]
        return [{"text": prompt.text, "token_ids": [1]} for prompt in prompts]


def run(path, answer, key="k", batch_size=2):
    file = PredictionFile(path, settings_key=key)
    options = {"texts": TEXTS, "processor": None, "file": file, "asking": Asking(batch_size)}
    predict(ROWS, range(7), answer=answer, **options)
    return file


def test_a_stopped_evaluation_goes_on_where_it_was(tmp_path):
    path = tmp_path / "predictions.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(path, Answerer(fails_after=4))
    with path.open("a") as file:
        file.write('{"id": "r4", "predic')  # killed while writing
    second = Answerer()
    file = run(path, second, batch_size=3)
    assert second.asked == ["4", "5", "6"]
    assert {k: r["prediction"] for k, r in file.records.items()} == {
        f"r{i}": str(i) for i in range(7)
    }
    assert len(path.read_text().splitlines()) == 7
    third = Answerer()
    run(path, third)
    assert third.asked == []


def test_other_settings_are_answered_anew(tmp_path):
    run(tmp_path / "p.jsonl", Answerer())
    again = Answerer()
    run(tmp_path / "p.jsonl", again, key="other")
    assert len(again.asked) == 7
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 2})


def test_failed_samples_are_done_again(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"settings": "k", "id": "r0", "error": "out of memory"}) + "\n")
    answerer = Answerer()
    run(path, answerer)
    assert answerer.asked[0] == "0"


def test_the_order_of_lines_and_batches_makes_no_difference(tmp_path):
    path = tmp_path / "p.jsonl"
    run(path, Answerer(), batch_size=3)
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[::-1]))
    other = PredictionFile(path, settings_key="k")
    again = run(tmp_path / "q.jsonl", Answerer(), batch_size=7)
    assert other.records == again.records


def test_a_text_with_odd_line_breaks_stays_one_line(tmp_path):
    path = tmp_path / "p.jsonl"
    text = "a\u2028b\x85c"
    PredictionFile(path, settings_key="k").append([{"id": "r0", "prediction": text}])
    assert PredictionFile(path, settings_key="k").records["r0"]["prediction"] == text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": "r1", "pred', "not a prediction"),
        ('{"id": "r1", "prediction": 5}', "not a prediction"),
        ('{"settings": "k", "id": "r0", "prediction": "b"}', "another prediction in line 1"),
    ],
)
def test_damaged_predictions_are_refused_by_line(line, words, tmp_path):
    path = tmp_path / "p.jsonl"
    first = {"settings": "k", "id": "r0", "prediction": "a"}
    path.write_text(f"{json.dumps(first)}\n{line}\n{json.dumps(first)}\n")
    with pytest.raises(DataError, match=rf"p\.jsonl:2: .*{words}"):
        PredictionFile(path, settings_key="k")


def test_groups_are_kept_with_a_prediction(tmp_path):
    rows = [(None, {**ROWS[0][1], "groups": {"relation": "on"}, "tensor": object()})]
    file = PredictionFile(tmp_path / "p.jsonl", settings_key="k")
    options = {"texts": TEXTS, "processor": None, "file": file, "asking": Asking(1)}
    predict(rows, [0], answer=Answerer(), **options)
    kept = json.loads(file.path.read_text())["sample"]
    assert kept["groups"] == {"relation": "on"} and "tensor" not in kept


def test_equal_ids_are_refused():
    with pytest.raises(DataError, match="rows 0 and 2 have the same id 'r0'"):
        check_ids([*ROWS[:2], ROWS[0]], range(3))


@pytest.mark.parametrize(("hits", "count"), [(0, 10), (352, 360)])
def test_the_interval_is_where_the_score_test_accepts(hits, count):
    """Wilson's interval inverts the score test: scan all shares."""
    shares = torch.linspace(1e-6, 1 - 1e-6, 200001, dtype=torch.float64)
    z = (hits / count - shares) / torch.sqrt(shares * (1 - shares) / count)
    accepted = shares[z.abs() <= 1.959963984540054]
    low, high = wilson_interval(hits, count)
    assert low == pytest.approx(accepted.min().item(), abs=1e-4)
    assert high == pytest.approx(accepted.max().item(), abs=1e-4)


def test_report_has_groups(tmp_path):
    figures = {"score": 0.5, "per_sample": [1, 0, 1, 0], "groups": {"a": [0, 2], "b": [1, 3]}}
    report = make_report(figures, settings={"x": 1})
    write_report(report, tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["groups"]["a"]["score"] == 1.0 and read["groups"]["b"]["score"] == 0.0
    assert read["score"] == 0.5 and read["num_samples"] == 4 and read["settings"] == {"x": 1}
