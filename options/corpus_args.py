"""The actions of corpus.py: what each is for, its options, and the parts that it chooses."""

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from options.command_line import by_name, read_config, read_words, typed
from options.corpus_options import (
    ConvertConfig,
    FindTrainedConfig,
    MergeConfig,
    PackConfig,
    ReadConfig,
    RemoveConfig,
    StatsConfig,
    VerifyConfig,
    WriteConfig,
)
from options.fields import OptionError, check_limits, spelled
from parse_args import Arguments, read_arguments


@dataclass(frozen=True)
class Action:
    """What a word behind `corpus.py` stands for.

    Attributes:
        holds: one line for the list.
        config: its options.
        needed: those without a default.
        keys: registers that it chooses from, with the keys that are taken when none is given.
    """

    holds: str
    config: type
    needed: tuple[str, ...]
    keys: Mapping[str, str | None] = field(default_factory=dict)


ACTIONS = {
    "write": Action(
        "build a corpus from text, JSON lines or Parquet",
        WriteConfig,
        ("file_path", "save_prefix", "tokenizer_path"),
        {"splitter": "auto", "document": "text"},
    ),
    "read": Action("show segments, or write the documents back", ReadConfig, ("read_path_prefix",)),
    "merge": Action(
        "join corpora; equal types become one, others stay apart",
        MergeConfig,
        ("merge_path_prefix", "merge_path_type", "new_path_prefix"),
    ),
    "remove": Action(
        "copy a corpus without some segments",
        RemoveConfig,
        ("read_data_path_prefix", "write_data_path_prefix", "remove_idx_path"),
    ),
    "find-trained": Action(
        "list the segments that a training run has seen",
        FindTrainedConfig,
        ("save_path", "read_path_prefix"),
        {"dataset": "corpus"},
    ),
    "stats": Action(
        "lengths, padding and tokens a type, with a picture", StatsConfig, ("read_path_prefix",)
    ),
    "verify": Action("check all sums and counts of the files", VerifyConfig, ("read_path_prefix",)),
    "pack": Action("arrange segments into rows of equal length", PackConfig, ("read_path_prefix",)),
    "convert": Action(
        "from and to the files of Megatron-core",
        ConvertConfig,
        ("read_path_prefix", "new_path_prefix"),
    ),
}


@dataclass
class CorpusArguments(Arguments):
    """What `corpus.py` does."""

    action: str


def overview() -> str:
    """All actions, a line each."""
    lines = [f"  {name:<14}{action.holds}" for name, action in ACTIONS.items()]
    return "\n".join(
        [
            "usage: corpus.py ACTION [options]",
            "",
            *lines,
            "",
            "`corpus.py ACTION --help` lists its options, `corpus.py --list` all parts.",
        ]
    )


def parse_corpus_args(argv: Sequence[str] | None = None) -> CorpusArguments:
    """Reads an action and its options; raises as `parse_train_args` does.

    Raises:
        OptionError: no such action, or an option that it needs is missing.
        SystemExit: after `--help` and `--list`.
    """
    name, words = split_action(list(sys.argv[1:] if argv is None else argv))
    if name == "find-trained":
        words = with_run(words)
    if name is None and words in (["--help"], ["-h"], []):
        print(overview())
        raise SystemExit(0 if words else OptionError.exit_code)
    action = ACTIONS.get(name or "")
    if action is None and words != ["--list"]:
        raise OptionError(_no_action(name or words[0]))
    config = action.config if action else VerifyConfig
    run, parts, imports = read_arguments(
        words, config, keys=action.keys if action else {}, action=name or ""
    )
    check_limits(run)
    _check_needed(run, action.needed)
    return CorpusArguments(run=run, parts=parts, imports=imports, action=name)


def split_action(words: list[str]) -> tuple[str | None, list[str]]:
    """The action and the other words; the notes' --mode=write is the word write."""
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    for place, word in enumerate(words):
        if word.startswith("--mode="):
            return word.partition("=")[2], words[:place] + words[place + 1 :]
        if word == "--mode" and place + 1 < len(words):
            return words[place + 1], words[:place] + words[place + 2 :]
    return None, words


def _no_action(name: str) -> str:
    near = difflib.get_close_matches(name, ACTIONS, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"{name!r} is no action of corpus.py.{hint} One of {', '.join(ACTIONS)} was expected as "
        "the first word, because it says what is to be done; `corpus.py --help` has a line on each."
    )


def _check_needed(run: Any, names: Sequence[str]) -> None:
    missing = [spelled(name) for name in names if getattr(run, name) in (None, [])]
    if missing:
        raise OptionError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing. A value was "
            "expected, because there is nothing to take in its place: give it on the command line "
            "or in --config; --help says what it means."
        )


def with_run(words: list[str]) -> list[str]:
    """The words, with the options of the run folder that they name in front."""
    given = by_name(read_words(words)).get("run_path")
    if given is None or len(given.values) != 1:
        return words
    path = run_folder(given.values[0]) / "config.yaml"
    if not path.is_file():
        raise OptionError(
            f"{given}: {path} is not there. The folder of a run was expected, or one checkpoint "
            "in it, because its options say which rows were drawn: correct the path, or give the "
            "options themselves."
        )
    return [*run_words(path), *words]


def run_folder(path: str) -> Path:
    """The folder of a run, of itself or of one of its checkpoints."""
    folder = Path(path).expanduser().absolute()
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def run_words(path: Path) -> list[str]:
    """The options of a run's config file that say which rows it drew."""
    names = {item.name: item.name for item in fields(FindTrainedConfig)}
    names |= {"dataset_path": "read_path_prefix", "dataset": "dataset", "import": "import"}
    words = []
    for item in read_config(path):
        head, dot, tail = item.name.partition(".")
        if head in names and (not dot or head == "dataset") and item.values != ["null"]:
            words += [typed(names[head]) + dot + tail, *item.values]
    return words
