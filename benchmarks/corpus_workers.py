"""The peers of corpus.py: each makes token files of a whole text when it is told to.

Run as `python corpus_workers.py NAME SETTINGS`: imports, says READY, and begins at a line of input;
then says RESULT with seconds, and with what became of the ids beside transformers' own. Each does
what its own documentation says for the text of one field, an EOS behind each document.
"""

import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy

ROOT = Path(__file__).resolve().parents[1]
Settings = dict[str, Any]
Ids = Iterable[numpy.ndarray]


def make_cutter(settings: Settings) -> Any:
    """Ours; called in the build."""
    from stageline.corpus import sentences
    from stageline.corpus.cut import DocumentCutter
    from stageline.corpus.encoder import load_encoder
    from stageline.corpus.header import CutRules

    rules = CutRules(settings.get("seq_length", 1024))
    splitter = getattr(sentences, settings.get("language", "english"))
    return DocumentCutter(load_encoder(settings["tokenizer"]), splitter, rules)


def ours(settings: Settings) -> tuple[Callable[[], None], Callable[[], Ids]]:
    """Sentences, segments of 1,024 tokens at most, BOS and EOS; the journal and all checks."""
    sys.path.insert(0, str(ROOT))
    import stageline.model_folder  # noqa: F401
    from stageline.corpus.build import build_corpus
    from stageline.corpus.corpus_files import Corpus

    import_tokenizer(settings)
    prefix = str(Path(settings["folder"]) / "ours")

    def run() -> None:
        build_corpus(
            settings["files"],
            path_prefix=prefix,
            make_cutter=functools.partial(make_cutter, settings),
            language=settings.get("language", "english"),
            num_workers=settings["workers"],
            overwrite=True,
            progress=False,
        )

    def ids() -> Ids:
        corpus = Corpus(prefix)
        return (corpus.document_tokens(first, last) for first, last in corpus.documents())

    return run, ids


def import_tokenizer(settings: Settings) -> None:
    """All that transformers imports only when it loads a tokenizer, for it is not to be timed."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(settings["tokenizer"])


def datatrove(settings: Settings) -> tuple[Callable[[], None], Callable[[], Ids]]:
    """DocumentTokenizer without its shuffling; a file a task."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.logging import logger

    logger.remove()
    folder, parts = Path(settings["folder"]), Path(settings["parts"])
    tokenizer = DocumentTokenizer(
        str(folder / "tokens"),
        str(Path(settings["tokenizer"]) / "tokenizer.json"),
        eos_token=settings["eos"],
        shuffle_documents=False,
    )
    executor = LocalPipelineExecutor(
        pipeline=[JsonlReader(str(parts)), tokenizer],
        tasks=settings["workers"],
        workers=settings["workers"],
        logging_dir=str(folder / "log"),
        skip_completed=False,
    )

    def ids() -> Ids:
        for file in sorted((folder / "tokens").glob("*.ds")):
            tokens = numpy.fromfile(file, dtype="<u2")
            ends = numpy.fromfile(f"{file}.index", dtype="<u8").astype(numpy.int64)
            for start, end in zip(numpy.append(0, ends[:-1]), ends, strict=True):
                yield tokens[start : end - 1]

    return executor.run, ids


class MegatronEncoder:
    """What tools/preprocess_data.py of Megatron-LM hands to its pool, for one field of text."""

    tokenizer: Any = None

    def __init__(self, path: str) -> None:
        self.path = path

    def start(self) -> None:
        from transformers import AutoTokenizer

        MegatronEncoder.tokenizer = AutoTokenizer.from_pretrained(self.path)

    def __call__(self, line: str) -> tuple[list[int], list[int]]:
        text = json.loads(line)["text"]
        ids = MegatronEncoder.tokenizer(text, add_special_tokens=False).input_ids
        if ids:
            ids.append(MegatronEncoder.tokenizer.eos_token_id)
        return ids, [len(ids)]


def megatron(settings: Settings) -> tuple[Callable[[], None], Callable[[], Ids]]:
    """The loop of tools/preprocess_data.py (--append-eod) around Megatron-core's builder.

    The tool is not in the package. Its sentences are not asked for: it wants nltk's old pickles.
    """
    import warnings

    warnings.simplefilter("ignore")
    from megatron.core.datasets import indexed_dataset

    import_tokenizer(settings)
    prefix = str(Path(settings["folder"]) / "megatron")

    def run() -> None:
        encoder = MegatronEncoder(settings["tokenizer"])
        encoder.start()
        dtype = indexed_dataset.DType.optimal_dtype(encoder.tokenizer.vocab_size)
        builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        with multiprocessing.Pool(settings["workers"], initializer=encoder.start) as pool:
            for file in settings["files"]:
                with open(file, encoding="utf-8") as lines:
                    for ids, lengths in pool.imap(encoder, lines, 32):
                        builder.add_document(ids, lengths)
            builder.finalize(f"{prefix}.idx")

    def ids() -> Ids:
        dataset = indexed_dataset.IndexedDataset(prefix)
        return (dataset[place][:-1] for place in range(len(dataset)))

    return run, ids


def datasets(settings: Settings) -> tuple[Callable[[], None], Callable[[], Ids]]:
    """load_dataset and map of Hugging Face, in batches of 1,000 rows, to an Arrow file."""
    import datasets as library
    from transformers import AutoTokenizer

    import_tokenizer(settings)
    library.disable_progress_bars()
    made: list[Any] = []

    def encode(tokenizer: Any, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch["text"], add_special_tokens=False).input_ids
        return {"input_ids": [[*row, tokenizer.eos_token_id] for row in ids]}

    def run() -> None:
        tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
        rows = library.load_dataset(
            "json", data_files=settings["files"], split="train", cache_dir=settings["folder"]
        )
        made[:] = [
            rows.map(
                functools.partial(encode, tokenizer),
                batched=True,
                num_proc=settings["workers"] if settings["workers"] > 1 else None,
                remove_columns=rows.column_names,
            )
        ]

    def ids() -> Ids:
        for batch in made[0].data.table.to_batches():
            for row in batch.column("input_ids"):
                yield row.values.to_numpy()[:-1]

    return run, ids


def num_differing(ids: Ids, reference: Path) -> dict[str, int]:
    """Tokens and documents, and how many documents have other ids than transformers gives."""
    tokens = numpy.load(reference / "tokens.npy", mmap_mode="r")
    ends = numpy.load(reference / "ends.npy")
    num_tokens = num_documents = num_differ = start = 0
    for row in ids:
        end = int(ends[num_documents]) if num_documents < len(ends) else start
        num_differ += not numpy.array_equal(row, tokens[start:end])
        num_tokens += len(row)
        num_documents += 1
        start = end
    num_differ += len(ends) - num_documents
    return {"tokens": num_tokens, "documents": num_documents, "differ": num_differ}


def write_reference(settings: Settings) -> None:
    """The ids that transformers gives to each document, text of control tokens taken as text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    parts, texts = [], []
    for file in settings["files"]:
        with open(file, encoding="utf-8") as lines:
            texts += [json.loads(line)["text"] for line in lines]
    for start in range(0, len(texts), 1000):
        batch = texts[start : start + 1000]
        asked = {"add_special_tokens": False, "split_special_tokens": True}
        parts += [numpy.array(ids, "<u4") for ids in tokenizer(batch, **asked).input_ids]
    folder = Path(settings["reference"])
    folder.mkdir(exist_ok=True)
    numpy.save(folder / "tokens.npy", numpy.concatenate(parts))
    numpy.save(folder / "ends.npy", numpy.cumsum([len(part) for part in parts]))


PEERS = {"ours": ours, "datatrove": datatrove, "megatron": megatron, "datasets": datasets}


def main() -> None:
    """One pass of one peer."""
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    if name == "transformers":
        return write_reference(settings)
    run, ids = PEERS[name](settings)
    print("READY", flush=True)
    sys.stdin.readline()
    start, used = time.perf_counter(), _cpu_seconds()
    run()
    figures = {"seconds": time.perf_counter() - start, "cpu": _cpu_seconds() - used}
    print("DONE", flush=True)  # what comes now is no part of its memory
    sys.stdin.readline()
    if settings.get("reference"):
        figures |= num_differing(ids(), Path(settings["reference"]))
    print("RESULT " + json.dumps(figures), flush=True)
    return None


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
