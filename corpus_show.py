"""What corpus.py prints: segments, documents as lines, the report of a build, figures."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from stageline.corpus.segments import BEGINS, ENDS, HAS_BOS, HAS_EOS
from stageline.errors import DataError, UserError

NUM_BARS = 64
# ways to fill rows -> name, and what there is to say
WAYS = {
    "segments": ("a segment a row", "; less where rows of a micro-batch are padded to its longest"),
    "packed": ("packed (pack)", ""),
    "chunks": ("one stream, cut", ""),
}
NUM_SEGMENTS = 10  # that are shown, unless it is said
NAMES = {BEGINS: "begins", ENDS: "ends", HAS_BOS: "BOS", HAS_EOS: "EOS"}


def print_segments(
    corpus: Any, encoder: Any | None, *, start: int, limit: int | None, type_index: int | None
) -> None:
    """Segments with their place, length, flags and text; without an encoder with their ids."""
    low, high = segment_range(corpus, type_index)
    first = low + start
    last = min(high, first + (limit or NUM_SEGMENTS))
    flags = corpus.flags(first, max(first, last))
    for index in range(first, last):
        ids = corpus[index]
        said = " ".join(word for bit, word in NAMES.items() if flags[index - first] & bit)
        kind = type_of(corpus, index)
        print(f"[{index}] type {kind}, {len(ids)} tokens{': ' + said if said else ''}")
        print(encoder.decode(ids) if encoder else " ".join(map(str, ids.tolist())), end="\n\n")
    print(f"{max(0, last - first)} of {high - low} segments", file=sys.stderr)


def segment_range(corpus: Any, type_index: int | None) -> tuple[int, int]:
    """The segments of a type, or all.

    Raises:
        UserError: there is no such type.
    """
    starts = corpus.type_starts
    if type_index is None:
        return 0, len(corpus)
    if type_index >= len(starts) - 1:
        raise UserError(
            f"--type {type_index}: the corpus has the types 0 to {len(starts) - 2}. The number of "
            "one of them was expected, because each type is a range of its segments; stats lists "
            "them."
        )
    return int(starts[type_index]), int(starts[type_index + 1])


def type_of(corpus: Any, index: int) -> str:
    """The name of a segment's type."""
    for kind, end in zip(corpus.header.types, corpus.type_starts[1:], strict=True):
        if index < end:
            return kind.name
    raise IndexError(index)


def write_documents(
    corpus: Any,
    encoder: Any,
    path: str | None,
    *,
    as_json: bool,
    start: int,
    limit: int | None,
    type_index: int | None,
) -> None:
    """Writes whole documents as lines, to a new file or to the standard output.

    Raises:
        DataError: a document has several lines, and lines of text were asked for.
        UserError: the file is there.
    """
    low, high = segment_range(corpus, type_index)
    stop = None if limit is None else start + limit
    chosen = islice(corpus.documents(low, high), start, stop)
    texts = (encoder.decode(corpus.document_tokens(*pair)) for pair in chosen)
    with _opened(path) as file:
        count = 0
        for count, text in enumerate(texts, start=1):  # noqa: B007
            if not as_json and "\n" in text:
                raise DataError(
                    f"document {start + count - 1} has several lines. One was expected, because "
                    "documents are to be lines of text: add --json, which writes JSON lines."
                )
            file.write(json.dumps({"text": text}, ensure_ascii=False) if as_json else text)
            file.write("\n")
    print(f"{count} documents", file=sys.stderr)


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    """The file, which gets its name when it is whole; a reader of ours may leave early (head)."""
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
        try:
            yield sys.stdout
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if Path(path).exists():
        raise UserError(
            f"--output-path {path} is there. A new file was expected, because nothing is "
            "overwritten unasked: give another name, or remove it."
        )
    part = Path(path + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w", encoding="utf-8", newline="\n") as file:
        yield file
    part.replace(path)


def made_of_text(header: Any) -> bool:
    """Whether all files that a corpus was made of are text, a document a line."""
    names = [source.get("name", "") for source in header.sources if isinstance(source, dict)]
    endings = ("", ".gz", ".bz2", ".zst")
    is_text = [name.endswith(tuple(f".txt{ending}" for ending in endings)) for name in names]
    return bool(names) and len(names) == len(header.sources) and all(is_text)


def print_stats(prefix: str, *, as_json: bool, plot_path: str | None) -> None:
    """Prints the figures of a corpus, and draws the lengths of its segments."""
    from stageline.corpus.stats import stats

    figures = stats(prefix)
    picture = plot_path or f"{prefix}.stats.png"
    draw(figures, picture)
    if as_json:
        kinds = [*figures.types, figures.whole]
        values = {kind.name: figures_of(kind) for kind in kinds}
        print(json.dumps({"prefix": prefix, "seq_length": figures.seq_length, **values}))
        return
    print(stats_table(figures))
    print(f"the lengths are drawn in {picture}")


def figures_of(kind: Any) -> dict[str, Any]:
    """The figures of one type as JSON holds them."""
    values = dataclasses.asdict(kind)
    del values["name"]
    lengths = kind.histogram.nonzero()[0].tolist()
    histogram = {length: int(kind.histogram[length]) for length in lengths}
    return {**values, "histogram": histogram, "padding": kind.padding}


def stats_table(figures: Any) -> str:
    """The figures of each type, a line each, and what rows cost."""
    whole = figures.whole
    lines = [
        f"{figures.prefix}: segments of at most {figures.seq_length} tokens",
        f"  {'type':<24}{'segments':>12}{'tokens':>16}{'share':>8}{'mean':>7}"
        f"{'documents':>12}{'of them cut':>13}",
    ]
    for kind in [*figures.types, whole]:
        share = kind.num_tokens / max(1, whole.num_tokens)
        mean = kind.num_tokens / max(1, kind.num_segments)
        lines.append(
            f"  {kind.name[:23]:<24}{kind.num_segments:>12,}{kind.num_tokens:>16,}{share:>8.1%}"
            f"{mean:>7.0f}{kind.num_documents:>12,}{kind.num_cut_documents:>13,}"
        )
    fitting = max(1, whole.num_documents - whole.num_cut_documents)
    cuts = f"; cuts {whole.num_chunk_cuts / fitting:.1%} of the documents that would fit"
    lines.append(f"padding of rows of {figures.seq_length} tokens:")
    for way, (name, note) in WAYS.items():
        more = cuts if way == "chunks" else note
        lines.append(f"  {name:<24}{whole.padding[way]:>8.2%}{more}")
    return "\n".join(lines)


def draw(figures: Any, path: str) -> None:
    """The picture of the lengths, in a few dozen bars."""
    from stageline.plotting.corpus import plot_corpus

    width = -(-figures.seq_length // NUM_BARS)
    borders = list(range(1, figures.seq_length + width + 1, width))
    histograms = {}
    for kind in figures.types:
        counts = [int(kind.histogram[low : low + width].sum()) for low in borders[:-1]]
        histograms[kind.name] = (borders, counts)
    whole = figures.whole
    plot_corpus(
        histograms,
        path,
        padding={name: whole.padding[way] for way, (name, _) in WAYS.items()},
        tokens={kind.name: kind.num_tokens for kind in figures.types},
        title=Path(figures.prefix).name,
    )
