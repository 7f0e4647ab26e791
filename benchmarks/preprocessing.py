"""Rows a second from a file of conversations to ids and labels, beside LLaMA-Factory and TRL.

python benchmarks/preprocessing.py --tokenizer .cache/smollm2 --rows 20000 --rounds 5 \
    --llamafactory-python /tmp/lf/bin/python

Each peer is a process that stays; they work in turn on the same file, in another order each round,
so that a busy machine is as busy for all; CPU seconds are counted too, with those of the processes
that a peer starts. Peers that are not there are left out. Ours reads,
converts, renders by the chat template and labels each row, as a training run does before the first
step; the others do what their trainers do: LLaMA-Factory's get_dataset, TRL's _prepare_dataset with
assistant_only_loss. Prints a table in Markdown.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("preprocessing_workers.py")
ROWS = ROOT / "data/manpages_instruct.jsonl"
PEERS = ("ours", "llamafactory", "trl")


def write_rows(path: Path, count: int) -> None:
    """Conversations of one turn and of three, in equal parts; no two are the same."""
    known = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            messages = []
            for turn in range(1 + 2 * (number % 2)):
                row = known[(number * 7 + turn * 13) % len(known)]
                asked = f"{row['question']} (question {number})"
                messages.append({"role": "user", "content": asked})
                messages.append({"role": "assistant", "content": f"{row['answer']} [{number}]"})
            file.write(json.dumps({"messages": messages}) + "\n")


class Peer:
    """A process that preprocesses the file each time it is asked to."""

    def __init__(self, name: str, python: str, settings: dict[str, Any], folder: Path) -> None:
        self.name = name
        self.results: list[dict[str, float]] = []
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(folder / f"cache-{name}-{settings['processes']}"),
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }
        self._errors = (folder / f"{name}.txt").open("w+")
        self._process = subprocess.Popen(
            [python, str(WORKER), name, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def go(self) -> dict[str, float]:
        """One pass over the file: seconds, rows, tokens, supervised tokens."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its errors are told below
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self._errors.seek(0)
        raise SystemExit(f"{self.name} ended:\n{self._errors.read()[-2000:]}")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def make_peers(arguments: argparse.Namespace, settings: dict[str, Any], folder: Path) -> list[Peer]:
    pythons = {"ours": sys.executable, "llamafactory": arguments.llamafactory_python}
    if importlib.util.find_spec("trl") is not None:
        pythons["trl"] = sys.executable
    return [
        Peer(name, pythons[name], settings, folder)
        for name in PEERS
        if pythons.get(name) and name in arguments.peers
    ]


def compare(arguments: argparse.Namespace, processes: int, folder: Path) -> None:
    settings = {
        "file": str(folder / "rows.jsonl"),
        "tokenizer": str(Path(arguments.tokenizer).resolve()),
        "processes": processes,
    }
    peers = make_peers(arguments, settings, folder)
    for peer in peers:
        peer.go()  # imports, caches, and the first read of the file
    for number in range(arguments.rounds):
        start = number % len(peers)
        for peer in peers[start:] + peers[:start]:
            peer.results.append(peer.go())
    for peer in peers:
        peer.close()
    print_table(peers, processes)


def print_table(peers: list[Peer], processes: int) -> None:
    print(f"\n{processes} process{'es' if processes > 1 else ''}:\n")
    print(
        "| peer | rows/s | of the rounds | tokens/s | rows a CPU second | tokens | learnt "
        "| ours is faster by | by CPU time |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for peer in peers:
        rates = [result["rows"] / result["seconds"] for result in peer.results]
        by_cpu = [result["rows"] / result["cpu"] for result in peer.results]
        last = peer.results[-1]
        print(
            f"| {peer.name} | {statistics.median(rates):.0f} | {min(rates):.0f} - {max(rates):.0f} "
            f"| {statistics.median(rates) * last['tokens'] / last['rows']:.0f} "
            f"| {statistics.median(by_cpu):.0f} | {last['tokens']:.0f} | {last['targets']:.0f} "
            f"| {ratios(peers[0], peer, 'seconds')} | {ratios(peers[0], peer, 'cpu')} |"
        )


def ratios(ours: Peer, theirs: Peer, what: str) -> str:
    """Median and range over the rounds of what a peer took to what ours took."""
    pairs = zip(ours.results, theirs.results, strict=True)
    found = [their[what] / our[what] for our, their in pairs]
    return f"{statistics.median(found):.2f} ({min(found):.2f} - {max(found):.2f})"


def main() -> None:
    """Makes the file, and lets the peers take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default=str(ROOT / ".cache/smollm2"))
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--llamafactory-python", help="a Python that has llamafactory")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]}")
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name) / "rows.jsonl", arguments.rows)
        for processes in arguments.processes:
            compare(arguments, processes, Path(name))
    print(f"\nload at the end: {os.getloadavg()[0]}")


if __name__ == "__main__":
    main()
