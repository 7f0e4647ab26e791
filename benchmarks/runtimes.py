"""Time and peak bytes of a step: our plan on torch's runtime, torch's own schedule, and bare torch.

`plan` is `--engine pipeline`, `torch` is `--engine torch`, `bare` is a plain PipelineStage of torch
with static shapes on the same modules and schedule, without ours around it. `before` is the plan in
another tree of this repository, such as one whose loop over actions was its own. Each pass sleeps
(benchmarks/schedules.py), so that four ranks fit on two cores; bytes are counted in passes of their
own, of matmul stages. A transfer takes `--delay-ms` more, each direction by itself. Usage:

    git worktree add /tmp/before COMMIT
    python benchmarks/runtimes.py [--before /tmp/before] [--ranks 2,4] [--counts 4,8,16]

Figures: benchmarks/runtimes_cpu_DATE.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).resolve().parents[1]
DELAYS = (0.0, 5.0)


def measure(rank: int, options, ways: list[str]) -> list[list]:
    """[way, micro-batches, delay, seconds of each step, peak bytes] for each case."""
    import schedules
    import torch
    import torch.distributed as dist
    from late_transfers import late_transfers

    from stageline.pipeline.live_bytes import PeakBytes

    found = []
    for count in options.counts:
        for way in ways:
            run = runner_of(way, rank, "sleep", count, options)
            ids = torch.zeros(count, schedules.TOKENS["sleep"], dtype=torch.long)
            for delay in DELAYS:
                took = []
                for _ in range(options.steps + 1):  # the first one warms up
                    start = torch.tensor(time.perf_counter() + 0.02, dtype=torch.float64)
                    dist.broadcast(start, 0)

                    def stream_of(is_send, peer, group):
                        return (rank, peer) if is_send else (peer, rank)

                    late = late_transfers(lambda d=delay: d / 1000, stream_of=stream_of)
                    with late if delay else nullcontext():
                        time.sleep(max(0.0, start.item() - time.perf_counter()))
                        run(ids)
                        took.append(time.perf_counter() - start.item())
                    dist.barrier()
                found.append([way, count, delay, took[1:], 0])
            run = runner_of(way, rank, "matmul", count, options)
            ids = torch.zeros(count, schedules.TOKENS["matmul"], dtype=torch.long)
            run(ids)  # the gradients of weights are there
            watch = PeakBytes(torch.device("cpu"))
            with watch.watch():
                run(ids)
            found[-1][-1] = found[-2][-1] = watch.peak
            dist.barrier()
    return found


def runner_of(way: str, rank: int, kind: str, count: int, options):
    """A function of [micro-batches, tokens] that runs a step."""
    import schedules
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    from stageline.pipeline import runner as runners
    from stageline.pipeline.schedules import make_schedule

    cpu = torch.device("cpu")
    schedule = make_schedule(options.schedule, num_ranks=dist.get_world_size())
    seconds = options.pass_ms / 1000 / (schedule.num_stages // schedule.num_ranks)
    stages = [
        schedules.KINDS[kind](index, schedule.num_stages, seconds=seconds, alive=schedules.Alive())
        for index in schedule.stages_of(rank)
    ]
    if way == "bare":
        made = []
        for stage in stages:
            takes = stage.get_example_input(1, schedules.TOKENS[kind])
            gives = stage.get_example_output(1, schedules.TOKENS[kind]) or (
                torch.empty(1, schedules.TOKENS[kind], stage.width, device="meta"),
            )
            made.append(
                PipelineStage(
                    stage,
                    stage.stage,
                    stage.num_stages,
                    cpu,
                    input_args=tuple(t.requires_grad_(t.is_floating_point()) for t in takes),
                    output_args=tuple(t.requires_grad_() for t in gives),
                )
            )
        name = {"1f1b": "1F1B", "gpipe": "GPipe", "zbv": "ZBVZeroBubble"}[options.schedule]
        run = get_schedule_class(name)(
            made if schedule.kind.is_multi else made[0],
            count,
            loss_fn=lambda output, target: output.sum(),
            scale_grads=False,
        )

        def step(ids):
            args = (ids,) if stages[0].is_first else ()
            target = ids if any(stage.is_last for stage in stages) else None
            run.step(*args, target=target, return_outputs=False)

        return step
    runner_class = getattr(runners, "TorchPipelineRunner" if way == "torch" else "PipelineRunner")
    runner = runner_class(stages, device=cpu, schedule=schedule)

    def step(ids):
        batches = [{"input_ids": row[None]} for row in ids]
        runner.step(batches, loss_fn=lambda output, batch: output.sum())

    return step


def work(options) -> None:
    """One round of one tree."""
    # each tree with stages and delays of its own
    sys.path[:0] = [str(options.tree / below) for below in ("", "benchmarks", "tests/helpers")]
    from tests.helpers.ranks import run_ranks

    ways = options.ways.split(",")
    results = run_ranks(measure, options.ranks, options, ways, timeout=900)
    cases = [
        [*case[0][:3], [max(step) for step in zip(*(c[3] for c in case))], max(c[4] for c in case)]
        for case in zip(*results, strict=True)
    ]
    print(json.dumps(cases))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="folder of the other tree")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--counts", default="4,8,16", help="micro-batches")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of each round, case and way")
    parser.add_argument("--pass-ms", type=float, default=10.0, help="of a rank's layers, forward")
    parser.add_argument("--schedule", default="1f1b", choices=("1f1b", "gpipe", "zbv"))
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ways", help=argparse.SUPPRESS)
    options = parser.parse_args()
    counts = options.counts
    options.counts = [int(count) for count in counts.split(",")]
    if options.tree:
        options.ranks = int(options.ranks)
        work(options)
        return
    trees = {"before": options.before} if options.before else {}
    ways = [*trees, "plan", "torch", "bare"]
    print(f"| ranks | micro-batches | delay, ms | {' | '.join(ways)} |", end=" ")
    print("ratio of plan | bytes: " + " | ".join(ways) + " | ratio of plan |")
    print("|---" * (2 * len(ways) + 5) + "|")
    for ranks in options.ranks.split(","):
        found: dict[tuple, list[float]] = {}
        peaks: dict[tuple, int] = {}
        for _ in range(options.rounds):
            for tree, own in ((options.before, "before"), (HERE, "plan,torch,bare")):
                if tree is None:
                    continue
                words = ["--tree", tree, "--ranks", ranks, "--ways", own, "--counts", counts]
                words += ["--steps", options.steps, "--pass-ms", options.pass_ms]
                words += ["--schedule", options.schedule]
                command = [sys.executable, __file__, *map(str, words)]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                for way, count, delay, took, peak in json.loads(done.stdout.splitlines()[-1]):
                    found.setdefault((way, count, delay), []).extend(took)
                    peaks[way, count] = max(peak, peaks.get((way, count), 0))
        for count in options.counts:
            for delay in DELAYS:
                times = [1000 * statistics.median(found[way, count, delay]) for way in ways]
                sizes = [peaks[way, count] / 2**20 for way in ways]
                base = ways.index("before") if trees else ways.index("bare")
                ours = ways.index("plan")
                cells = [f"{value:.0f}" for value in times]
                cells.append(f"{times[ours] / times[base]:.3f}")
                cells += [f"{value:.1f}" for value in sizes]
                cells.append(f"{sizes[ours] / sizes[base]:.3f}")
                print(f"| {ranks} | {count} | {delay:.0f} | {' | '.join(cells)} |", flush=True)
    print(f"load of the machine at the end: {os.getloadavg()}")


if __name__ == "__main__":
    main()
