"""Bootstrap intervals against every resample there is; paired differences; groupings."""

import itertools
import json
import math
import random

import numpy
import pytest

from stageline.errors import DataError, UserError
from stageline.evaluation.report import (
    Bootstrap,
    collect_clusters,
    collect_groupings,
    compare,
    comparison_table,
    format_figures,
    format_report,
    make_report,
    read_other,
    report_markdown,
    sign_test,
)
from stageline.plotting.pictures import groups_figure, save_figure

# -- intervals ---------------------------------------------------------------------------


def all_means(clusters):
    """Return the mean of each of the n^n resamples of n clusters of scores."""
    means = []
    for drawn in itertools.product(clusters, repeat=len(clusters)):
        scores = [score for cluster in drawn for score in cluster]
        means.append(sum(scores) / len(scores))
    return sorted(means)


def share_below(means, value):
    return sum(mean <= value for mean in means) / len(means)


@pytest.mark.parametrize("seed", range(2))
def test_the_interval_holds_95_percent_of_all_resamples(seed):
    draw = random.Random(seed)
    scores = [draw.random() for _ in range(6)]
    low, high = Bootstrap(20_000).interval(scores)
    means = all_means([[score] for score in scores])
    assert share_below(means, low) == pytest.approx(0.025, abs=0.006)
    assert share_below(means, high) == pytest.approx(0.975, abs=0.006)


@pytest.mark.parametrize("seed", range(2))
def test_whole_clusters_are_drawn(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 4) for _ in range(6)]
    clusters = [[draw.random() for _ in range(size)] for size in sizes]
    pairs = [(score, name) for name, cluster in enumerate(clusters) for score in cluster]
    draw.shuffle(pairs)  # rows of a cluster need not stand together
    low, high = Bootstrap(20_000).interval(
        [score for score, _ in pairs], clusters=[name for _, name in pairs]
    )
    means = all_means(clusters)
    assert share_below(means, low) == pytest.approx(0.025, abs=0.008)
    assert share_below(means, high) == pytest.approx(0.975, abs=0.008)


def test_clusters_widen_the_interval():
    scores = [1] * 40 + [0] * 40
    alone = Bootstrap().interval(scores)
    together = Bootstrap().interval(scores, clusters=[i // 4 for i in range(80)])
    assert together[1] - together[0] > 1.5 * (alone[1] - alone[0])


def test_shares_of_zeros_and_ones_follow_the_binomial():
    """Resampling 0 and 1 is a binomial draw, whose quantiles are sums of its terms."""
    low, high = Bootstrap(20_000, seed=3).interval([1] * 30 + [0] * 20)
    terms = [math.comb(50, k) * 0.6**k * 0.4 ** (50 - k) for k in range(51)]
    cumulated = list(itertools.accumulate(terms))
    assert low == next(k for k in range(51) if cumulated[k] >= 0.025) / 50
    assert high == next(k for k in range(51) if cumulated[k] >= 0.975) / 50


def test_intervals_are_seeded_and_independent_of_chunks(monkeypatch):
    scores = numpy.random.default_rng(1).random(40).tolist()
    first = Bootstrap(500, seed=1).interval(scores, name="a")
    assert first == Bootstrap(500, seed=1).interval(scores, name="a")
    assert first != Bootstrap(500, seed=2).interval(scores, name="a")
    assert first != Bootstrap(500, seed=1).interval(scores, name="b")
    monkeypatch.setattr("stageline.evaluation.report.DRAWS_AT_ONCE", 90)
    assert first == Bootstrap(500, seed=1).interval(scores, name="a")


def test_nothing_has_no_interval():
    assert Bootstrap().interval([]) is None
    assert Bootstrap(0).interval([1, 0]) is None
    assert Bootstrap().interval([1, 1]) == (1.0, 1.0)


# -- the report --------------------------------------------------------------------------

SAMPLES = [
    {"id": "1", "groups": {"relation": "on", "task": "a"}, "cluster": "x.png", "group": "on"},
    {"id": "2", "groups": {"relation": "in", "task": "a"}, "cluster": "x.png", "group": "in"},
    {"id": "3", "groups": {"relation": "on", "task": None}, "group": "on"},
    {"id": "4"},
]
FIGURES = {
    "score": 0.5,
    "per_sample": [1, 0, 0, 1],
    "unparsed": [0, 0, 1, 0],
    "groups": {"on": [0, 2], "in": [1]},
    "pair_accuracy": 0.25,
}


def test_each_sample_counts_in_all_its_groupings():
    assert collect_groupings(SAMPLES) == {
        "relation": {"on": [0, 2], "in": [1]},
        "task": {"a": [0, 1]},
    }
    assert len(set(collect_clusters(SAMPLES))) == 3
    report = make_report(FIGURES, settings={"metric": "vsr"}, samples=SAMPLES)
    assert (report["num_unparsed"], report["unparsed_share"]) == (1, 0.25)
    assert report["pair_accuracy"] == 0.25
    relation, task = report["groupings"]["relation"], report["groupings"]["task"]
    assert [relation[name]["score"] for name in ("on", "in")] == [0.5, 0.0]
    assert [relation[name]["unparsed_share"] for name in ("on", "in")] == [0.5, 0.0]
    assert task["a"]["num_samples"] == 2 and set(report["groups"]) == {"on", "in"}
    assert report["bootstrap"] == {
        "resamples": 10_000, "seed": 0, "level": 0.95, "num_clusters": 3,
    }  # fmt: skip
    # both rows of one picture: drawn together, the mean is always the same
    assert task["a"]["bootstrap_95"] == [0.5, 0.5]
    assert report["groups"] == relation
    json.dumps(report)


def test_a_metric_that_counts_no_unparsed_answers_has_a_report():
    figures = {"score": 1.0, "per_sample": [1], "groups": {}}
    report = make_report(figures, settings={}, bootstrap=Bootstrap(0))
    assert "num_unparsed" not in report and report["bootstrap_95"] is None
    assert format_report(report).splitlines()[-1].split() == [
        "all", "1.0000", "0.207", "-", "1.000", "-", "1", "-",
    ]  # fmt: skip


def test_tables_show_each_grouping_once():
    report = make_report(FIGURES, settings={"metric": "vsr"}, samples=SAMPLES)
    text = format_report(report)
    heads = [line.split()[0] for line in text.splitlines() if "bootstrap" in line]
    assert heads == ["relation", "task"]  # "group" is the relation
    page = report_markdown(report)
    assert "# Evaluation with vsr" in page and "| on | 0.5000 | 0.095 - 0.905 |" in page
    assert page.count("| all |") == 2


def test_the_picture_shows_what_the_report_says(tmp_path):
    report = make_report(FIGURES, settings={}, samples=SAMPLES)
    figure = groups_figure(report)
    titles = [axes.get_title().split(":")[0] for axes in figure.axes]
    assert titles == ["relation", "task"]
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["on (2)", "in (1)"]
    right = next(c for c in axes.containers if c.get_label() == "right" and hasattr(c, "patches"))
    assert [bar.get_width() for bar in right.patches] == [0.5, 0.0]
    save_figure(figure, tmp_path / "groups.png")
    assert (tmp_path / "groups.png").read_bytes().startswith(b"\x89PNG")
    assert groups_figure(make_report({"per_sample": [1]}, settings={})) is None


def test_numbers_are_sorted_as_numbers(tmp_path):
    names = ["10", "9", "left", "-90", "10 o'clock", "9 o'clock", "0"]
    wanted = ["-90", "0", "9", "9 o'clock", "10", "10 o'clock", "left"]
    samples = [{"id": name, "groups": {"turn": name}} for name in names]
    report = make_report({"per_sample": [1] * 7}, settings={}, samples=samples)
    assert list(report["groupings"]["turn"]) == wanted
    shuffled = {name: report["groupings"]["turn"][name] for name in names}
    figure = groups_figure({**report, "groupings": {"turn": shuffled}})
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown[::-1] == [f"{name} (1)" for name in wanted], "from the top"


def test_chance_is_drawn_where_the_number_of_choices_is_known():
    samples = [
        {"id": "1", "groups": {"task": "a", "set": "x"}, "choices": ["p", "q"]},
        {"id": "2", "groups": {"task": "a", "set": "y"}, "num_choices": 4},
        {"id": "3", "groups": {"task": "b", "set": "y"}},
    ]
    figures = {"per_sample": [1, 0, 1], "unparsed": [0, 1, 0]}
    report = make_report(figures, settings={}, samples=samples, bootstrap=Bootstrap(0))
    tasks, sets = report["groupings"]["task"], report["groupings"]["set"]
    assert tasks["a"]["chance"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert sets["x"]["chance"] == 0.5 and "chance" not in sets["y"], "one of them is not known"
    assert "chance" not in report and "chance" not in tasks["b"]
    assert "| a | 0.5000 | 0.3750 |" in report_markdown(report)
    assert "| b | 1.0000 | - |" in report_markdown(report)
    figure = groups_figure(report)
    (drawn,) = [c for c in figure.axes[0].collections if c.get_label() == "chance"]
    ((_, low), (_, high)) = drawn.get_segments()[0]
    assert [x for x, _ in drawn.get_segments()[0]] == [0.375, 0.375] and low < 1 < high
    graded = {**figures, "is_graded": True, "per_sample": [2 * x for x in figures["per_sample"]]}
    report = make_report(graded, settings={}, samples=samples)
    axes = groups_figure(report).axes[0]
    assert axes.get_title().startswith("task: mean score") and axes.get_xlim()[1] >= 2
    assert "chance" not in str(make_report(graded, settings={}, samples=samples)["groupings"])


def test_the_legend_lies_on_no_bar():
    groups = {f"{number}": [number] for number in range(12)}
    figures = {"per_sample": [1] * 12, "unparsed": [0] * 12, "groups": groups}
    for unparsed in ([0] * 12, [1, *[0] * 11]):
        report = make_report({**figures, "unparsed": unparsed}, settings={}, bootstrap=Bootstrap(0))
        figure = groups_figure(report)
        figure.canvas.draw()
        (legend,) = figure.legends
        (axes,) = figure.axes
        assert axes.get_legend() is None
        assert legend.get_window_extent().y1 <= axes.get_tightbbox().y0 + 1, "but for rounding"
        assert legend.get_window_extent().x0 >= 0
        labels = [text.get_text() for text in legend.get_texts()]
        assert ("unparsed" in labels) == any(unparsed) and {"right", "all samples"} <= set(labels)


def test_the_page_names_what_was_evaluated():
    about = {"model": "LlamaForCausalLM", "checkpoint": "/runs/a/step-5", "date": "2026-11-23"}
    report = make_report(FIGURES, settings={"metric": "vsr"}, samples=SAMPLES, about=about)
    page = report_markdown(report)
    assert page.startswith(
        "# Evaluation with vsr\n\n- model: LlamaForCausalLM\n- checkpoint: /runs/a/step-5\n"
        "- date: 2026-11-23\n\n4 samples."
    )
    assert report["about"] == about


# -- two runs ----------------------------------------------------------------------------


def test_the_difference_is_paired():
    draw = random.Random(0)
    easy = [draw.random() < 0.5 for _ in range(200)]
    one = [int(is_easy or index % 10 == 0) for index, is_easy in enumerate(easy)]
    other = [int(is_easy) for is_easy in easy]
    samples = [{"id": str(i), "groups": {"half": "ab"[i % 2]}} for i in range(200)]
    result = compare(one, other, samples)
    better = sum(a > b for a, b in zip(one, other, strict=True))
    assert (result["num_better"], result["num_worse"]) == (better, 0)
    assert result["difference"] == pytest.approx(better / 200)
    assert 0 < result["interval_95"][0] < result["difference"] < result["interval_95"][1]
    # two intervals side by side overlap, and would hide it
    apart = [Bootstrap().interval(scores) for scores in (one, other)]
    assert apart[0][0] < apart[1][1]
    assert result["p_value"] == pytest.approx(2 * 0.5**better)
    assert result["groupings"]["half"]["b"]["difference"] == 0.0  # odd rows are equal
    pictured = [{**sample, "cluster": "one picture"} for sample in samples]
    assert compare(one, other, pictured)["p_value"] == 1.0, "no more than one thing differs"
    turned = compare(one, other, samples, lower_is_better=True)
    assert (turned["num_better"], turned["num_worse"]) == (0, better)
    assert turned["difference"] == result["difference"]
    assert compare(other, one, samples)["difference"] == -result["difference"]
    assert comparison_table(result)[-1][:2] == ["all", f"+{better / 200:.4f}"]


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (3, 3), (7, 2), (2, 7), (12, 1)])
def test_the_sign_test_counts_all_splits(better, worse):
    count = better + worse
    extreme = abs(better - worse)
    splits = list(itertools.product((1, -1), repeat=count))
    expected = sum(abs(sum(split)) >= extreme for split in splits) / len(splits)
    assert sign_test(better, worse) == pytest.approx(expected)


def lines_of(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def record(number, text="a", key="k", **sample):
    return {"settings": key, "id": f"r{number}", "prediction": text, "sample": sample}


def test_the_other_run_is_the_newest_of_its_file(tmp_path):
    path, samples = tmp_path / "p.jsonl", [{"id": f"r{i}", "question": "q"} for i in range(3)]
    old = [record(i, "old", "other settings") for i in range(3)]
    new = [record(i, f"new {i}", question="q", source="elsewhere:1") for i in (2, 0, 1)]
    lines_of(path, [*old, *new])
    assert [r["prediction"] for r in read_other(path, samples)] == ["new 0", "new 1", "new 2"]


@pytest.mark.parametrize(
    ("records", "error", "words"),
    [
        ([record(0), record(1)], UserError, "no prediction for 1 of 3 samples, such as 'r2'"),
        (
            [record(0, question="p"), record(1), record(2)],
            UserError,
            "sample 'r0' was made for question 'p', and the dataset has 'q'",
        ),
        ([record(0), record(1), record(1, "b"), record(2)], DataError, r"p.jsonl:3: sample 'r1'"),
        ([record(0), {"id": 5}], DataError, r"p.jsonl:2: .* is not a prediction"),
        ([], DataError, "holds no prediction"),
    ],
)
def test_predictions_of_other_data_are_refused(records, error, words, tmp_path):
    lines_of(tmp_path / "p.jsonl", records)
    samples = [{"id": f"r{i}", "question": "q"} for i in range(3)]
    with pytest.raises(error, match=words) as caught:
        read_other(tmp_path / "p.jsonl", samples)
    assert caught.value.exit_code == error.exit_code


def test_scores_that_are_no_zeros_and_ones_have_an_interval():
    # the metric does not declare that it grades, and its own score is another number
    figures = {"per_sample": [0.3, 0.6, 1.0], "score": 0.5}
    report = make_report(figures, settings={}, bootstrap=Bootstrap(10))
    assert (report["score"], report["own_score"]) == (pytest.approx(1.9 / 3), 0.5)
    assert format_figures(figures) == "own_score: 0.5"
    assert report["interval_95"] is None, "Wilson's is of shares: it was that of 1 in 3"
    scores = numpy.linspace(0, 1, 21).tolist()
    low, high = Bootstrap().interval(scores)
    spread = 1.96 * numpy.std(scores) / 21**0.5
    assert (low, high) == (
        pytest.approx(0.5 - spread, abs=0.01), pytest.approx(0.5 + spread, abs=0.01),
    )  # fmt: skip
