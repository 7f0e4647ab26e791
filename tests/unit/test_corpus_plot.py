"""The picture of a corpus: what it draws, and that many types or none do not break it."""

from stageline.plotting.figures import corpus_figure
from stageline.plotting.pictures import save_figure

PADDING = {"a segment a row": 0.5, "packed": 0.01}


def histograms(num_types):
    return {f"type {kind}": ([1, 9, 17], [kind, 2]) for kind in range(num_types)}


def test_each_type_has_its_bars_on_top_of_the_others(tmp_path):
    kinds = histograms(3)
    tokens = {name: 10**6 * (place + 1) for place, name in enumerate(kinds)}
    figure = corpus_figure(kinds, padding=PADDING, tokens=tokens, title="$x")
    lengths, shares, padding = figure.axes
    tops = [bar.get_y() + bar.get_height() for bar in lengths.patches]
    assert max(tops) == 6 and tops[-2] == 0 + 1 + 2  # 3 types x 2, and 0 + 1 + 2
    assert sorted(bar.get_width() for bar in shares.patches) == [1, 2, 3]
    assert [bar.get_width() for bar in padding.patches] == [0.01, 0.5]
    save_figure(figure, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")
    assert len(list(tmp_path.iterdir())) == 2, "and nothing half written"
