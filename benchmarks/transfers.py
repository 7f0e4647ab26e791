"""What slow transfers cost a step: two trees of this repository in turn, sleeping stages, on gloo.

A transfer takes `--delay-ms` from the moment at which both ranks have posted it, on no core
(tests/helpers/late_transfers.py). `one`: all transfers of a rank come one after the other, as in
one NCCL group, which was the engine's way; `direction`: those of each direction between two ranks
do, as in groups of their own, which is its way now, and about what gloo does.
Each pass of a stage sleeps (benchmarks/schedules.py), so four ranks fit on two cores.
Figures: benchmarks/transfers_cpu_DATE.md. Usage:

    git worktree add /tmp/before COMMIT
    python benchmarks/transfers.py --before /tmp/before [--ranks 2,4] [--delay-ms 5] [--pass-ms 10]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parents[1]
NUM_MICRO_BATCHES = {2: 8, 4: 16}
NAMES = "gpipe,1f1b,eager_1f1b,interleaved_1f1b,interleaved_zero_bubble,zbv"


def measure(rank: int, options, names: list[str]) -> dict[str, list[float]]:
    """Seconds of each step of each schedule, from its common start to this rank's end."""
    import schedules
    import torch
    import torch.distributed as dist
    from late_transfers import late_transfers

    from stageline.pipeline.runner import PipelineRunner
    from stageline.pipeline.schedules import make_schedule

    num_ranks = dist.get_world_size()

    def stream_of(is_send, peer, group):
        return "all" if options.streams == "one" else is_send_to(rank, is_send, peer)

    seconds = {}
    for name in names:
        schedule = make_schedule(name, num_ranks=num_ranks)
        per_pass = options.pass_ms / 1000 / (schedule.num_stages // num_ranks)
        stages = [
            schedules.SleepStage(
                index, schedule.num_stages, seconds=per_pass, alive=schedules.Alive()
            )
            for index in schedule.stages_of(rank)
        ]
        runner = PipelineRunner(stages, device=torch.device("cpu"), schedule=schedule)
        ids = torch.zeros(1, schedules.TOKENS["sleep"], dtype=torch.long)
        batches = [{"input_ids": ids} for _ in range(NUM_MICRO_BATCHES[num_ranks])]
        took = seconds[name] = []
        for _ in range(options.steps + 1):  # the first one warms up
            start = torch.tensor(time.perf_counter() + 0.02, dtype=torch.float64)
            dist.broadcast(start, 0)
            with late_transfers(lambda: options.delay_ms / 1000, stream_of=stream_of):
                time.sleep(max(0.0, start.item() - time.perf_counter()))
                runner.step(batches, loss_fn=lambda output, batch: output.sum())
                took.append(time.perf_counter() - start.item())
            dist.barrier()
    return {name: took[1:] for name, took in seconds.items()}


def is_send_to(rank: int, is_send: bool, peer: int) -> tuple[int, int]:
    """The channel of a transfer: (from, to)."""
    return (rank, peer) if is_send else (peer, rank)


def work(options) -> None:
    """One round of one tree; its own engine, this tree's delays."""
    sys.path[:0] = [str(options.tree), str(options.tree / "benchmarks")]
    sys.path.append(str(HERE / "tests" / "helpers"))
    from stageline.pipeline.schedules import SCHEDULES
    from tests.helpers.ranks import run_ranks

    names = [name for name in options.schedules.split(",") if name in SCHEDULES]
    results = run_ranks(measure, int(options.ranks), options, names, timeout=600)
    longest = {n: [max(step) for step in zip(*(r[n] for r in results))] for n in names}
    print(json.dumps(longest))


def ideal(name: str, num_ranks: int, options) -> float:
    """Seconds of a step in which only the passes, and transfers beside them, take time."""
    sys.path[:0] = [str(HERE)]
    from stageline.pipeline.schedules import make_schedule
    from stageline.planner.simulate import simulate

    schedule = make_schedule(name, num_ranks=num_ranks)
    one = options.pass_ms / 1000 / (schedule.num_stages // num_ranks)
    times = {(stage, kind): one for stage in range(schedule.num_stages) for kind in "FIW"}
    orders = schedule.orders(NUM_MICRO_BATCHES[num_ranks])
    delay = options.delay_ms / 1000
    return simulate(orders, times, num_stages=schedule.num_stages, hand_over=delay).seconds


def run_round(tree: Path, ranks: str, streams: str, options) -> dict[str, list[float]]:
    words = ["--tree", tree, "--ranks", ranks, "--streams", streams, "--steps", options.steps]
    words += ["--delay-ms", options.delay_ms, "--pass-ms", options.pass_ms]
    command = [sys.executable, __file__, *map(str, words), "--schedules", options.schedules]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="folder of the other tree")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each round, schedule and tree")
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--pass-ms", type=float, default=10.0, help="of a rank's layers, forward")
    parser.add_argument("--schedules", default=NAMES)
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--streams", default="one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tree:
        work(options)
        return
    ways = {"now, direction": (HERE, "direction")}
    if options.before:
        ways = {
            "before, one": (options.before, "one"),
            "before, direction": (options.before, "direction"),
            **ways,
        }
    print(f"| ranks | schedule | {' | '.join(ways)} | ideal |\n" + "|---" * (len(ways) + 3) + "|")
    for ranks in options.ranks.split(","):
        found: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
        for _ in range(options.rounds):
            for way, (tree, streams) in ways.items():
                for name, took in run_round(tree, ranks, streams, options).items():
                    found[way].setdefault(name, []).extend(took)
        for name in options.schedules.split(","):
            cells = [
                f"{1000 * statistics.median(took):.0f} ({1000 * min(took):.0f})"
                if (took := found[way].get(name))
                else "-"
                for way in ways
            ]
            cells.append(f"{1000 * ideal(name, int(ranks), options):.0f}")
            print(f"| {ranks} | {name} | {' | '.join(cells)} |", flush=True)
    print(f"load of the machine at the end: {os.getloadavg()}")


if __name__ == "__main__":
    main()
