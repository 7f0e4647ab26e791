"""Entry file: builds a corpus for pre-training, shows, merges, checks and copies it.

python corpus.py write --file-path data/a.txt --save-path data --save-prefix a --tokenizer-path my_model
python corpus.py merge --merge-path-prefix data/a data/b --merge-path-type 0 1 --new-path-prefix data/c
python corpus.py read --read-path-prefix data/c
"""

import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from corpus_show import print_build, print_segments, print_stats, write_documents
from corpus_trained import find_trained_by
from options.corpus_args import CorpusArguments, parse_corpus_args
from register import freeze_registers, import_shelf
from stageline.distributed.failure import run_entry
from stageline.distributed.stop import release_signals
from stageline.errors import INTERRUPTED, PREEMPTED

SHELF = ("corpus_parts",)


def main() -> int:
    """Does one action; returns the exit code."""
    import_shelf(*(() if "--list" in sys.argv else SHELF))  # the list shows everything
    arguments = parse_corpus_args()
    freeze_registers()
    # no rank has to save first: Ctrl-C ends at once, and what is written is whole or resumed
    release_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(PREEMPTED))
    try:
        ACTIONS[arguments.action](arguments)
    except KeyboardInterrupt:
        goes_on = "; the same command goes on" if arguments.action == "write" else ""
        print(f"interrupted{goes_on}", file=sys.stderr)
        return INTERRUPTED
    return 0


def write(arguments: CorpusArguments) -> None:
    """Builds a corpus, or goes on with one that was stopped."""
    from stageline.corpus.build import build_corpus
    from stageline.corpus.cutter import DocumentCutter
    from stageline.corpus.encoder import load_encoder
    from stageline.corpus.segments import CutRules

    run, parts = arguments.run, arguments.parts
    splitter, document = parts["splitter"], parts["document"]
    splits = run.do_split_sentences and getattr(splitter.part, "splits_sentences", True)
    rules = CutRules(
        seq_length=run.seq_length,
        pieces=run.pieces,
        splits_sentences=splits,
        keeps_newlines=run.do_keep_newlines,
        adds_bos=run.add_bos,
        adds_eos=run.add_eos,
    )


def merge(arguments: CorpusArguments) -> None:
    """Joins corpora into a new one."""
    from stageline.corpus.merge import merge

    run = arguments.run
    merge(run.merge_path_prefix, run.merge_path_type, run.new_path_prefix, overwrite=run.overwrite)


ACTIONS: dict[str, Callable[[CorpusArguments], None]] = {}

if __name__ == "__main__":
    run_entry(main)
