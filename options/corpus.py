"""The options of corpus.py, a class an action; the names are those of the founding notes."""

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from options.command_line import by_name, read_config, read_words
from options.data import CorpusRunOptions
from options.fields import OptionError, Options, option, option_fields, spelled

PREFIX = "path of a corpus without its suffix (.bin, .idx ...)"
TOKENIZER = "folder with a tokenizer, its tokenizer.json, or hub name (owner/name[@revision])"


_prefix = functools.partial(option, None, PREFIX, is_output=True, is_needed=True)
_tokenizer = functools.partial(option, None, is_path=True, takes_name=True)
_overwrite = functools.partial(option, False, "replace a finished corpus of that name")


class WriteConfig(Options):
    """Build a corpus"""

    file_path: list[str] | None = option(
        None,
        "text (.txt: a line is a document), .jsonl, .json, .parquet, also .gz .bz2 .zst; files, "
        "folders or patterns",
        is_path=True,
        is_pattern=True,
        is_needed=True,
    )
    save_path: str = option(".", "folder of the corpus", is_output=True)
    save_prefix: str | None = option(
        None, "name of the corpus in --save-path, without suffix", is_needed=True
    )
    tokenizer_path: str | None = _tokenizer(TOKENIZER, is_needed=True)
    encoder: Literal["auto", "tiktoken", "tokenizers"] = option(
        "auto", "auto: tiktoken, several times as fast, where it gives the same ids"
    )
    do_split_sentences: bool = option(
        True, "cut long documents between sentences, as --language says where; false: anywhere"
    )
    do_keep_newlines: bool = option(
        True, "keep text as it is; false: white space with a newline becomes one space"
    )
    seq_length: int = option(
        1024, "tokens of a segment at most, with BOS and EOS", at_least=8, at_most=2**30
    )
    add_bos: bool | None = option(
        None, "BOS in front of each document; default: where the tokenizer has one"
    )
    add_eos: bool | None = option(
        None, "EOS behind each document; default: where the tokenizer has one"
    )
    num_workers: int | None = option(
        None,
        "processes, with the same files for any number; 0: none but this. Default: one a core",
        at_least=0,
    )
    executor: Literal["processes", "ray"] = option(
        "processes", "where they run; ray: on a Ray cluster, with the same files"
    )
    strict: bool = option(
        False, "end at the first bad row; else they are counted, and listed in PREFIX.bad.jsonl"
    )
    max_document_bytes: int = option(32 * 2**20, "a longer row is a bad one", at_least=1)
    overwrite: bool = _overwrite()


class MergeConfig(Options):
    """Merge corpora"""

    merge_path_prefix: list[str] | None = option(None, f"several times: {PREFIX}", is_needed=True)
    merge_path_type: list[int] | None = option(
        None,
        "a number for each: equal ones become one type, others stay apart for the mixture",
        is_needed=True,
    )
    new_path_prefix: str | None = _prefix()
    overwrite: bool = _overwrite()


class ReadConfig(Options):
    """Show a corpus"""

    read_path_prefix: str | None = _prefix()
    tokenizer_path: str | None = _tokenizer(
        f"{TOKENIZER}, that the corpus was made with; without it ids are shown, and --text looks"
        " where it lay then"
    )
    text: bool = option(False, "write the documents back as lines, whole")
    json: bool | None = option(
        None,
        'with --text: a line is {"text": ...}; default: where it was not made of text files alone',
    )
    output_path: str | None = option(
        None, "with --text: a new file; default: the standard output", is_output=True
    )
    start: int = option(0, "the first segment, or with --text document, to show", at_least=0)
    limit: int | None = option(
        None, "show so many; default: 10 segments, and with --text all documents", at_least=1
    )
    type: int | None = option(None, "only of the type of this number", at_least=0)


class RemoveConfig(Options):
    """Copy a corpus without some segments"""

    read_data_path_prefix: str | None = _prefix()
    write_data_path_prefix: str | None = option(
        None, "the new corpus: path without suffix", is_output=True, is_needed=True
    )
    remove_idx_path: str | None = option(
        None,
        "numbers of segments, as find-trained writes them: .npy, or text, one a line",
        is_path=True,
        is_needed=True,
    )
    overwrite: bool = _overwrite()


class StatsConfig(Options):
    """Figures of a corpus"""

    read_path_prefix: str | None = _prefix()
    plot_path: str | None = option(
        None, "picture of the lengths; default: PREFIX.stats.png", is_output=True
    )
    json: bool = option(False, "print the figures as JSON")


class VerifyConfig(Options):
    """Check the files of a corpus"""

    read_path_prefix: str | None = _prefix()
    tokenizer_path: str | None = _tokenizer(f"{TOKENIZER}: whether it is the one of the corpus")


class PackConfig(Options):
    """Pack segments into rows"""

    read_path_prefix: str | None = _prefix()
    seq_length: int | None = option(
        None, "tokens of a row; default: those of a segment at most", at_least=8, at_most=2**30
    )
    overwrite: bool = option(False, "replace packed rows of another length")


class ConvertConfig(Options):
    """Convert from and to Megatron-core's files"""

    read_path_prefix: str | None = _prefix()
    new_path_prefix: str | None = option(
        None,
        "the copy, in Megatron-core's form, or in ours if it is in that",
        is_output=True,
        is_needed=True,
    )
    tokenizer_path: str | None = _tokenizer(
        f"of Megatron-core's files, which do not say it: {TOKENIZER}"
    )
    seq_length: int | None = option(
        None,
        "of Megatron-core's files: longer sequences are cut into near-equal pieces; default: none",
        at_least=8,
        at_most=2**30,
    )
    language: str = option("unknown", "of Megatron-core's files, noted in the header")
    overwrite: bool = _overwrite()


class FindTrainedOptions(Options):
    """What a run has seen"""

    run_path: str | None = option(
        None,
        "run folder: its options and its last checkpoint say what follows; or one checkpoint of it",
        is_path=True,
    )
    read_path_prefix: str | None = _prefix()
    save_path: str | None = option(
        None,
        "new file of numbers of segments, for remove: .npy, else text",
        is_output=True,
        is_needed=True,
    )
    steps: int | None = option(
        None, "optimizer steps done; of a run folder by default those of the checkpoint", at_least=0
    )
    epoch: int | None = option(
        None, "what was seen in this epoch alone, from 0; default: in all", at_least=0
    )
    batch_size: int | None = option(None, "rows of a batch, per replica", at_least=1)
    accumulate_steps: int = option(1, "batches of an optimizer step", at_least=1)
    dp_degree: int = option(1, "replicas", at_least=1)
    seed: int = option(0, "of the run", at_least=0, at_most=10**12)


class FindTrainedConfig(CorpusRunOptions, FindTrainedOptions):
    """Every option of corpus.py find-trained."""


@dataclass(frozen=True)
class CorpusAction:
    """What a word behind `corpus.py` stands for; `holds` is its line in the list of actions."""

    holds: str
    config: type
    keys: Mapping[str, str | None] = field(default_factory=dict)  # register -> default key


ACTIONS = {
    "write": CorpusAction(
        "build a corpus from text, JSON lines or Parquet",
        WriteConfig,
        {"splitter": "auto", "document": "text"},
    ),
    "read": CorpusAction("show segments, or write the documents back", ReadConfig),
    "merge": CorpusAction("join corpora; equal types become one, others stay apart", MergeConfig),
    "remove": CorpusAction("copy a corpus without some segments", RemoveConfig),
    "find-trained": CorpusAction(
        "list the segments that a training run has seen", FindTrainedConfig, {"dataset": "corpus"}
    ),
    "stats": CorpusAction("lengths, padding and tokens a type, with a picture", StatsConfig),
    "verify": CorpusAction("check all sums and counts of the files", VerifyConfig),
    "pack": CorpusAction("arrange segments into rows of equal length", PackConfig),
    "convert": CorpusAction("from and to the files of Megatron-core", ConvertConfig),
}


def split_action(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the action and the other words; the notes' --mode=write is the word write."""
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    for place, word in enumerate(words):
        if word.startswith("--mode="):
            return word.partition("=")[2], words[:place] + words[place + 1 :]
        if word == "--mode" and place + 1 < len(words):
            return words[place + 1], words[:place] + words[place + 2 :]
    return None, words


def overview() -> str:
    """All actions, a line each."""
    lines = "\n".join(f"  {name:<14}{action.holds}" for name, action in ACTIONS.items())
    return (
        f"usage: corpus.py ACTION [options]\n\n{lines}\n\n"
        "`corpus.py ACTION --help` lists its options, `corpus.py --list` all parts."
    )


def no_action(name: str) -> str:
    """The error of a word that is no action."""
    near = difflib.get_close_matches(name, ACTIONS, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"{name!r} is no action of corpus.py.{hint} Begin with one of {', '.join(ACTIONS)}; "
        "`corpus.py --help` has a line on each."
    )


def check_needed(run: Any) -> None:
    """Refuse options without a value.

    Raises:
        OptionError: names them.
    """
    missing = [
        spelled(name)
        for name, item in option_fields(run).items()
        if item.metadata["is_needed"] and getattr(run, name) in (None, [])
    ]
    if missing:
        raise OptionError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing. Give it on "
            "the command line or in --config; --help says what it means."
        )


def run_folder(path: str) -> Path:
    """The folder of a run, of itself or of one of its checkpoints."""
    folder = Path(path).expanduser().absolute()
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def with_run(words: list[str]) -> list[str]:
    """The words, with the options of the run folder that they name in front: which rows it drew."""
    given = by_name(read_words(words)).get("run_path")
    if given is None or len(given.values) != 1:
        return words
    path = run_folder(given.values[0]) / "config.yaml"
    if not path.is_file():
        raise OptionError(
            f"{given}: {path} is not there. Correct the path of the run, or give its options "
            "themselves."
        )
    names = {item.name: item.name for item in fields(FindTrainedConfig)}
    names |= {"dataset_path": "read_path_prefix", "dataset": "dataset", "import": "import"}
    found = []
    for item in read_config(path):
        head, dot, tail = item.name.partition(".")
        if head in names and (not dot or head == "dataset") and item.values != ["null"]:
            found += [spelled(names[head]) + dot + tail, *item.values]
    return [*found, *words]
