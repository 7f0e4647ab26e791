"""Entry file: builds a corpus for pre-training, shows, merges, checks and copies it.

python corpus.py write --file-path a.jsonl --save-path data --save-prefix a --tokenizer-path llama
python corpus.py merge --merge-path-prefix data/a data/b --merge-path-type 0 1 \
    --new-path-prefix data/c
python corpus.py read --read-path-prefix data/c --tokenizer-path llama

`corpus.py --help` lists the actions; docs/corpus.md explains them.
"""

import dataclasses
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corpus_show import made_of_text, print_segments, print_stats, write_documents
from options.corpus_args import CorpusArguments, parse_corpus_args, split_action
from register import freeze_registers, import_shelf
from stageline.distributed.failure import run_entry
from stageline.distributed.stop import release_signals
from stageline.errors import INTERRUPTED, PREEMPTED, DataError, UserError

SHELF = ("corpus_parts",)
SHELF_OF_RUNS = ("dataset",)  # what a run has seen, its dataset says


def main() -> int:
    """Does one action; returns the exit code."""
    shelf = (*SHELF, *SHELF_OF_RUNS) if split_action(sys.argv[1:])[0] == "find-trained" else SHELF
    import_shelf(*(() if "--list" in sys.argv else shelf))  # the list shows everything
    arguments = parse_corpus_args()
    freeze_registers()
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
    from stageline.corpus.segments import CutRules

    run, document = arguments.run, arguments.parts["document"]
    splitter = arguments.parts["splitter"]
    splits = run.do_split_sentences and getattr(splitter.part, "splits_sentences", True)
    rules = CutRules(
        seq_length=run.seq_length,
        pieces=run.pieces,
        splits_sentences=splits,
        keeps_newlines=run.do_keep_newlines,
        adds_bos=run.add_bos,
        adds_eos=run.add_eos,
    )
    split = functools.partial(splitter.part, **splitter.kwargs) if splits else None
    if split is not None:
        split("One. Two.")  # what it lacks is told now, not in each worker
    report = build_corpus(
        run.file_path,
        path_prefix=Path(run.save_path) / run.save_prefix,
        make_cutter=functools.partial(make_cutter, run.tokenizer_path, run.encoder, split, rules),
        document=with_columns(document.part, document.kwargs),
        document_name=f"{document.key} {document.kwargs}",
        language=" ".join([splitter.key, *map(str, splitter.kwargs.items())]),
        type_name=run.save_prefix,
        num_workers=num_cores() if run.num_workers is None else run.num_workers,
        executor=run.executor,
        strict=run.strict,
        overwrite=run.overwrite,
        max_document_bytes=run.max_document_bytes,
    )
    print(report)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def with_columns(part: Callable[..., str], options: dict[str, Any]) -> Callable[[Any], str]:
    """A document part with its options, and the fields that it needs of a row, if it tells."""
    document = functools.partial(part, **options)
    columns_of = getattr(part, "columns_of", None)
    if columns_of is not None:  # also where options that go wrong are refused
        document.columns = columns_of(**options)  # type: ignore[attr-defined]
    return document


def make_cutter(tokenizer_path: str, kind: str, splitter: Any, rules: Any) -> Any:
    """What a worker cuts with; None in the rules adds a token where the tokenizer has it."""
    from stageline.corpus.cutter import DocumentCutter

    encoder = load_tokenizer(tokenizer_path, kind)
    rules = dataclasses.replace(
        rules,
        adds_bos=encoder.info.bos_id is not None if rules.adds_bos is None else rules.adds_bos,
        adds_eos=encoder.info.eos_id is not None if rules.adds_eos is None else rules.adds_eos,
    )
    return DocumentCutter(encoder, splitter, rules)


def load_tokenizer(path: str, kind: str = "tokenizers") -> Any:
    """The encoder of a tokenizer's folder; a file in it may be named as well."""
    from stageline.corpus.encoder import load_encoder

    return load_encoder(Path(path).parent if Path(path).is_file() else path, kind=kind)


def merge(arguments: CorpusArguments) -> None:
    """Joins corpora into a new one."""
    from stageline.corpus.merge import merge as merge_corpora

    run = arguments.run
    header = merge_corpora(
        run.merge_path_prefix,
        run.merge_path_type,
        run.new_path_prefix,
        overwrite=run.overwrite,
    )
    print(written(run.new_path_prefix, header))


def read(arguments: CorpusArguments) -> None:
    """Shows segments, or writes the documents back."""
    from stageline.corpus.corpus_files import open_corpus

    run = arguments.run
    corpus = open_corpus(run.read_path_prefix)
    encoder = open_encoder(run.tokenizer_path, corpus.header.tokenizer)
    chosen = {"start": run.start, "limit": run.limit, "type_index": run.type}
    if not run.text:
        print_segments(corpus, encoder, **chosen)
        return
    if encoder is None:
        name = corpus.header.tokenizer.name if corpus.header.tokenizer else "not told"
        raise UserError(
            f"--text came without --tokenizer-path. The tokenizer of the corpus ({name}) was "
            "expected, because a corpus holds token ids and no text: give its folder."
        )
    as_json = not made_of_text(corpus.header) if run.json is None else run.json
    write_documents(corpus, encoder, run.output_path, as_json=as_json, **chosen)


def open_encoder(path: str | None, known: Any) -> Any | None:
    """The encoder of a folder; None without one.

    Args:
        known: the TokenizerInfo of the corpus; None where it does not say.

    Raises:
        DataError: the corpus was made with another tokenizer.
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
    from stageline.corpus.remove import remove as remove_segments
    from stageline.corpus.trained import load_indices

    run = arguments.run
    header = remove_segments(
        run.read_data_path_prefix,
        run.write_data_path_prefix,
        load_indices(run.remove_idx_path),
        overwrite=run.overwrite,
    )
    print(written(run.write_data_path_prefix, header))


def find_trained(arguments: CorpusArguments) -> None:
    """Lists what a run has seen."""
    from corpus_trained import segments_seen
    from stageline.corpus.trained import save_indices

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
    from stageline.corpus.packed_rows import PackedRows
    from stageline.corpus.verify import verify as verify_corpus

    run = arguments.run
    path = run.tokenizer_path
    fingerprint = load_tokenizer(path).info.fingerprint if path else None
    verify_corpus(run.read_path_prefix, tokenizer_fingerprint=fingerprint)
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
    from stageline.corpus.convert import from_megatron, to_megatron
    from stageline.corpus.corpus_files import open_corpus

    run = arguments.run
    prefix, new_prefix = run.read_path_prefix, run.new_path_prefix
    if open_corpus(prefix).header.tokenizer is not None:
        made = to_megatron(prefix, new_prefix, overwrite=run.overwrite)
        print(f"{prefix} for Megatron-core: {', '.join(map(str, made))}")
        return
    if run.tokenizer_path is None:
        raise UserError(
            f"{prefix} is Megatron-core's, and --tokenizer-path is missing. The tokenizer that "
            "made the ids was expected, because those files do not say it: give its folder."
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
    "find-trained": find_trained,
    "stats": stats,
    "verify": verify,
    "pack": pack,
    "convert": convert,
}

if __name__ == "__main__":
    run_entry(main)
