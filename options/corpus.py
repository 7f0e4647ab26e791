"""Options of corpus.py, one class per action."""

import functools
from dataclasses import fields
from pathlib import Path
from typing import Literal

from options.command_line import by_name, read_config, read_words
from options.data import CorpusRunOptions
from options.fields import OptionError, Options, model_option, option, spelled

PREFIX = "path of a corpus without suffix (.bin, .idx ...)"
TOKENIZER = "tokenizer: a folder, tokenizer.json or hub name (owner/name[@revision])"


_prefix = functools.partial(option, None, is_output=True, is_needed=True)
_tokenizer = functools.partial(model_option, None)
_overwrite = functools.partial(option, False, "replace a finished corpus of that name")
_row_length = functools.partial(option, ge=8, le=2**30)


class WriteConfig(Options):
    """Build a corpus from text, JSON lines or Parquet"""

    file_path: list[str] | None = option(
        None,
        "input files, folders or patterns: .txt (one document per line), .jsonl, .json, .parquet, "
        "also .gz .bz2 .zst",
        is_path=True,
        is_pattern=True,
        is_needed=True,
    )
    save_path: str = option(".", "folder of the corpus", is_output=True)
    save_prefix: str | None = option(None, "name of the corpus in --save-path", is_needed=True)
    tokenizer_path: str | None = _tokenizer(TOKENIZER, is_needed=True)
    encoder: Literal["auto", "tiktoken", "tokenizers"] = option(
        "auto", "tokenizing library: auto = tiktoken (faster) where it gives the same ids"
    )
    do_split_sentences: bool = option(True, "cut long documents between sentences")
    do_keep_newlines: bool = option(True, "keep newlines, not replace them with a space")
    seq_length: int = _row_length(1024, "longest segment, in tokens with BOS and EOS")
    add_bos: bool | None = option(None, "add BOS to each document; default: if the tokenizer has")
    add_eos: bool | None = option(None, "add EOS to each document; default: if the tokenizer has")
    num_workers: int | None = option(None, "worker processes; default: one per core", ge=0)
    strict: bool = option(False, "stop at the first bad row, not list bad rows in PREFIX.bad.jsonl")
    max_document_bytes: int = option(32 * 2**20, "longest row, in bytes", ge=1)
    overwrite: bool = _overwrite()


class MergeConfig(Options):
    """Join corpora; equal types become one, others stay apart"""

    merge_path_prefix: list[str] | None = option(None, f"{PREFIX}; repeat for each", is_needed=True)
    merge_path_type: list[int] | None = option(None, "type number of each corpus", is_needed=True)
    new_path_prefix: str | None = _prefix(PREFIX)
    overwrite: bool = _overwrite()


class ReadConfig(Options):
    """Show segments, or write the documents back"""

    read_path_prefix: str | None = _prefix(PREFIX)
    tokenizer_path: str | None = _tokenizer(f"{TOKENIZER}; default: the build's, or print ids")
    text: bool = option(False, "write whole documents, one per line")
    json: bool | None = option(None, "with --text, JSON lines; default: unless built from text")
    output_path: str | None = option(None, "with --text, new file; default: stdout", is_output=True)
    start: int = option(0, "first segment, or with --text first document", ge=0)
    limit: int | None = option(None, "number to show; default: 10, or with --text all", ge=1)
    type: int | None = option(None, "type number to show; default: all types", ge=0)


class RemoveConfig(Options):
    """Copy a corpus without some segments"""

    read_data_path_prefix: str | None = _prefix(PREFIX)
    write_data_path_prefix: str | None = _prefix("path of the new corpus without suffix")
    remove_idx_path: str | None = option(
        None, "numbers from find-trained, or a text file", is_path=True, is_needed=True
    )
    overwrite: bool = _overwrite()


class StatsConfig(Options):
    """Lengths, padding and tokens of each type, with a picture"""

    read_path_prefix: str | None = _prefix(PREFIX)
    plot_path: str | None = option(None, "length plot; default: PREFIX.stats.png", is_output=True)
    json: bool = option(False, "print the figures as JSON")


class VerifyConfig(Options):
    """Check all sums and counts of the files"""

    read_path_prefix: str | None = _prefix(PREFIX)
    tokenizer_path: str | None = _tokenizer(f"{TOKENIZER}, compared with that of the corpus")


class PackConfig(Options):
    """Arrange segments into rows of equal length"""

    read_path_prefix: str | None = _prefix(PREFIX)
    seq_length: int | None = _row_length(None, "row length, in tokens; default: longest segment")
    overwrite: bool = option(False, "replace packed rows of another length")


class ConvertConfig(Options):
    """Convert from and to the files of Megatron-core"""

    read_path_prefix: str | None = _prefix(PREFIX)
    new_path_prefix: str | None = _prefix("path of the converted copy without suffix")
    tokenizer_path: str | None = _tokenizer(f"of Megatron-core's files: {TOKENIZER}")
    seq_length: int | None = _row_length(None, "longest sequence of Megatron-core; default: any")
    language: str = option("unknown", "language of Megatron-core's files, for the header")
    overwrite: bool = _overwrite()


class FindTrainedConfig(CorpusRunOptions):
    """List the segments that a training run has read"""

    run_path: str | None = option(None, "run folder or checkpoint with these options", is_path=True)
    read_path_prefix: str | None = _prefix(PREFIX)
    save_path: str | None = _prefix("new file of segment numbers (.npy, else text)")
    steps: int | None = option(None, "optimizer steps; default: those of the checkpoint", ge=0)
    epoch: int | None = option(None, "single epoch, counted from 0; default: all", ge=0)
    batch_size: int | None = option(None, "rows per batch and replica", ge=1)
    accumulate_steps: int = option(1, "batches per optimizer step", ge=1)
    dp_degree: int = option(1, "number of replicas", ge=1)
    seed: int = option(0, "seed of the run", ge=0, le=10**12)


# action -> its options
ACTIONS: dict[str, type] = {
    "write": WriteConfig,
    "read": ReadConfig,
    "merge": MergeConfig,
    "remove": RemoveConfig,
    "find-trained": FindTrainedConfig,
    "stats": StatsConfig,
    "verify": VerifyConfig,
    "pack": PackConfig,
    "convert": ConvertConfig,
}
# action -> its registers with their default keys
KEYS: dict[str, dict[str, str | None]] = {
    "write": {"splitter": "auto", "document": "text"},
    "find-trained": {"dataset": "corpus"},
}


def split_action(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the action, if there is one, and the other words."""
    has_action = bool(words) and not words[0].startswith("-")
    return (words[0], words[1:]) if has_action else (None, words)


def overview() -> str:
    """Return all actions, one line each."""
    lines = "\n".join(f"  {name:<14}{config.__doc__}" for name, config in ACTIONS.items())
    return (
        f"usage: stageline corpus ACTION [CONFIG.yaml] [NAME=VALUE ...] [--option VALUE ...]\n\n"
        f"{lines}\n\n"
        "`stageline corpus ACTION --help` lists its options, `stageline list` all components."
    )


def run_folder(path: str) -> Path:
    """Return the folder of a run, of itself or of one of its checkpoints."""
    folder = Path(path).expanduser().absolute()
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def with_run(words: list[str]) -> list[str]:
    """Return the words with the options of the run folder that they name in front."""
    given = by_name(read_words(words)).get("run_path")
    if given is None or len(given.values) != 1:
        return words
    path = run_folder(given.values[0]) / "config.yaml"
    if not path.is_file():
        raise OptionError(f"{given}: {path} does not exist. Correct --run-path, or drop it.")
    names = {item.name: item.name for item in fields(FindTrainedConfig)}
    names |= {"dataset_path": "read_path_prefix", "dataset": "dataset", "import": "import"}
    found = []
    for item in read_config(path):
        head, dot, tail = item.name.partition(".")
        if head in names and (not dot or head == "dataset") and item.values != ["null"]:
            found += [spelled(names[head]) + dot + tail, *item.values]
    return [*found, *words]
