"""Random reads out of a million samples: ours, Megatron-core's reader, and Arrow in two ways.

Run as `python corpus_reads.py NAME SETTINGS` by corpus.py; NAME `make` writes the files. Each read
gives an int64 tensor of torch. Says RESULT with milliseconds to open, seconds, and a sum of the
tokens read, which must be the same for all.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

ROOT = Path(__file__).resolve().parents[1]
Read = Callable[[int], torch.Tensor]
_SAMPLES_A_CHUNK = 20_000


def make(settings: dict[str, Any]) -> None:
    """The segments of a corpus again and again, as a corpus, a pair of Megatron's and Arrow."""
    sys.path.insert(0, str(ROOT))
    import pyarrow

    from stageline.corpus.corpus_files import Corpus
    from stageline.corpus.header import Segments
    from stageline.corpus.writer import CorpusWriter

    source, folder = Corpus(settings["source"]), Path(settings["folder"])
    header, lengths = source.header, source.lengths()
    dtype = numpy.dtype(header.dtype).newbyteorder("<")
    tokens = numpy.fromfile(f"{settings['source']}.bin", dtype)
    many = Segments(tokens.astype("u4"), lengths, numpy.array(source.flags()))
    writer = CorpusWriter(
        folder / "reads",
        tokenizer=header.tokenizer,
        rules=header.rules,
        language=header.language,
        overwrite=True,
    )
    rows = pyarrow.list_(pyarrow.int32())
    schema = pyarrow.schema([("input_ids", rows)])
    with pyarrow.OSFile(str(folder / "reads.arrow"), "wb") as file:
        with pyarrow.ipc.new_stream(file, schema) as out:
            for _ in range(-(-settings["samples"] // len(lengths))):
                writer.add(many)
                _write_arrow(out, tokens, lengths, rows)
    writer.close()
    _write_megatron(folder)


def _write_arrow(out: Any, tokens: numpy.ndarray, lengths: numpy.ndarray, rows: Any) -> None:
    import pyarrow

    ends = numpy.append(0, numpy.cumsum(lengths))
    for start in range(0, len(lengths), _SAMPLES_A_CHUNK):
        stop = min(start + _SAMPLES_A_CHUNK, len(lengths))
        values = pyarrow.array(tokens[ends[start] : ends[stop]].astype("i4"))
        offsets = pyarrow.array((ends[start : stop + 1] - ends[start]).astype("i4"))
        column = pyarrow.ListArray.from_arrays(offsets, values, type=rows)
        out.write_batch(pyarrow.record_batch([column], names=["input_ids"]))


def _write_megatron(folder: Path) -> None:
    """An index of Megatron-core's for the same .bin, which both have alike."""
    from megatron.core.datasets import indexed_dataset

    from stageline.corpus.corpus_files import Corpus

    lengths = Corpus(folder / "reads").lengths()
    link = folder / "megatron.bin"
    link.unlink(missing_ok=True)
    link.hardlink_to(folder / "reads.bin")
    with indexed_dataset._IndexWriter(str(folder / "megatron.idx"), numpy.uint16) as writer:
        writer.write(lengths.tolist(), None, list(range(len(lengths) + 1)))


def ours(folder: Path) -> tuple[int, Read]:
    """Corpus[i]."""
    sys.path.insert(0, str(ROOT))
    from stageline.corpus.corpus_files import Corpus

    corpus = Corpus(folder / "reads")
    return len(corpus), lambda place: torch.from_numpy(corpus[place])


def megatron(folder: Path) -> tuple[int, Read]:
    """IndexedDataset[i], mapped."""
    import warnings

    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(folder / "megatron"))
    return len(dataset), lambda place: torch.from_numpy(dataset[place].astype(numpy.int64))


def datasets(folder: Path) -> tuple[int, Read]:
    """Dataset[i] of Hugging Face."""
    from datasets import Dataset

    dataset = Dataset.from_file(str(folder / "reads.arrow"))
    return len(dataset), lambda place: torch.tensor(dataset[place]["input_ids"])


def pyarrow(folder: Path) -> tuple[int, Read]:
    """The Arrow file by hand: offsets and values of each chunk as numpy views."""
    import pyarrow as library

    source = library.memory_map(str(folder / "reads.arrow"))
    table = library.ipc.open_stream(source).read_all()
    chunks = table.column("input_ids").chunks
    offsets = [chunk.offsets.to_numpy() for chunk in chunks]
    values = [chunk.values.to_numpy() for chunk in chunks]
    firsts = numpy.cumsum([0, *(len(chunk) for chunk in chunks)])

    def read(place: int) -> torch.Tensor:
        chunk = int(numpy.searchsorted(firsts, place, side="right")) - 1
        inner = place - int(firsts[chunk])
        start, stop = offsets[chunk][inner], offsets[chunk][inner + 1]
        return torch.from_numpy(values[chunk][start:stop].astype(numpy.int64))

    return table.num_rows, read


READERS = {"ours": ours, "megatron": megatron, "datasets": datasets, "pyarrow": pyarrow}


def main() -> None:
    """Reads `reads` samples in a random order."""
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    if name == "make":
        return make(settings)
    folder = Path(settings["folder"])
    READERS[name](folder)  # imports are no part of what is timed
    start = time.perf_counter()
    num_samples, read = READERS[name](folder)
    opened = time.perf_counter() - start
    order = numpy.random.default_rng(0).permutation(num_samples)[: settings["reads"]].tolist()
    print("READY", flush=True)
    sys.stdin.readline()
    start, num_tokens = time.perf_counter(), 0
    for place in order:
        num_tokens += len(read(place))
    seconds = time.perf_counter() - start
    print("DONE", flush=True)
    sys.stdin.readline()
    figures = {"open_ms": opened * 1e3, "seconds": seconds, "reads": len(order)}
    figures["tokens"] = num_tokens
    figures["sum"] = sum(int(read(place).sum()) for place in order[:1000])
    print("RESULT " + json.dumps(figures), flush=True)
    return None


if __name__ == "__main__":
    main()
