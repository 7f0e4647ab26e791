"""Pipelined decoding against the other ways to answer with one model on two devices, in turn.

SmolLM2-135M in memory, two processes with one thread each on gloo (continuous batching: one process
with two threads), the same prompts for all; each way's tokens must be those of the library's
generate. Reading prompts (prefill) and decoding are timed apart: decoding is what an answer of
1 + N tokens takes beyond an answer of one token. Figures: benchmarks/decoding_cpu_DATE.md.
Usage: decoding.py [--model FOLDER] [--dtype bfloat16] [--quick] [--only WAY ...] [--out FILE]
"""

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "2"  # of the process for itself; ranks then take one
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import decoding_tables
import decoding_ways as ways
import torch
import torch.distributed as dist
from decoding_ours import OurStage
from torch import Tensor
from transformers import AutoTokenizer

from stageline.checkpoint.load import quiet

ROOT = Path(__file__).resolve().parents[1]
NAIVE, REPLICAS, LIBRARY = "naive", "two replicas", "transformers pp_size=2"
CONTINUOUS, OURS = "transformers continuous batching", "ours"
FIXED = {f"ours, {count} group{'s' * (count > 1)}": count for count in (1, 2, 4)}
WHOLE = "ours, prompts whole"  # the engine without pieces: what they gain
WAYS = (NAIVE, LIBRARY, CONTINUOUS, REPLICAS, OURS, WHOLE, *FIXED)
LONG = ((1, 1500), (4, 512), (4, 64))  # rows, tokens
LEAST_MARGIN = 2e-3  # between the best two logits: rounding moves them by 1e-4


@dataclass(frozen=True)
class Case:
    """What is asked: `num_rows` prompts of `length` tokens, answers of `num_tokens`."""

    phase: str
    num_rows: int
    length: int
    num_tokens: int
    rounds: int


@dataclass(frozen=True)
class Timing:
    """One call of a way on one process: when it began and ended, and the processor's seconds."""

    began: float
    ended: float
    busy: float


def cases(is_quick: bool) -> list[Case]:
    """Decoding after short prompts, and prompts with an answer of one token."""
    found = []
    for rows in (1, 4, 16) if is_quick else (1, 2, 4, 8, 16, 32, 64):
        decode_rounds = 1 if is_quick else (3 if rows <= 8 else 2)
        num_tokens = 8 if is_quick or rows > 16 else 12
        found.append(Case("decode", rows, 8, num_tokens, decode_rounds))
        found.append(Case("prefill", rows, 64, 1, 1 if is_quick or rows > 16 else 2))
    long = [Case("long", rows, length, 1, 1 if is_quick else 3) for rows, length in LONG]
    return found + long


# -- the processes ---------------------------------------------------------------------------


def run_process(
    pipe: Connection, rank: int | None, arguments: argparse.Namespace, folder: str
) -> None:
    """Makes this process's ways and calls them as it is told. `rank` None: the one for itself."""
    torch.set_num_threads(2 if rank is None else 1)
    try:
        with torch.inference_mode():
            if rank is not None:
                store = f"file://{folder}/store"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
            made = make_ways(rank, arguments)
            pipe.send("ready")
            _serve(pipe, made, rank)
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
    finally:
        os._exit(0)  # managers of the library keep threads that wait


def make_ways(rank: int | None, arguments: argparse.Namespace) -> dict[str, ways.Way]:
    """What this process takes part in."""
    model, dtype = Path(arguments.model), getattr(torch, arguments.dtype)
    with quiet():
        if rank is None:
            replica = ways.load(model, dtype)
            made = {"reference": lambda *asked: ways.reference(replica, *asked)}
            if CONTINUOUS in arguments.only:
                made[CONTINUOUS] = ways.ContinuousBatching(model, dtype)
            return made
        makers = {
            NAIVE: lambda: ways.Naive(model, dtype, rank=rank, cut=arguments.cut),
            LIBRARY: lambda: ways.LibraryPipeline(model, dtype, rank=rank),
            REPLICAS: lambda: ways.Replica(model, dtype, rank=rank, num_ranks=2),
        }
        made = {name: make() for name, make in makers.items() if name in arguments.only}
        settings = {OURS: None, **FIXED}
        if any(name in arguments.only for name in (*settings, WHOLE)):
            stage = OurStage(model, dtype, rank=rank, cut=arguments.cut)
            ours = {name: stage.way(count) for name, count in settings.items()}
            ours[WHOLE] = stage.way(None, cuts=False)
            made.update(ours)
        return made


def _serve(pipe: Connection, made: dict[str, ways.Way], rank: int | None) -> None:
    while (asked := pipe.recv()) is not None:
        name, ids_BT, num_tokens = asked
        gc.collect()
        if rank is not None:
            dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        answers = made[name](ids_BT, num_tokens)
        timing = Timing(began, time.perf_counter(), time.process_time() - busy)
        pipe.send((answers, timing))


class Processes:
    """Two ranks and a process for itself, which wait until they are asked."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("fork")
        self.pipes: dict[int | None, Connection] = {}
        for rank in (0, 1, None):
            self.pipes[rank], child = context.Pipe()
            given = (child, rank, arguments, self._folder.name)
            context.Process(target=run_process, args=given, daemon=True).start()
            child.close()
        for pipe in self.pipes.values():
            self._receive(pipe)

    def ask(self, name: str, ids_BT: Tensor, num_tokens: int) -> tuple[list, list[Timing]]:
        """What each process that takes part answers, and its timing."""
        alone = name in (CONTINUOUS, "reference")
        members = [self.pipes[None]] if alone else [self.pipes[0], self.pipes[1]]
        for pipe in members:
            pipe.send((name, ids_BT, num_tokens))
        found = [self._receive(pipe) for pipe in members]
        return [answers for answers, _ in found], [timing for _, timing in found]

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.send(None)
        self._folder.cleanup()

    @staticmethod
    def _receive(pipe: Connection) -> object:
        found = pipe.recv()
        if isinstance(found, str) and found != "ready":
            raise SystemExit(found)
        return found


# -- the measurement -------------------------------------------------------------------------


class Measurement:
    """Calls the ways in turn, compares their tokens, and keeps seconds and busy shares."""

    def __init__(self, processes: Processes, arguments: argparse.Namespace) -> None:
        self.processes, self.arguments = processes, arguments
        self.is_exact = arguments.dtype == "float32"

    def prompts(self, case: Case) -> tuple[Tensor, ways.Answers]:
        """Prompts from a text of this repository whose answers are far from ties."""
        tokenizer = AutoTokenizer.from_pretrained(self.arguments.model)
        files = [ROOT / name for name in ("README.md", "CHANGELOG.md")]
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
        spare = 1 if case.phase == "long" else case.num_rows // 4 + 4
        candidates = ids.unfold(0, case.length, case.length + 3)[: case.num_rows + spare]
        (found,), _ = self.processes.ask("reference", candidates, 1 + case.num_tokens)
        answers, margins = found
        kept = [row for row, margin in enumerate(margins) if margin > LEAST_MARGIN]
        kept = (kept if self.is_exact else list(range(len(margins))))[: case.num_rows]
        assert len(kept) == case.num_rows, "too few prompts without near ties"
        return candidates[kept], {place: answers[row] for place, row in enumerate(kept)}

    def call(self, name: str, ids_BT: Tensor, num_tokens: int, expected: ways.Answers) -> dict:
        """One call: seconds, busy shares, and the share of tokens that are as expected."""
        answers, timings = self.processes.ask(name, ids_BT, num_tokens)
        seconds = max(one.ended for one in timings) - min(one.began for one in timings)
        merged = {row: ids for part in answers for row, ids in part.items()}
        wanted = {row: ids[:num_tokens] for row, ids in expected.items()}
        assert sorted(merged) == sorted(wanted), f"{name} answered rows {sorted(merged)}"
        assert not self.is_exact or merged == wanted, f"{name} chose other tokens: {merged}"
        pairs = [
            found == right
            for row in wanted
            for found, right in zip(merged[row], wanted[row], strict=True)
        ]
        return {
            "seconds": seconds,
            "busy": [one.busy / seconds for one in timings],
            "equal": sum(pairs) / len(pairs),
        }

    def case(self, case: Case) -> dict[str, dict]:
        """Way -> tokens a second, busy shares, share of equal tokens; medians of all rounds."""
        ids_BT, expected = self.prompts(case)
        rounds: dict[str, list[dict]] = {name: [] for name in self.arguments.only}
        for number in range(case.rounds):
            order = self.arguments.only if number % 2 == 0 else self.arguments.only[::-1]
            for name in order:
                if case.phase != "decode" and name in FIXED:
                    continue  # how prompts are read does not depend on it
                if number == 0 and case.num_rows <= 16 and case.phase != "long":
                    self.call(name, ids_BT, 1, expected)
                rounds[name].append(self._once(name, case, ids_BT, expected))
        return {name: _medians(found) for name, found in rounds.items() if found}

    def _once(self, name: str, case: Case, ids_BT: Tensor, expected: ways.Answers) -> dict:
        first = self.call(name, ids_BT, 1, expected)
        if case.phase != "decode":
            return {"rate": ids_BT.numel() / first["seconds"], **first}
        whole = self.call(name, ids_BT, 1 + case.num_tokens, expected)
        seconds = whole["seconds"] - first["seconds"]
        pairs = zip(whole["busy"], first["busy"], strict=True)
        busy = [(a * whole["seconds"] - b * first["seconds"]) / seconds for a, b in pairs]
        rate = len(ids_BT) * case.num_tokens / seconds
        return {"rate": rate, "seconds": seconds, "busy": busy, "equal": whole["equal"]}


def _medians(rounds: list[dict]) -> dict:
    median = statistics.median
    return {
        "rate": median(one["rate"] for one in rounds),
        "rates": [round(one["rate"], 2) for one in rounds],
        "busy": [round(median(values), 3) for values in zip(*(one["busy"] for one in rounds))],
        "equal": min(one["equal"] for one in rounds),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / ".cache" / "smollm2"))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="few batches, one round")
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--cut", type=int, default=17, help="layers of the first stage")
    parser.add_argument("--batches", type=int, nargs="*", help="only these batch sizes")
    parser.add_argument("--phases", nargs="*", default=["decode", "prefill"])
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    began = time.perf_counter()
    processes = Processes(arguments)
    measurement, results = Measurement(processes, arguments), []
    for case in cases(arguments.quick):
        if case.phase not in arguments.phases:
            continue
        if arguments.batches and case.num_rows not in arguments.batches:
            continue
        found = {**asdict(case), "ways": measurement.case(case)}
        results.append(found)
        print(decoding_tables.line(found), file=sys.stderr, flush=True)
    processes.close()
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))
    print(decoding_tables.tables(results, dtype=arguments.dtype))
    print(f"{time.perf_counter() - began:.0f} seconds in all", file=sys.stderr)


if __name__ == "__main__":
    main()
