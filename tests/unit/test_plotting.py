"""Curves and pictures: what is drawn equals what was logged."""

import json
import warnings

import numpy
import pytest
from PIL import Image

from stageline.plotting.figures import loss_figure, plot_loss, reward_figure, smooth
from stageline.plotting.pictures import plot_predictions, shown
from stageline.run_records import read_log


def step(number, loss, **other):
    return {"kind": "train", "step": number, "loss": loss, "lr": 0.1 / number, **other}


def evaluation(number, loss):
    return {"kind": "eval", "step": number, "loss": loss}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def data_of(lines, label):
    (line,) = [line for line in lines if str(line.get_label()).startswith(label)]
    return line.get_xydata().tolist()


# -- curves ------------------------------------------------------------------------------


def test_the_curve_shows_what_was_logged():
    losses = [2.0 + (number % 7) / 10 for number in range(1, 101)]
    steps = [step(number, loss) for number, loss in enumerate(losses, start=1)]
    figure = loss_figure(steps, [evaluation(0, 3.0), evaluation(50, 2.5)], title="a $ sign")
    upper, lower = figure.axes
    raw, smoothed, held_out = upper.lines
    assert raw.get_xydata().tolist() == [[n, x] for n, x in enumerate(losses, start=1)]
    assert smoothed.get_ydata().tolist() == smooth(losses)
    assert held_out.get_xydata().tolist() == [[0, 3.0], [50, 2.5]]
    assert lower.lines[0].get_ydata().tolist() == [0.1 / n for n in range(1, 101)]
    assert upper.get_yscale() == "linear"


def test_the_names_of_an_earlier_log_are_read(tmp_path):
    old = {"learning_rate": 0.1, "learning_rate_vit": 0.2, "tokens_per_second": 3.0}
    write(tmp_path / "log.jsonl", [{"kind": "train", "step": 1, **old}])
    ((record,), _) = read_log(tmp_path / "log.jsonl")
    assert record == {"kind": "train", "step": 1, "lr": 0.1, "lr_vit": 0.2, "tok/s": 3.0}


def test_rewards_are_drawn_by_part_where_there_are_some(tmp_path):
    parts = {"reward": 0.5, "reward_std": 0.1, "reward_number": 0.4, "reward_number_std": 0.2}
    others = {"equal_groups": 0.2, "cut_answers": 0, "entropy": 1.5, "answer_tokens": 9}
    steps = [step(number, 0.1, **parts, **others, reward_seconds=1) for number in (1, 2)]
    held_out = [{"kind": "eval", "step": 0, "reward": 0.3}]
    upper, middle, lower = reward_figure(steps, held_out, title="a").axes
    assert data_of(upper.lines, "reward number") == [[1, 0.4], [2, 0.4]]
    assert data_of(upper.lines, "held out") == [[0, 0.3]] and len(upper.lines) == 3
    assert len(middle.lines) == 3 and data_of(lower.lines, "answer") == [[1, 9], [2, 9]]
    for name, records in (("with", [*held_out, *steps]), ("without", [step(1, 0.1)])):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "log.jsonl", records)
        plot_loss(tmp_path / name / "log.jsonl", tmp_path / name / "loss.png", has_pdf=False)
        assert (tmp_path / name / "reward.png").exists() is (name == "with")


def test_steps_that_are_not_finite_are_marked_and_leave_no_gap_in_the_axis():
    no_mean = {"reward": "nan"}  # the step has no reward, but is as good as others
    steps = [step(1, 2.0), step(2, None, non_finite={"loss": "nan"})]
    steps.append(step(3, 1.5, non_finite=no_mean))
    upper = loss_figure(steps, []).axes[0]
    assert data_of(upper.lines, "training") == [[1, 2.0], [3, 1.5]]
    assert [x for x, _ in data_of(upper.lines, "not finite")] == [2]


def test_a_log_of_one_evaluation_or_of_nothing_can_be_drawn(tmp_path):
    for records in ([evaluation(0, 3.0)], [step(1, None)], []):
        write(tmp_path / "log.jsonl", records)
        plot_loss(tmp_path / "log.jsonl", tmp_path / "loss.png")
        Image.open(tmp_path / "loss.png").verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "log.jsonl", "loss.pdf", "loss.png",
    ]  # fmt: skip


def test_pyplot_is_not_used(tmp_path):
    from matplotlib import _pylab_helpers

    write(tmp_path / "log.jsonl", [step(1, 3.0)])
    plot_loss(tmp_path / "log.jsonl", tmp_path / "loss.png")
    assert not _pylab_helpers.Gcf.figs  # figures held there are never freed


def test_a_continued_run_replaces_what_came_after_its_start(tmp_path):
    first = [evaluation(0, 9.0), *[step(n, 1.0) for n in (1, 2, 3)], evaluation(2, 8.0)]
    first = [first[0], first[1], first[2], first[4], first[3], evaluation(3, 7.0)]
    write(tmp_path / "log.jsonl", [*first, step(3, 2.0)])
    steps, evaluations = read_log(tmp_path / "log.jsonl")
    assert [(r["step"], r["loss"]) for r in steps] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert [(r["step"], r["loss"]) for r in evaluations] == [(0, 9.0), (2, 8.0)]
    write(tmp_path / "log.jsonl", [*first, evaluation(0, 5.0), step(1, 4.0)])  # from the start
    steps, evaluations = read_log(tmp_path / "log.jsonl")
    assert [r["loss"] for r in steps] == [4.0] and [r["loss"] for r in evaluations] == [5.0]


def test_a_torn_line_is_left_out(tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps(step(1, 2.0)) + '\n{"kind": "tr\n[1]\n')
    assert [record["step"] for record in read_log(tmp_path / "log.jsonl")[0]] == [1]


@pytest.mark.parametrize("width", [3, 101])
def test_smoothing_equals_a_mean_by_hand(width):
    values = numpy.random.default_rng(0).normal(size=40)
    reach = (width - 1) // 2
    for index, value in enumerate(smooth(values.tolist(), width=width)):
        side = min(reach, index, 39 - index)
        assert value == pytest.approx(values[index - side : index + side + 1].mean(), abs=1e-12)


# -- pictures ----------------------------------------------------------------------------


def test_hostile_text_is_drawn_without_a_warning(tmp_path):
    texts = [
        "$x_{$",
        "数字 한국어 日本語",
        "\x00\x0f\t\r",
        "😀👍🏽",
        "\u202e عربى",
        "",
        "a\u0301" * 9,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = [(None, {"question": text, "answer": text}, text) for text in texts]
        plot_predictions(rows, tmp_path / "p.png", correct=[None] * len(texts))
    Image.open(tmp_path / "p.png").verify()
    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")


def test_the_table_beside_it_cuts_nothing(tmp_path):
    long = "word " * 400
    rows = [(None, {"answer": long}, long), (None, {"answer": "x", "id": 7}, "a | b <i>")]
    plot_predictions(rows, tmp_path / "p.png")
    head, *lines = (tmp_path / "p.md").read_text().splitlines()
    assert head == "1 wrong of 2."
    assert lines[1:3] == ["| id |  | sample |", "| --- | --- | --- |"]
    assert lines[3] == f"| 0 | right | → {long.strip()}<br>answer: {long.strip()} |"
    assert lines[4] == "| 7 | wrong | → a \\| b &lt;i><br>answer: x |"


# -- text --------------------------------------------------------------------------------


def test_all_images_of_a_sample_and_the_last_turns_of_messages_are_shown():
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "second"}]},
        {"role": "assistant", "content": "two"},
    ]
    images = [Image.new("RGB", (20, 10), "red"), Image.new("RGB", (30, 40), "blue")]
    picture, question, answer = shown({"messages": messages}, images)
    assert (question, answer) == ("second", "two")
    assert picture.size == (20 + 8, 10)  # the second at the height of the first
    assert picture.getpixel((5, 5)) == (255, 0, 0) and picture.getpixel((24, 5)) == (0, 0, 255)
    sample = {"question": "q", "answer": 0}
    assert shown(sample, images[:1]) == (images[0], "q", "0")
    assert shown({"caption": "c"}, None) == (None, "", "c")
