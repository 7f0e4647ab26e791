"""Rows a second of the training loader on chat rows, of one or several checkouts side by side.

python benchmarks/loader_rows.py --trees . /path/to/other/checkout --rows 2000 --rounds 5

Each checkout has a process of its own for each way to load (plain, sorted by length, packed; 1 and
2 workers). The processes of a way take turns, in another order each round, so that a busy machine
is as busy for all; CPU seconds are counted too, with those of the workers. A pass is one epoch, the
start of the workers included. Prints a table in Markdown.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from preprocessing import ROOT, write_rows

WAYS = {"plain": {"order": "given"}, "sorted": {}, "packed": {"packing": 2048}}


def work(file: str, way: str, num_workers: int) -> None:
    """An epoch for each line of the input; the checkout is on the path."""
    import functools

    from dataset import sft
    from prompt_fn import chat, none
    from stageline.data.batches.loader import MicroBatchLoader
    from stageline.data.rows.json_lines import JsonLines
    from tests.helpers.tiny_models import tiny_tokenizer

    collate = functools.partial(
        sft,
        prompt="",
        prompt_fn=chat,
        image_token=none,
        processor=tiny_tokenizer(),
        pad_token_id=0,
        max_token_num=2048,
        overlong="drop",
        stage=1,
        num_stages=2,
    )
    dataset = JsonLines(dataset_path=file, test_size=0)
    collate([dataset[0], dataset[1]])  # what is kept of a chat template, workers inherit
    options = {"batch_size": 32, "micro_batch_size": 4, "num_workers": num_workers, **WAYS[way]}
    for _ in sys.stdin:
        start, used = time.perf_counter(), _cpu_seconds()
        loader = MicroBatchLoader(dataset, collate=collate, **options)
        steps = iter(loader)
        for _ in range(len(loader)):
            next(steps)
        seconds = time.perf_counter() - start
        count = 32 * len(loader)
        del steps, loader  # the workers end
        print(f"RESULT {count / seconds} {count / (_cpu_seconds() - used)}", flush=True)


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def start(tree: str, file: Path, way: str, num_workers: int) -> subprocess.Popen:
    """A process that loads with the code of a checkout."""
    environment = {**os.environ, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    code = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import loader_rows as it;"
    code += f"it.work({str(file)!r}, {way!r}, {num_workers})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tree,
    )


def ask(process: subprocess.Popen) -> tuple[float, float]:
    """Rows a second of one pass, and rows a CPU second."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("RESULT "):
            _, rate, by_cpu = line.split()
            return float(rate), float(by_cpu)
    raise SystemExit("a process ended early")


def compare(trees: list[str], file: Path, way: str, num_workers: int, rounds: int) -> None:
    """One line of the table for each checkout."""
    processes = [start(tree, file, way, num_workers) for tree in trees]
    for process in processes:
        ask(process)  # imports and caches
    results: list[list[tuple[float, float]]] = [[] for _ in trees]
    for number in range(rounds):
        for place in range(len(trees)):
            index = (number + place) % len(trees)
            results[index].append(ask(processes[index]))
    for process in processes:
        process.communicate()
    for tree, found in zip(trees, results, strict=True):
        rates, by_cpu = zip(*found, strict=True)
        pairs = list(zip(found, results[-1], strict=True))
        shares = [statistics.median(own[n] / base[n] for own, base in pairs) for n in range(2)]
        print(
            f"| {way} | {num_workers} | {Path(tree).name} | {statistics.median(rates):.0f} "
            f"| {min(rates):.0f} - {max(rates):.0f} | {statistics.median(by_cpu):.0f} "
            f"| {shares[0]:.2f} | {shares[1]:.2f} |",
            flush=True,
        )


def main() -> None:
    """Makes the rows, and lets the checkouts take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", nargs="+", default=[str(ROOT)], help="checkouts; the last: base")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    arguments = parser.parse_args()
    trees = [str(Path(tree).resolve()) for tree in arguments.trees]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]}")
    print(
        "\n| way | workers | checkout | rows/s | of the rounds | rows a CPU second "
        "| to the last checkout | by CPU time |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.jsonl"
        write_rows(file, arguments.rows)
        for num_workers in arguments.workers:
            for way in arguments.ways:
                compare(trees, file, way, num_workers, arguments.rounds)
    print(f"\nload at the end: {os.getloadavg()[0]}")


if __name__ == "__main__":
    main()
