"""The log, the curve and the pictures, read back."""

import json
import math

from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stageline.plotting.curves import loss_figure, read_log, smooth
from stageline.plotting.pictures import plot_predictions
from stageline.training.run_log import RunLog
from stageline.training.stage_table import StageSummary, format_stage_table, human_bytes


def write_log(folder, losses):
    log = RunLog(folder, total_steps=len(losses))
    for step, loss in enumerate(losses, start=1):
        log.log_step(step, {"loss": loss, "learning_rate": 0.1}, shown="")
    log.log_eval(len(losses), {"loss": 0.5})
    log.close()


def test_log_can_be_read_back_and_continued(tmp_path):
    write_log(tmp_path, [3.0, math.nan, 1.0])
    write_log(tmp_path, [0.5])
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(r["kind"], r["loss"]) for r in lines[:4]] == [
        *(("train", 3.0), ("train", None), ("train", 1.0), ("eval", 0.5)),
    ]
    assert len(lines) == 6
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("eval/loss")] == [0.5, 0.5]
    Image.open(tmp_path / "loss.png").verify()


def test_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path / "run", total_steps=1, is_main=False)
    log.log_step(1, {"loss": 1.0}, shown="")
    log.log_eval(1, {"loss": 1.0})
    log.close()
    assert not (tmp_path / "run").exists()


def test_the_curve_shows_the_log(tmp_path):
    write_log(tmp_path, [3.0, 2.0, 1.0])
    axes = loss_figure(*read_log(tmp_path / "log.jsonl")).axes
    raw, smoothed, held_out = axes[0].lines
    assert raw.get_xydata().tolist() == [[1, 3.0], [2, 2.0], [3, 1.0]]
    assert smoothed.get_ydata().tolist() == smooth([3.0, 2.0, 1.0])
    assert held_out.get_xydata().tolist() == [[3, 0.5]]


def test_smoothing_has_no_bias_at_the_start():
    assert all(abs(value - 2.0) < 1e-12 for value in smooth([2.0] * 5))


def test_pictures_of_samples(tmp_path):
    image = Image.new("RGB", (16, 16), "white")
    titles = ["a $ sign", "数字", "x" * 500]
    plot_predictions([image, None, image], titles, [True, False, None], tmp_path / "p.png")
    assert min(Image.open(tmp_path / "p.png").size) > 100


def test_stage_table_adds_up():
    stages = [
        StageSummary(0, 0, "cpu", "0-1", "llm", 1000, 10, 4000),
        StageSummary(1, 1, "cpu", "2-3", "llm+lm_head", 2000, 20, 2**20),
    ]
    lines = format_stage_table(stages).splitlines()
    assert "3,000" in lines[-1] and "30" in lines[-1] and "1.0 MiB" in lines[-2]
    assert [human_bytes(n) for n in (1, 1536, 5 * 2**30)] == ["1 B", "1.5 KiB", "5.0 GiB"]
