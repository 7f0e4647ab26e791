"""What corpus.py prints."""

import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Results = dict[str, list[dict[str, float]]]
_padding: dict[str, Any] = {}
_packed: dict[str, float] = {}


def print_speed(results: Results, size: float, workers: int) -> None:
    """A line a peer."""
    documents, tokens = (int(results["ours"][0][name]) for name in ("documents", "tokens"))
    print(f"\n{workers} worker{'s' * (workers > 1)}, {size / 1e6:.1f} MB of text in", end=" ")
    print(f"{documents:,} documents, {tokens:,} tokens:\n")
    print("| | seconds | MB/s | of the rounds | Mtok/s | CPU s | ids differ in | ours / it |")
    print("|---|---|---|---|---|---|---|---|")
    for name, rounds in results.items():
        times = [one["seconds"] for one in rounds]
        speed = tokens / statistics.median(times) / 1e6
        rates = [size / 1e6 / time for time in times]
        pairs = zip(rounds, results["ours"], strict=True)
        ratios = [its["seconds"] / our["seconds"] for its, our in pairs]
        print(
            f"| {name} | {statistics.median(times):.2f} | {statistics.median(rates):.2f} "
            f"| {min(rates):.2f} - {max(rates):.2f} | {speed:.2f} "
            f"| {statistics.median(one['cpu'] for one in rounds):.1f} "
            f"| {rounds[0]['differ']:,} of {documents:,} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) |"
        )


def print_memory(peaks: dict[tuple[str, float], dict[str, float]]) -> None:
    """Peaks by size of the text."""
    sizes = sorted({size for _, size in peaks})
    print("\nMemory at most, all processes together, 2 workers (MB; no file behind it):\n")
    print("| | " + " | ".join(f"{size:g} MB of text" for size in sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    for name in dict.fromkeys(name for name, _ in peaks):
        found = [peaks.get((name, size)) for size in sizes]
        cells = [f"{one['peak'] / 1e6:.0f}" if one else "" for one in found]
        print(f"| {name} | " + " | ".join(cells) + " |")


def add_padding(name: str, prefix: Path) -> None:
    """Keeps the figures of a corpus for the table."""
    sys.path.insert(0, str(ROOT))
    from stageline.corpus.pack import pack_corpus, stats

    _padding[name] = stats(prefix).whole
    _packed[name] = pack_corpus(prefix).padding


def print_padding() -> None:
    """The ways of filling rows side by side."""
    print("\nPadding in rows of 1,024 tokens:\n")
    print("| | " + " | ".join(_padding) + " |")
    print("|---|" + "---|" * len(_padding))
    lines = {
        "documents; longer than a row": lambda one: (
            f"{one.num_documents:,}; {one.num_cut_documents / one.num_documents:.1%}"
        ),
        "segments; tokens": lambda one: f"{one.num_segments:,}; {one.num_tokens:,}",
        "a segment a row": lambda one: f"{one.padding['segments']:.1%}",
        "concat-and-chunk": lambda one: f"{one.padding['chunks']:.2%}",
        "... documents it cuts of those that fit": lambda one: (
            f"{one.num_chunk_cuts / (one.num_documents - one.num_cut_documents):.1%}"
        ),
    }
    cells = [f"{_packed[name]:.2%}" for name in _padding]
    print("| best-fit (.pack) | " + " | ".join(cells) + " |")
    for title, cell in lines.items():
        cells = [cell(one) for one in _padding.values()]
        print(f"| {title} | " + " | ".join(cells) + " |")


def print_reads(results: Results) -> None:
    """A line a reader."""
    assert len({one["sum"] for rounds in results.values() for one in rounds}) == 1, results
    print("\nRandom reads, each an int64 tensor:\n")
    print("| | reads | open ms | samples/s | of the rounds | Mtok/s |")
    print("|---|---|---|---|---|---|")
    for name, rounds in results.items():
        rates = [one["reads"] / one["seconds"] for one in rounds]
        tokens = statistics.median(one["tokens"] / one["seconds"] for one in rounds)
        print(
            f"| {name} | {int(rounds[0]['reads']):,} "
            f"| {statistics.median(one['open_ms'] for one in rounds):.1f} "
            f"| {statistics.median(rates):,.0f} | {min(rates):,.0f} - {max(rates):,.0f} "
            f"| {tokens / 1e6:.1f} |"
        )
