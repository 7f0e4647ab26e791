"""From text to token files, beside datatrove, Megatron-core and datasets; random reads; padding.

python benchmarks/corpus_text.py                     # once: gathers the text
python benchmarks/corpus.py --peers-python /tmp/peers/bin/python

The peers have a Python of their own, that of this project with these beside it:

    python -m venv --without-pip /tmp/peers
    echo "$(python -c 'import site; print(site.getsitepackages()[0])')" \
        > /tmp/peers/lib/python3.11/site-packages/project.pth
    pip --python /tmp/peers/bin/python install --no-deps \
        datatrove==0.10.1 megatron-core==0.16.1 humanize loguru orjson

All work in turn on the same text with the same tokenizer, in another order each round; what is
timed begins after the imports, and ends when the files are written. TOKENIZERS_PARALLELISM is off:
a worker is a core. Prints tables in Markdown. Some ten minutes on two cores.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import corpus_tables
from corpus_process import Process

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("ours", "datatrove", "megatron", "datasets")
READERS = ("ours", "megatron", "pyarrow", "datasets")
_PARTS = ("speed", "memory", "padding", "reads")
_SHORT = ("dict-", "fortunes")


class Bench:
    """The text, the folders, and how a peer is run."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self._sizes: dict[Path, float] = {}
        there = Path(arguments.peers_python).exists()
        self.peers = [name for name in PEERS if there or name == "ours"]
        self.readers = [name for name in READERS if there or name != "megatron"]

    def text(
        self, language: str, megabytes: float, *, num_parts: int = 1, long: bool = False
    ) -> list[Path]:
        """Files with the first documents of a language: as many bytes of text as asked for."""
        folder = self.folder / f"{language}-{megabytes:g}-{num_parts}{'-long' * long}"
        files = [folder / f"{part}.jsonl" for part in range(num_parts)]
        if folder.exists():
            return files
        folder.mkdir()
        rest, rows = megabytes * 1e6, []
        with open(Path(self.arguments.text) / f"{language}.jsonl", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if rest <= 0:
                    break
                if not (long and row["id"].startswith(_SHORT)):
                    rows.append(line)
                    rest -= len(row["text"].encode())
        for number, file in enumerate(files):
            some = rows[number * len(rows) // num_parts : (number + 1) * len(rows) // num_parts]
            file.write_text("".join(some), encoding="utf-8")
        self._sizes[files[0]] = megabytes * 1e6 - rest
        return files

    def size_of(self, files: list[Path]) -> float:
        """Bytes of text in them."""
        return self._sizes[files[0]]

    def settings(self, megabytes: float, workers: int) -> dict:
        """What a peer is told."""
        parts = self.text("english", megabytes, num_parts=workers)
        return {
            "files": [str(file) for file in self.text("english", megabytes)],
            "parts": str(parts[0].parent),
            "workers": workers,
            "tokenizer": str(Path(self.arguments.tokenizer).resolve()),
            "eos": self.eos(),
        }

    def eos(self) -> str:
        """The tokenizer's EOS."""
        config = Path(self.arguments.tokenizer) / "tokenizer_config.json"
        token = json.loads(config.read_text())["eos_token"]
        return token if isinstance(token, str) else token["content"]

    def run(self, name: str, settings: dict, *, script: str, is_measured: bool = False) -> dict:
        """One pass of a peer in a folder of its own."""
        own = name in ("ours", "transformers", "pyarrow")
        python = sys.executable if own else self.arguments.peers_python
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            settings = {"folder": folder, **settings}
            process = Process([python, str(ROOT / "benchmarks" / script), name], settings)
            return process.run(is_measured=is_measured)


def speed(bench: Bench) -> None:
    """MB/s and tokens/s with 1 and 2 workers; ids beside those of transformers."""
    given = bench.arguments
    settings = bench.settings(given.megabytes, 1)
    reference = str(bench.folder / "reference")
    bench.run("transformers", settings | {"reference": reference}, script="corpus_workers.py")
    size = bench.size_of(bench.text("english", given.megabytes))
    for workers in given.workers:
        results: dict[str, list[dict]] = {name: [] for name in bench.peers}
        settings = bench.settings(given.megabytes, workers)
        for number in range(given.rounds):
            start = number % len(bench.peers)
            for name in bench.peers[start:] + bench.peers[:start]:
                # ids are compared once; a peer with files of its own order: in its parts' order
                told = settings | ({"reference": reference} if number == 0 else {})
                results[name].append(bench.run(name, told, script="corpus_workers.py"))
        corpus_tables.print_speed(results, size, workers)


def memory(bench: Bench) -> None:
    """Most memory at a time, of all processes of a peer, on 1x and 4x the text."""
    size = bench.arguments.megabytes
    peaks = {}
    for name in bench.peers:
        for megabytes in (size / 4, size, size * 4):
            if name == "ours" or megabytes <= size:
                settings = bench.settings(megabytes, 2)
                done = bench.run(name, settings, script="corpus_workers.py", is_measured=True)
                peaks[name, megabytes] = done
    corpus_tables.print_memory(peaks)


def padding(bench: Bench) -> None:
    """The shares of padding at 1,024 by the way of filling rows."""
    given = bench.arguments
    texts = {
        "English": bench.text("english", given.megabytes),
        "English, no dictionaries": bench.text("english", given.megabytes, long=True),
        "Chinese": bench.text("chinese", given.megabytes),
    }
    for name, files in texts.items():
        language = "chinese" if name == "Chinese" else "english"
        settings = {"files": [str(file) for file in files], "workers": 2, "language": language}
        settings["tokenizer"] = given.tokenizer
        folder = bench.folder / f"padding-{name}"
        folder.mkdir()
        bench.run("ours", settings | {"folder": str(folder)}, script="corpus_workers.py")
        corpus_tables.add_padding(name, folder / "ours")
    corpus_tables.print_padding()


def reads(bench: Bench) -> None:
    """Random reads of a million samples."""
    given = bench.arguments
    source = bench.folder / "source"
    source.mkdir()
    settings = bench.settings(min(given.megabytes, 50), 2)
    bench.run("ours", settings | {"folder": str(source)}, script="corpus_workers.py")
    made = {"folder": str(bench.folder), "source": str(source / "ours"), "samples": given.reads}
    maker = bench.arguments.peers_python if "megatron" in bench.peers else sys.executable
    Process([maker, str(ROOT / "benchmarks/corpus_reads.py"), "make"], made).run()
    results: dict[str, list[dict]] = {name: [] for name in bench.readers}
    for _ in range(2):
        for name in bench.readers:
            if name != "datasets" or not results[name]:
                told = {"folder": str(bench.folder), "reads": given.reads}
                results[name].append(bench.run(name, told, script="corpus_reads.py"))
    corpus_tables.print_reads(results)


def main() -> None:
    """All parts, in one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default=str(ROOT / ".cache/corpus-text"))
    parser.add_argument("--tokenizer", default=str(ROOT / ".cache/smollm2"))
    parser.add_argument("--peers-python", default="/tmp/peers/bin/python")
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--parts", nargs="+", default=list(_PARTS), choices=_PARTS)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {load:.2f}")
    with tempfile.TemporaryDirectory(dir=arguments.text) as folder:
        bench = Bench(arguments, Path(folder))
        for part in arguments.parts:
            globals()[part](bench)
    print(f"\nload at the end: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
