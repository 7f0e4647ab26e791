"""Entry file: builds a corpus for pre-training, shows, merges, checks and copies it.

python corpus.py write --file-path a.jsonl --save-path data --save-prefix a --tokenizer-path llama
python corpus.py merge --merge-path-prefix data/a data/b --merge-path-type 0 1 \
    --new-path-prefix data/c
python corpus.py read --read-path-prefix data/c --tokenizer-path llama

`corpus.py --help` lists the actions; docs/corpus.md explains them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import signal
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from commands import with_folders
from options.command_line import command_words
from options.corpus import FindTrainedConfig, run_folder, split_action
from parse_args import CorpusArguments, parse_corpus_args
from register import freeze_registers, import_shelf, load_target
from stageline.corpus.header import BEGINS, ENDS, HAS_BOS, HAS_EOS, CutRules
from stageline.distributed.stop import release_signals
from stageline.errors import INTERRUPTED, PREEMPTED, DataError, UserError

if TYPE_CHECKING:
    import numpy

    from options.parts import ChosenPart

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
        kind = corpus.header.types[bisect_right(corpus.type_starts, index) - 1].name
        print(f"[{index}] type {kind}, {len(ids)} tokens{': ' + said if said else ''}")
        print(encoder.decode(ids) if encoder else " ".join(map(str, ids.tolist())), end="\n\n")
    print(f"{max(0, last - first)} of {high - low} segments", file=sys.stderr)


def segment_range(corpus: Any, type_index: int | None) -> tuple[int, int]:
    """The segments of a type, or all."""
    starts = corpus.type_starts
    if type_index is None:
        return 0, len(corpus)
    if type_index >= len(starts) - 1:
        raise UserError(f"--type {type_index}: the corpus has the types 0 to {len(starts) - 2}.")
    return int(starts[type_index]), int(starts[type_index + 1])


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
    """Writes whole documents as lines, to a new file or to the standard output."""
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
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
        try:
            yield sys.stdout
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if Path(path).exists():
        raise UserError(f"--output-path {path} is there. Give another name, or remove it.")
    part = Path(path + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w", encoding="utf-8", newline="\n") as file:
        yield file
    part.replace(path)


def made_of_text(header: Any) -> bool:
    """Whether all files that a corpus was made of are text, a document a line."""
    names = [source["name"] if isinstance(source, dict) else "" for source in header.sources]
    endings = (".txt", ".txt.gz", ".txt.bz2", ".txt.zst")
    return bool(names) and all(name.endswith(endings) for name in names)


def print_stats(prefix: str, *, as_json: bool, plot_path: str | None) -> None:
    """Prints the figures of a corpus, and draws the lengths of its segments."""
    from stageline.corpus.pack import stats

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
    from stageline.plotting.figures import corpus_figure
    from stageline.plotting.pictures import save_figure

    width = -(-figures.seq_length // NUM_BARS)
    borders = list(range(1, figures.seq_length + width + 1, width))
    histograms = {}
    for kind in figures.types:
        counts = [int(kind.histogram[low : low + width].sum()) for low in borders[:-1]]
        histograms[kind.name] = (borders, counts)
    whole = figures.whole
    figure = corpus_figure(
        histograms,
        padding={name: whole.padding[way] for way, (name, _) in WAYS.items()},
        tokens={kind.name: kind.num_tokens for kind in figures.types},
        title=Path(figures.prefix).name,
    )
    save_figure(figure, Path(path), dpi=110)


SHELF = ("corpus_parts",)
SHELF_OF_RUNS = ("dataset",)  # what a run has seen, its dataset says


def main() -> int:
    """Does one action; returns the exit code."""
    action, _ = split_action(command_words())
    shelf = (*SHELF, *SHELF_OF_RUNS) if action == "find-trained" else SHELF
    import_shelf(*(() if "--list" in sys.argv else shelf))  # the list shows everything
    arguments = parse_corpus_args()
    freeze_registers()
    arguments = dataclasses.replace(arguments, run=with_folders(arguments.run))
    # no rank has to save first: Ctrl-C ends at once, and what was built is gone on with
    release_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    try:
        ACTIONS[arguments.action](arguments)
    except KeyboardInterrupt as interrupt:
        goes_on = ": the same command goes on" if arguments.action == "write" else ""
        print(f"interrupted{goes_on}", file=sys.stderr)
        return PREEMPTED if interrupt.args else INTERRUPTED
    return 0


def stop(signum: int, frame: Any) -> None:
    """Ends as Ctrl-C does, but for the exit code."""
    raise KeyboardInterrupt(signal.Signals(signum).name)


def write(arguments: CorpusArguments) -> None:
    """Builds a corpus, or goes on with one that was left."""
    from stageline.corpus.build import build_corpus
    from stageline.corpus.input import find_sources, holds_json_lines

    run, document = arguments.run, arguments.parts["document"]
    own = document.kwargs
    if document.key == "text" and not (own.get("fields") or own.get("template")):
        for source in filter(holds_json_lines, find_sources(run.file_path)):
            print(
                f"{source.path} begins with a JSON object, and each line becomes a document as it "
                "is. Name the fields of a document with --document.fields.",
                file=sys.stderr,
            )
    splitter = arguments.parts["splitter"]
    splits = run.do_split_sentences and splitter.facts["splits_sentences"]
    rules = CutRules(
        seq_length=run.seq_length,
        splits_sentences=splits,
        keeps_newlines=run.do_keep_newlines,
        adds_bos=run.add_bos,
        adds_eos=run.add_eos,
    )
    split = splitter.bound if splits else None
    if split is not None:
        split("One. Two.")  # what it lacks is told now, not in each worker
    cores = len(os.sched_getaffinity(0))  # those that this process may use
    report = build_corpus(
        run.file_path,
        path_prefix=Path(run.save_path) / run.save_prefix,
        make_cutter=functools.partial(make_cutter, run.tokenizer_path, run.encoder, split, rules),
        document=document.bound,
        columns=columns_of(document),
        document_name=f"{document.key} {document.kwargs}",
        language=" ".join([splitter.key, *map(str, splitter.kwargs.items())]),
        type_name=run.save_prefix,
        num_workers=cores if run.num_workers is None else run.num_workers,
        executor=run.executor,
        strict=run.strict,
        overwrite=run.overwrite,
        max_document_bytes=run.max_document_bytes,
    )
    print(report)


def columns_of(document: ChosenPart) -> Sequence[str] | None:
    """The fields that a document part needs of a row; None: it does not tell."""
    needed = load_target(document.facts["columns_of"])
    return None if needed is None else needed(**document.kwargs)


def make_cutter(tokenizer_path: str, kind: str, splitter: Any, rules: Any) -> Any:
    """What a worker cuts with; None in the rules adds a token where the tokenizer has it."""
    from stageline.corpus.cut import DocumentCutter

    encoder = load_tokenizer(tokenizer_path, kind)
    rules = dataclasses.replace(
        rules,
        adds_bos=encoder.info.bos_id is not None if rules.adds_bos is None else rules.adds_bos,
        adds_eos=encoder.info.eos_id is not None if rules.adds_eos is None else rules.adds_eos,
    )
    return DocumentCutter(encoder, splitter, rules)


def load_tokenizer(path: str, kind: Any = "tokenizers") -> Any:
    """The encoder of a tokenizer's folder; a file in it may be named as well."""
    from stageline.corpus.encoder import load_encoder

    return load_encoder(Path(path).parent if Path(path).is_file() else path, kind=kind)


def merge(arguments: CorpusArguments) -> None:
    """Joins corpora into a new one."""
    from stageline.corpus.tools import merge as merge_corpora

    run = arguments.run
    new = run.new_path_prefix
    header = merge_corpora(run.merge_path_prefix, run.merge_path_type, new, overwrite=run.overwrite)
    print(written(new, header))


def read(arguments: CorpusArguments) -> None:
    """Shows segments, or writes the documents back."""
    from stageline.corpus.corpus_files import open_corpus

    run = arguments.run
    corpus = open_corpus(run.read_path_prefix)
    known = corpus.header.tokenizer
    path = run.tokenizer_path
    if path is None and run.text and known and Path(known.folder, "tokenizer.json").is_file():
        path = known.folder
    encoder = open_encoder(path, known)
    chosen = {"start": run.start, "limit": run.limit, "type_index": run.type}
    if not run.text:
        print_segments(corpus, encoder, **chosen)
        return
    if encoder is None:
        name = f"{known.name}, which lay in {known.folder or 'no known folder'}" if known else "-"
        raise UserError(
            f"--text came without --tokenizer-path. Give the folder of the corpus's ({name})."
        )
    as_json = not made_of_text(corpus.header) if run.json is None else run.json
    write_documents(corpus, encoder, run.output_path, as_json=as_json, **chosen)


def open_encoder(path: str | None, known: Any) -> Any | None:
    """The encoder of a folder, None without one; refuses another than made the corpus.

    Args:
        known: the TokenizerInfo of the corpus; None where it does not say.
    """
    if path is None:
        return None
    encoder = load_tokenizer(path)
    if known is not None and encoder.info.fingerprint != known.fingerprint:
        raise DataError(
            f"--tokenizer-path {path} is another tokenizer than that of the corpus, {known.name} "
            f"(fingerprint {known.fingerprint[:12]}, came {encoder.info.fingerprint[:12]}). The "
            "same one was expected, because its ids mean other text to another one: give the "
            "folder that the corpus was built with."
        )
    return encoder


def remove(arguments: CorpusArguments) -> None:
    """Copies a corpus without some segments."""
    from stageline.corpus.run_sampler import load_indices
    from stageline.corpus.tools import remove as remove_segments

    run = arguments.run
    header = remove_segments(
        run.read_data_path_prefix,
        run.write_data_path_prefix,
        load_indices(run.remove_idx_path),
        overwrite=run.overwrite,
    )
    print(written(run.write_data_path_prefix, header))


def show_trained(arguments: CorpusArguments) -> None:
    """Lists what a run has seen."""
    from stageline.corpus.run_sampler import save_indices

    run, part = arguments.run, arguments.parts["dataset"]
    dataset = part.part(dataset_path=run.read_path_prefix, split="train", **part.kwargs)
    seen = segments_seen(run, dataset)
    save_indices(run.save_path, seen)
    print(f"{len(seen):,} of {len(dataset.corpus):,} segments: {run.save_path}")


def stats(arguments: CorpusArguments) -> None:
    """Prints figures, draws the lengths."""
    run = arguments.run
    print_stats(run.read_path_prefix, as_json=run.json, plot_path=run.plot_path)


def verify(arguments: CorpusArguments) -> None:
    """Checks all sums and counts."""
    from stageline.corpus.pack import PackedRows
    from stageline.corpus.tools import verify as verify_corpus

    run = arguments.run
    header = verify_corpus(run.read_path_prefix)
    open_encoder(run.tokenizer_path, header.tokenizer)
    has_rows = Path(f"{run.read_path_prefix}.pack").exists()
    if has_rows:
        PackedRows(run.read_path_prefix).verify()
    print(f"{run.read_path_prefix} is whole{', and so are its packed rows' if has_rows else ''}")


def pack(arguments: CorpusArguments) -> None:
    """Arranges segments into rows."""
    from stageline.corpus.pack import pack_corpus

    run = arguments.run
    rows = pack_corpus(run.read_path_prefix, run.seq_length, overwrite=run.overwrite)
    print(
        f"{rows.prefix}.pack: {len(rows):,} rows of {rows.row_length} tokens, "
        f"{rows.padding:.2%} padding"
    )


def convert(arguments: CorpusArguments) -> None:
    """From and to Megatron-core's files, by what there is."""
    from stageline.corpus.corpus_files import open_corpus
    from stageline.corpus.tools import from_megatron, to_megatron

    run = arguments.run
    prefix, new_prefix = run.read_path_prefix, run.new_path_prefix
    if open_corpus(prefix).header.tokenizer is not None:
        made = to_megatron(prefix, new_prefix, overwrite=run.overwrite)
        print(f"{prefix} for Megatron-core: {', '.join(map(str, made))}")
        return
    if run.tokenizer_path is None:
        raise UserError(
            f"{prefix} is Megatron-core's, and --tokenizer-path is missing. Give its folder."
        )
    header = from_megatron(
        prefix,
        new_prefix,
        tokenizer=load_tokenizer(run.tokenizer_path).info,
        seq_length=run.seq_length,
        language=run.language,
        overwrite=run.overwrite,
    )
    print(written(new_prefix, header))


def written(prefix: str, header: Any) -> str:
    """What a new corpus holds."""
    lines = [
        f"{prefix}: {header.num_segments:,} segments, {header.num_tokens:,} tokens, "
        f"{header.num_documents:,} documents"
    ]
    lines += [
        f"  type {kind.id}, {kind.name}: {kind.num_segments:,} segments, {kind.num_tokens:,} tokens"
        for kind in header.types
    ]
    return "\n".join(lines)


ACTIONS: dict[str, Callable[[CorpusArguments], None]] = {
    "write": write,
    "read": read,
    "merge": merge,
    "remove": remove,
    "find-trained": show_trained,
    "stats": stats,
    "verify": verify,
    "pack": pack,
    "convert": convert,
}


def segments_seen(run: FindTrainedConfig, dataset: Any) -> numpy.ndarray:
    """Numbers of the segments that a run has seen, sorted.

    Args:
        dataset: the rows that the run drew from, as its dataset part makes them.

    Raises:
        UserError: neither a checkpoint nor options say how many steps were done, or the run drew
            from no corpus.
    """
    if not hasattr(dataset, "sizes"):
        raise UserError("the run drew from another dataset than a corpus. Give another --run-path.")
    from stageline.corpus.mixture import Mixture
    from stageline.corpus.run_sampler import find_trained

    position = position_of(run)
    mixture = Mixture(
        dataset.sizes,
        counts=run.global_batch_distributed,
        weights=run.mixture_weights,
        batch=position["batch_rows"],
        drop_mode=run.drop_mode or 0,
        seed=run.seed,
    )
    first, last = 0, position["epoch"] * len(mixture) + position["batch"]
    if run.epoch is not None:
        first = run.epoch * len(mixture)
        last = min(last, first + len(mixture))
    return find_trained(
        mixture, last, first_batch=first, ranges=dataset.ranges, packed=dataset.packed
    )


def position_of(run: FindTrainedConfig) -> dict[str, int]:
    """Epoch and batch that would come next, and the rows of a batch."""
    if run.run_path is not None and run.steps is None:
        return position_in(Path(run.run_path))
    if run.steps is None or run.batch_size is None:
        raise UserError(
            "--steps and --batch-size came neither on the command line nor from --run-path. Give "
            "them, or the run's folder."
        )
    rows = run.batch_size * run.dp_degree
    batch = sum(run.global_batch_distributed or ()) or rows
    drawn = run.steps * run.accumulate_steps * rows
    return {"batch_rows": batch, "epoch": 0, "batch": drawn // batch}


def position_in(path: Path) -> dict[str, int]:
    """The position that the last checkpoint of a run noted, or the one at `path`.

    Raises:
        UserError: there is no checkpoint, or it is of a run on another kind of dataset.
    """
    from stageline.checkpoint.optimizer_state import SavedState  # late: it needs torch
    from stageline.checkpoint.writer import step_folders

    folders = [path]
    if path.absolute() == run_folder(str(path)):
        folders = [folder for _, folder in step_folders(path / "checkpoints")]
    if not folders:
        raise UserError(f"--run-path {path} has no checkpoint. Give --steps.")
    position = SavedState(folders[0]).facts.get("position")
    if not isinstance(position, dict) or "batch_rows" not in position:
        raise UserError(f"{folders[0]} does not say which rows came.")
    return position
