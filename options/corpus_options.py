"""The options of corpus.py, a class an action; the names are those of the founding notes."""

from dataclasses import dataclass
from typing import Literal

from options.corpus_run_options import CorpusRunOptions
from options.fields import option

PREFIX = "path of a corpus without its suffix (.bin, .idx ...)"
TOKENIZER = "folder with a tokenizer, or its tokenizer.json"


def _overwrite() -> bool:
    return option(False, "replace a finished corpus of that name")


@dataclass(kw_only=True)
class WriteConfig:
    """Build a corpus"""

    file_path: list[str] | None = option(
        None,
        "text (.txt: a line is a document), .jsonl, .json, .parquet, also .gz .bz2 .zst; files, "
        "folders or patterns",
        is_path=True,
        is_pattern=True,
    )
    save_path: str = option(".", "folder of the corpus", is_output=True)
    save_prefix: str | None = option(None, "name of the corpus in --save-path, without suffix")
    tokenizer_path: str | None = option(None, TOKENIZER, is_path=True)
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
    pieces: Literal["even", "greedy"] = option(
        "even",
        "a long document's segments: even ones of near-equal length, for a segment a row; greedy "
        "ones as long as can be, for packed rows. There are equally many",
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


@dataclass(kw_only=True)
class MergeConfig:
    """Merge corpora"""

    merge_path_prefix: list[str] | None = option(None, f"several times: {PREFIX}")
    merge_path_type: list[int] | None = option(
        None, "a number for each: equal ones become one type, others stay apart for the mixture"
    )
    new_path_prefix: str | None = option(None, PREFIX, is_output=True)
    overwrite: bool = _overwrite()


@dataclass(kw_only=True)
class ReadConfig:
    """Show a corpus"""

    read_path_prefix: str | None = option(None, PREFIX, is_output=True)
    tokenizer_path: str | None = option(
        None, f"{TOKENIZER}, that the corpus was made with; without it ids are shown",
        is_path=True,
    )  # fmt: skip
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


@dataclass(kw_only=True)
class RemoveConfig:
    """Copy a corpus without some segments"""

    read_data_path_prefix: str | None = option(None, PREFIX, is_output=True)
    write_data_path_prefix: str | None = option(
        None, "the new corpus: path without suffix", is_output=True
    )
    remove_idx_path: str | None = option(
        None, "numbers of segments, as find-trained writes them: .npy, or text, one a line",
        is_path=True,
    )  # fmt: skip
    overwrite: bool = _overwrite()


@dataclass(kw_only=True)
class StatsConfig:
    """Figures of a corpus"""

    read_path_prefix: str | None = option(None, PREFIX, is_output=True)
    plot_path: str | None = option(
        None, "picture of the lengths; default: PREFIX.stats.png", is_output=True
    )
    json: bool = option(False, "print the figures as JSON")


@dataclass(kw_only=True)
class VerifyConfig:
    """Check the files of a corpus"""

    read_path_prefix: str | None = option(None, PREFIX, is_output=True)
    tokenizer_path: str | None = option(
        None, f"{TOKENIZER}: whether it is the one of the corpus", is_path=True
    )


@dataclass(kw_only=True)
class PackConfig:
    """Pack segments into rows"""

    read_path_prefix: str | None = option(None, PREFIX, is_output=True)
    seq_length: int | None = option(
        None, "tokens of a row; default: those of a segment at most", at_least=8, at_most=2**30
    )
    overwrite: bool = option(False, "replace packed rows of another length")


@dataclass(kw_only=True)
class ConvertConfig:
    """Convert from and to Megatron-core's files"""

    read_path_prefix: str | None = option(None, PREFIX, is_output=True)
    new_path_prefix: str | None = option(
        None, "the copy, in Megatron-core's form, or in ours if it is in that", is_output=True
    )
    tokenizer_path: str | None = option(
        None, f"of Megatron-core's files, which do not say it: {TOKENIZER}", is_path=True
    )
    seq_length: int | None = option(
        None,
        "of Megatron-core's files: longer sequences are cut into near-equal pieces; default: none",
        at_least=8,
        at_most=2**30,
    )
    language: str = option("unknown", "of Megatron-core's files, noted in the header")
    overwrite: bool = _overwrite()


@dataclass(kw_only=True)
class FindTrainedOptions:
    """What a run has seen"""

    run_path: str | None = option(
        None,
        "run folder: its options and its last checkpoint say what follows; or one checkpoint of it",
        is_path=True,
    )
    read_path_prefix: str | None = option(None, PREFIX, is_output=True)
    save_path: str | None = option(
        None, "new file of numbers of segments, for remove: .npy, else text", is_output=True
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
    seed: int = option(0, "of the run", at_least=0)


@dataclass(kw_only=True)
class FindTrainedConfig(CorpusRunOptions, FindTrainedOptions):
    """Every option of corpus.py find-trained."""
