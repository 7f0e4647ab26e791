"""Build a corpus for pre-training; show, merge, check and copy it.

python corpus.py write --file-path a.jsonl --save-path data --save-prefix a --tokenizer-path llama
python corpus.py merge --merge-path-prefix data/a data/b --merge-path-type 0 1 \
    --new-path-prefix data/c
python corpus.py read --read-path-prefix data/c --tokenizer-path llama

`corpus.py --help` lists the actions; docs/corpus.md explains them.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import signal
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from commands import start
from options.command_line import command_words
from options.corpus import run_folder, split_action
from parse_args import CorpusArguments, parse_corpus_args
from stageline.corpus.header import BEGINS, ENDS, HAS_BOS, HAS_EOS, CorpusHeader, CutRules
from stageline.distributed.stop import release_signals
from stageline.errors import INTERRUPTED, PREEMPTED, DataError, UserError
from stageline.tables import format_table

NUM_BARS = 64
WAYS = {"segments": "a segment a row", "packed": "packed (pack)", "chunks": "one stream, cut"}
NUM_SEGMENTS = 10  # that are shown by default
NAMES = {BEGINS: "begins", ENDS: "ends", HAS_BOS: "BOS", HAS_EOS: "EOS"}


def main() -> int:
    """Do one action; return the exit code."""
    action, _ = split_action(command_words())
    # the dataset of a run determines its rows
    shelf = ("corpus_parts", "dataset") if action == "find-trained" else ("corpus_parts",)
    config = start(parse_corpus_args, *shelf)
    # no rank must save first, so Ctrl-C ends at once; a build continues later
    release_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    try:
        ACTIONS[config.action](config)
    except KeyboardInterrupt as interrupt:
        continues = ": the same command continues" if config.action == "write" else ""
        print(f"interrupted{continues}", file=sys.stderr)
        return PREEMPTED if interrupt.args else INTERRUPTED
    return 0


def stop(signum: int, frame: Any) -> None:
    """End as Ctrl-C does, but for the exit code."""
    raise KeyboardInterrupt(signal.Signals(signum).name)


def write(config: CorpusArguments) -> None:
    """Build a corpus, or continue one that was left."""
    from stageline.corpus.build import build_corpus
    from stageline.corpus.input import find_sources, holds_json_lines

    run, document = config.run, config.parts["document"]
    own = document.kwargs
    if document.key == "text" and not (own.get("fields") or own.get("template")):
        for source in filter(holds_json_lines, find_sources(run.file_path)):
            print(
                f"{source.path} begins with a JSON object, and each line becomes a document as it "
                "is. Name the fields of a document with --document.fields.",
                file=sys.stderr,
            )
    splitter = config.parts["splitter"]
    splits = run.do_split_sentences and splitter.facts.splits_sentences
    rules = CutRules(
        seq_length=run.seq_length,
        splits_sentences=splits,
        keeps_newlines=run.do_keep_newlines,
        adds_bos=run.add_bos,
        adds_eos=run.add_eos,
    )
    split = splitter.bound if splits else None
    if split is not None:
        split("One. Two.")  # a missing package fails here, not in each worker
    columns_of = document.facts.columns_of
    cores = len(os.sched_getaffinity(0))  # this process may use no others
    report = build_corpus(
        run.file_path,
        path_prefix=Path(run.save_path) / run.save_prefix,
        make_cutter=functools.partial(make_cutter, run.tokenizer_path, run.encoder, split, rules),
        document=document.bound,
        columns=None if columns_of is None else columns_of(**own),
        document_name=f"{document.key} {own}",
        language=" ".join([splitter.key, *map(str, splitter.kwargs.items())]),
        type_name=run.save_prefix,
        num_workers=cores if run.num_workers is None else run.num_workers,
        strict=run.strict,
        overwrite=run.overwrite,
        max_document_bytes=run.max_document_bytes,
    )
    print(report)


def make_cutter(tokenizer_path: str, kind: Any, splitter: Any, rules: Any) -> Any:
    """Return the cutter of a worker."""
    from stageline.corpus.cut import DocumentCutter
    from stageline.corpus.encoder import load_encoder

    return DocumentCutter(load_encoder(tokenizer_path, kind=kind), splitter, rules)


def open_encoder(path: str | None, known: Any) -> Any | None:
    """Return the encoder of a folder, None without one; refuse another than made the corpus."""
    from stageline.corpus.encoder import load_encoder

    if path is None:
        return None
    encoder = load_encoder(path, kind="tokenizers")
    if known is not None and encoder.info.fingerprint != known.fingerprint:
        raise DataError(
            f"--tokenizer-path {path} is another tokenizer than that of the corpus, {known.name} "
            f"(fingerprint {known.fingerprint[:12]}, not {encoder.info.fingerprint[:12]}). Give "
            "the folder that the corpus was built with."
        )
    return encoder


def read(config: CorpusArguments) -> None:
    """Show segments, or write the documents back."""
    from stageline.corpus.corpus_files import open_corpus

    run = config.run
    corpus = open_corpus(run.read_path_prefix)
    known = corpus.header.tokenizer
    path = run.tokenizer_path
    if path is None and run.text and known and Path(known.folder, "tokenizer.json").is_file():
        path = known.folder
    encoder = open_encoder(path, known)
    starts, low, high = corpus.type_starts, 0, len(corpus)
    if run.type is not None:
        if run.type >= len(starts) - 1:
            raise UserError(
                f"--type {run.type} is not in the corpus. Give one of 0 to {len(starts) - 2}."
            )
        low, high = starts[run.type : run.type + 2].tolist()

    if not run.text:  # segments
        first = low + run.start
        last = max(first, min(high, first + (run.limit or NUM_SEGMENTS)))
        flags = corpus.flags(first, last)
        for index in range(first, last):
            ids = corpus[index]
            said = " ".join(word for bit, word in NAMES.items() if flags[index - first] & bit)
            kind = corpus.header.types[bisect_right(starts, index) - 1].name
            print(f"[{index}] type {kind}, {len(ids)} tokens{': ' + said if said else ''}")
            print(encoder.decode(ids) if encoder else " ".join(map(str, ids.tolist())), end="\n\n")
        print(f"{last - first} of {high - low} segments", file=sys.stderr)
        return

    # documents
    if encoder is None:
        name = f"{known.name}, which was in {known.folder or 'no known folder'}" if known else "-"
        raise UserError(f"--text requires --tokenizer-path. Give the folder of {name}.")
    as_json = run.json
    if as_json is None:  # lines of text where all files that it was made of were text
        sources = corpus.header.sources
        names = [source["name"] if isinstance(source, dict) else "" for source in sources]
        endings = (".txt", ".txt.gz", ".txt.bz2", ".txt.zst")
        as_json = not names or not all(name.endswith(endings) for name in names)
    end = None if run.limit is None else run.start + run.limit
    count = 0
    with _opened(run.output_path) as file:
        for pair in islice(corpus.documents(low, high), run.start, end):
            text = encoder.decode(corpus.document_tokens(*pair))
            if not as_json and "\n" in text:
                raise DataError(
                    f"document {run.start + count} has several lines. Add --json, which writes "
                    "JSON lines."
                )
            file.write(json.dumps({"text": text}, ensure_ascii=False) if as_json else text)
            file.write("\n")
            count += 1
    print(f"{count} documents", file=sys.stderr)


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    """Open a file, which gets its name when it is whole, or stdout, which head may close."""
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


def merge(config: CorpusArguments) -> None:
    """Join corpora into a new one."""
    from stageline.corpus import tools

    run, new = config.run, config.run.new_path_prefix
    header = tools.merge(run.merge_path_prefix, run.merge_path_type, new, overwrite=run.overwrite)
    show_new(new, header)


def remove(config: CorpusArguments) -> None:
    """Copy a corpus without some segments."""
    from stageline.corpus import run_sampler, tools

    run, new = config.run, config.run.write_data_path_prefix
    gone = run_sampler.load_indices(run.remove_idx_path)
    show_new(new, tools.remove(run.read_data_path_prefix, new, gone, overwrite=run.overwrite))


def convert(config: CorpusArguments) -> None:
    """Copy from and to Megatron-core's files, by what there is."""
    from stageline.corpus import corpus_files, encoder, tools

    run = config.run
    prefix, new = run.read_path_prefix, run.new_path_prefix
    if corpus_files.open_corpus(prefix).header.tokenizer is not None:
        made = tools.to_megatron(prefix, new, overwrite=run.overwrite)
        print(f"{prefix} for Megatron-core: {', '.join(map(str, made))}")
        return
    if run.tokenizer_path is None:
        raise UserError(
            f"{prefix} is Megatron-core's, and --tokenizer-path is missing. Give its folder."
        )
    header = tools.from_megatron(
        prefix,
        new,
        tokenizer=encoder.load_encoder(run.tokenizer_path, kind="tokenizers").info,
        seq_length=run.seq_length,
        language=run.language,
        overwrite=run.overwrite,
    )
    show_new(new, header)


def show_new(prefix: str, header: CorpusHeader) -> None:
    """Print what a new corpus holds."""
    print(
        f"{prefix}: {header.num_segments:,} segments, {header.num_tokens:,} tokens, "
        f"{header.num_documents:,} documents"
    )
    for kind in header.types:
        figures = f"{kind.num_segments:,} segments, {kind.num_tokens:,} tokens"
        print(f"  type {kind.id}, {kind.name}: {figures}")


def verify(config: CorpusArguments) -> None:
    """Check all sums and counts."""
    from stageline.corpus import pack, tools

    run = config.run
    open_encoder(run.tokenizer_path, tools.verify(run.read_path_prefix).tokenizer)
    has_rows = Path(f"{run.read_path_prefix}.pack").exists()
    if has_rows:
        pack.PackedRows(run.read_path_prefix).verify()
    print(f"{run.read_path_prefix} is whole{', and so are its packed rows' if has_rows else ''}")


def pack(config: CorpusArguments) -> None:
    """Arrange segments into rows."""
    from stageline.corpus.pack import pack_corpus

    run = config.run
    rows = pack_corpus(run.read_path_prefix, run.seq_length, overwrite=run.overwrite)
    print(
        f"{rows.prefix}.pack: {len(rows):,} rows of {rows.row_length} tokens, "
        f"{rows.padding:.2%} padding"
    )


def stats(config: CorpusArguments) -> None:
    """Print the figures of a corpus, and draw the lengths of its segments in some dozen bars."""
    from stageline.corpus import pack
    from stageline.plotting.figures import lengths_figure
    from stageline.plotting.pictures import save_figure

    run = config.run
    figures = pack.stats(run.read_path_prefix)
    limit, whole = figures.seq_length, figures.whole
    width = -(-limit // NUM_BARS)
    borders = list(range(1, limit + width + 1, width))
    histograms = {
        kind.name: [int(kind.histogram[low : low + width].sum()) for low in borders[:-1]]
        for kind in figures.types
    }
    figure = lengths_figure(histograms, borders)
    picture = run.plot_path or f"{run.read_path_prefix}.stats.png"
    save_figure(figure, Path(picture), dpi=110)
    if run.json:
        values: dict[str, Any] = {"prefix": run.read_path_prefix, "seq_length": limit}
        for kind in (*figures.types, whole):
            own = {**dataclasses.asdict(kind), "padding": kind.padding}
            counts = own["histogram"]
            own["histogram"] = {int(at): int(counts[at]) for at in counts.nonzero()[0]}
            values[own.pop("name")] = own
        print(json.dumps(values))
        return
    rows = [["type", "segments", "tokens", "share", "mean", "documents", "of them cut"]]
    rows += [
        [
            kind.name[:23],
            f"{kind.num_segments:,}",
            f"{kind.num_tokens:,}",
            f"{kind.num_tokens / max(1, whole.num_tokens):.1%}",
            f"{kind.num_tokens / max(1, kind.num_segments):.0f}",
            f"{kind.num_documents:,}",
            f"{kind.num_cut_documents:,}",
        ]
        for kind in (*figures.types, whole)
    ]
    print(f"{figures.prefix}: segments of at most {limit} tokens")
    print(textwrap.indent(format_table(rows), "  "))
    fitting = max(1, whole.num_documents - whole.num_cut_documents)
    cuts = f"; cuts {whole.num_chunk_cuts / fitting:.1%} of the documents that would fit"
    print(f"padding of rows of {limit} tokens:")
    for way, name in WAYS.items():
        print(f"  {name:<24}{whole.padding[way]:>8.2%}{cuts if way == 'chunks' else ''}")
    print(f"the lengths are drawn in {picture}")


def find_trained(config: CorpusArguments) -> None:
    """List the segments that a run has read."""
    from stageline.corpus import mixture, run_sampler

    run, part = config.run, config.parts["dataset"]
    dataset = part.part(dataset_path=run.read_path_prefix, split="train", **part.kwargs)
    if not hasattr(dataset, "sizes"):
        raise UserError("the run drew from another dataset than a corpus. Give another --run-path.")

    # the epoch and the batch that would come next, and the rows of a batch
    if run.run_path is not None and run.steps is None:
        position = position_in(Path(run.run_path))
    elif run.steps is None or run.batch_size is None:
        raise UserError(
            "--steps and --batch-size are missing, and so is --run-path. Give them, or the run's "
            "folder."
        )
    else:
        rows = run.batch_size * run.dp_degree
        batch = sum(run.global_batch_distributed or ()) or rows
        drawn = run.steps * run.accumulate_steps * rows
        position = {"batch_rows": batch, "epoch": 0, "batch": drawn // batch}
    drawing = mixture.Mixture(
        dataset.sizes,
        counts=run.global_batch_distributed,
        weights=run.mixture_weights,
        batch=position["batch_rows"],
        drop_mode=run.drop_mode or 0,
        seed=run.seed,
    )
    first, last = 0, position["epoch"] * len(drawing) + position["batch"]
    if run.epoch is not None:
        first = run.epoch * len(drawing)
        last = min(last, first + len(drawing))
    seen = run_sampler.find_trained(
        drawing, last, first_batch=first, ranges=dataset.ranges, packed=dataset.packed
    )
    run_sampler.save_indices(run.save_path, seen)
    print(f"{len(seen):,} of {len(dataset.corpus):,} segments: {run.save_path}")


def position_in(path: Path) -> dict[str, int]:
    """Return the position of the last checkpoint of a run, or of the one at `path`."""
    from stageline.checkpoint.optimizer_state import SavedState  # late: it needs torch
    from stageline.checkpoint.writer import step_folders

    folders = [path]
    if path.absolute() == run_folder(str(path)):
        folders = [folder for _, folder in step_folders(path / "checkpoints")]
    if not folders:
        raise UserError(f"--run-path {path} has no checkpoint. Give --steps.")
    position = SavedState(folders[0]).facts.get("position")
    if not isinstance(position, dict) or "batch_rows" not in position:
        raise UserError(f"{folders[0]} has no position in a corpus. Give --steps and --batch-size.")
    return position


_ALL = (write, read, merge, remove, find_trained, stats, verify, pack, convert)
ACTIONS = {action.__name__.replace("_", "-"): action for action in _ALL}
