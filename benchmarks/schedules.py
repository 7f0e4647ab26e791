"""How near the engine comes to each schedule's ideal: measured beside simulated step and bubble.

`--stages sleep` (the default): every pass of a stage takes a fixed time asleep, so that four ranks
fit on two cores and what is measured is the engine: its own work, its transfers, its waits. The
ideal is simulated from the time of a stage's passes by themselves, measured before.
`--stages matmul`: real passes, at two ranks; the ideal is simulated from the passes' mean times.
`ratio` is against that ideal. `engine` is against a replay of the schedule with the time that every
single pass really took: what a busy machine adds to the passes themselves is not in it.
`--device cuda`: one GPU holds one rank; every schedule with several stages on it beside one stage.
Below torchrun a GPU is a rank; every schedule beside its ideal, of the passes' own mean times.
Figures: benchmarks/schedules_cpu_DATE.md. Usage:

    python benchmarks/schedules.py [--ranks 2,4] [--rounds 5] [--pass-ms 30] [--stages matmul]
    python benchmarks/schedules.py --device cuda [--size 1b]
    torchrun --nproc-per-node 4 benchmarks/schedules.py --device cuda [--size 1b]
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_training
import torch
import torch.distributed as dist
from plan_memory import loss_of
from torch import nn

from commands.train_engines import settle_allocators
from stageline.distributed.process_group import distributed_context
from stageline.pipeline.plan import Action, Kind, drop_dead_backward, grad_flow, needs
from stageline.pipeline.recorder import Recorder, TimelineEvent, bubble
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from stageline.planner.estimate import Cost, peak_activations
from stageline.planner.simulate import simulate
from tests.helpers.ranks import run_ranks

NUM_MICRO_BATCHES = {2: (4, 8), 4: (8, 16)}  # ranks -> the columns of tests/unit/test_schedules.py
SIMULATED = {  # (ranks, micro-batches) -> % idle at F = I = W, as that test has it
    (2, 4): "20.0 20.0 11.1 11.1 4.0 4.0 4.0",
    (2, 8): "11.1 11.1 5.9 5.9 2.0 2.0 2.0",
    (4, 8): "27.3 27.3 15.8 15.8 5.9 5.9 5.9",
    (4, 16): "15.8 15.8 8.6 8.6 3.0 3.0 3.0",
}
NAMES = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
NAMES += ("dualpipev",)
WIDTHS = {"sleep": 16, "matmul": 768}
TOKENS = {"sleep": 4, "matmul": 512}
LAYERS = 4  # of a matmul stage


class Alive:
    """Counts the graphs that are not yet freed, of all stages of a rank."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0


class Token:
    """Lives as long as the graph of one forward pass."""

    def __init__(self, alive: Alive) -> None:
        self.alive = alive
        alive.now += 1
        alive.peak = max(alive.peak, alive.now)

    def __del__(self) -> None:
        self.alive.now -= 1


class InputPath(torch.autograd.Function):
    """Sleeps in the forward pass, and on the way of the input's gradient."""

    @staticmethod
    def forward(ctx, hidden, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class WeightPath(torch.autograd.Function):
    """Sleeps on the way of the weight's gradient alone."""

    @staticmethod
    def forward(ctx, weight, seconds, token):
        ctx.seconds, ctx.token = seconds, token
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None, None


class Stage(nn.Module):
    """The contract of a stage model, without a model in it."""

    kind = ""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.stage, self.num_stages = stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.width = WIDTHS[self.kind]
        self.embed = nn.Embedding(8, self.width).requires_grad_(False) if self.is_first else None
        self.parameter_order = [f"s{i}.{name}" for i in range(num_stages) for name in self.names()]

    def names(self) -> list[str]:
        raise NotImplementedError

    def get_example_input(self, rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
        if self.is_first:
            return (torch.empty(rows, tokens, dtype=torch.long, device="meta"),)
        return (torch.empty(rows, tokens, self.width, device="meta"),)

    def get_example_output(self, rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
        return () if self.is_last else (torch.empty(rows, tokens, self.width, device="meta"),)


class SleepStage(Stage):
    """Each of forward, input gradient and weight gradient takes `seconds`, on no core."""

    kind = "sleep"

    def __init__(self, stage: int, num_stages: int, *, seconds: float, alive: Alive) -> None:
        super().__init__(stage, num_stages)
        self.seconds, self.alive = seconds, alive
        self.add_module(f"s{stage}", nn.Linear(self.width, 1, bias=False))

    def names(self) -> list[str]:
        return ["weight"]

    def forward(self, hidden, **batch):
        if self.is_first:
            # a leaf that wants a gradient: stage 0 takes as long as the others
            hidden = self.embed(hidden).requires_grad_()
        hidden = InputPath.apply(hidden, self.seconds)
        weight = getattr(self, f"s{self.stage}").weight
        return hidden * WeightPath.apply(weight, self.seconds, Token(self.alive))[0]


class MatmulStage(Stage):
    """Linear layers: input and weight gradient each cost what the forward pass costs."""

    kind = "matmul"

    def __init__(self, stage: int, num_stages: int, *, seconds: float, alive: Alive) -> None:
        super().__init__(stage, num_stages)
        self.alive = alive
        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)]
        self.add_module(f"s{stage}", nn.Sequential(*layers))

    def names(self) -> list[str]:
        return [f"{index}.weight" for index in range(LAYERS)]

    def forward(self, hidden, **batch):
        if self.is_first:
            hidden = self.embed(hidden).requires_grad_()
        return getattr(self, f"s{self.stage}")(hidden)


KINDS = {kind.kind: kind for kind in (SleepStage, MatmulStage)}


def measure(rank: int, options, cases: list[tuple[str, int]]) -> list[list[dict]]:
    """For each round and case, what this rank saw of a step."""
    num_ranks = dist.get_world_size()
    runners = {}
    for name, _ in cases:
        schedule = make_schedule(name, num_ranks=num_ranks)
        alive = Alive()
        stages = [
            KINDS[options.stages](
                index, schedule.num_stages, seconds=options.pass_ms / 1000, alive=alive
            )
            for index in schedule.stages_of(rank)
        ]
        runner = PipelineRunner(stages, device=torch.device("cpu"), schedule=schedule)
        runners[name] = (runner, alive)
    dist.barrier()
    alone = lone_passes(options.pass_ms / 1000)
    seen = []
    for _ in range(options.rounds + 1):  # the first one warms up
        seen.append([one_step(rank, *runners[name], count, options) for name, count in cases])
    for step in (step for round_ in seen for step in round_):
        step["alone"] = alone
    return seen[1:]


def lone_passes(seconds: float) -> list[float]:
    """Seconds of a forward and of a backward pass of one stage by itself, with no engine."""
    stage = SleepStage(1, 3, seconds=seconds, alive=Alive())
    took = []
    for _ in range(10):
        hidden = torch.zeros(1, TOKENS["sleep"], stage.width, requires_grad=True)
        start = time.perf_counter()
        output = stage(hidden)
        middle = time.perf_counter()
        output.backward(torch.ones_like(output))
        took.append((middle - start, time.perf_counter() - middle))
    return [statistics.median(times) for times in zip(*took[2:], strict=True)]


def one_step(rank: int, runner: PipelineRunner, alive: Alive, count: int, options) -> dict:
    """One step, started at the same moment on all ranks of this machine."""
    generator = torch.Generator().manual_seed(count)
    shape = (1, TOKENS[options.stages])
    batches = [{"input_ids": torch.randint(8, shape, generator=generator)} for _ in range(count)]
    recorder = Recorder(torch.device("cpu"), rank=rank)
    if not options.gc:  # as timeit does
        gc.collect()
        gc.disable()
    alive.peak = alive.now
    dist.barrier()
    start = torch.tensor(time.perf_counter() + 0.02, dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    late = time.perf_counter() - start.item()
    recorder.start()
    runner.step(batches, loss_fn=lambda output, batch: output.sum(), recorder=recorder)
    seconds = time.perf_counter() - start.item()
    events = [
        [e.stage, e.kind, e.micro_batch, e.start + late, e.end + late] for e in recorder.events()
    ]
    return {"seconds": seconds, "alive": alive.peak, "events": events}


def judge(name: str, num_ranks: int, count: int, ranks: list[dict], options) -> dict[str, float]:
    """One step of all ranks against the ideal."""
    events = [
        TimelineEvent(rank, *event) for rank, seen in enumerate(ranks) for event in seen["events"]
    ]
    schedule = make_schedule(name, num_ranks=num_ranks)
    own = pass_times(events)
    if options.stages == "sleep":
        forward, backward = (
            statistics.mean(seen["alone"][place] for seen in ranks) for place in (0, 1)
        )
        one = {"F": forward, "I": backward / 2, "W": backward / 2}
        times = {(s, k): one[k] for s in range(schedule.num_stages) for k in one}
    else:
        times = own
    orders, stages = schedule.orders(count), schedule.num_stages
    ideal = simulate(orders, times, num_stages=schedule.num_stages)
    seconds = max(seen["seconds"] for seen in ranks)
    kinds = defaultdict(list)
    for (_, kind), time_ in own.items():
        kinds[kind].append(1000 * time_)
    return {
        "ideal": ideal.seconds,
        "seconds": seconds,
        "ratio": seconds / ideal.seconds,
        "engine": seconds / replay(orders, events, schedule.num_stages),
        "bubble": 100 * bubble(events),
        "ideal_bubble": 100 * ideal.bubble,
        "alive": max(seen["alive"] for seen in ranks),
        "ideal_alive": max(peak_activations(order, [Cost(saved=1)] * stages) for order in orders),
        **{kind: statistics.mean(times) for kind, times in kinds.items()},
    }


def replay(orders: list[list[Action]], events: list[TimelineEvent], num_stages: int) -> float:
    """Seconds of a step whose passes take what they took, with nothing lost between them."""
    took = {
        Action(e.stage, Kind(e.kind), e.micro_batch): e.end - e.start
        for e in events
        if e.kind != "wait"
    }
    orders = drop_dead_backward(orders, grad_flow([True] * num_stages))
    ends: dict[Action, float] = {}
    places, clocks = [0] * len(orders), [0.0] * len(orders)
    while len(ends) < len(took):
        for rank, order in enumerate(orders):
            if places[rank] == len(order):
                continue
            action = order[places[rank]]
            ready = [
                [ends[one] for one in ways if one in ends] for ways in needs(action, num_stages)
            ]
            if all(ready):
                start = max([clocks[rank], *(found[0] for found in ready)])
                clocks[rank] = ends[action] = start + took[action]
                places[rank] += 1
    return max(clocks)


def pass_times(events: list[TimelineEvent]) -> dict[tuple[int, str], float]:
    """(stage, kind) -> mean seconds of its passes."""
    found = defaultdict(list)
    for event in events:
        if event.kind != "wait":
            found[event.stage, event.kind].append(event.end - event.start)
    return {key: statistics.mean(times) for key, times in found.items()}


def print_table(num_ranks: int, cases: list[tuple[str, int]], results: list, options) -> None:
    """One line a case; medians over the rounds, and the best round's ratio."""
    for place, (name, count) in enumerate(cases):
        rounds = [
            judge(name, num_ranks, count, [rank[index][place] for rank in results], options)
            for index in range(options.rounds)
        ]
        middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        known = dict(zip(NAMES, SIMULATED[num_ranks, count].split(), strict=True)).get(name, "-")
        passes = " ".join(f"{k} {middle[k]:.1f}" for k in "FBIW" if k in middle)
        best = min(r["ratio"] for r in rounds)
        alive = f"{middle['alive']:g} of {middle['ideal_alive']:g}"
        print(
            f"| {name} | {num_ranks} | {count} | {middle['seconds']:.3f} | {middle['ideal']:.3f} "
            f"| {middle['ratio']:.3f} | {best:.3f} | {middle['engine']:.3f} "
            f"| {middle['bubble']:.1f} | {middle['ideal_bubble']:.1f} | {known} "
            f"| {alive if options.stages == 'sleep' else '-'} | {passes} |",
            flush=True,
        )


def on_cpu(options) -> None:
    heads = ("schedule", "ranks", "m", "step s", "ideal s", "ratio", "best ratio", "engine")
    heads += ("bubble %", "ideal bubble %", "simulated %", "peak alive", "ms a pass")
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    names = options.schedules.split(",") if options.schedules else list(SCHEDULES)
    for num_ranks in map(int, options.ranks.split(",")):
        cases = [(name, count) for count in NUM_MICRO_BATCHES[num_ranks] for name in names]
        results = run_ranks(measure, num_ranks, options, cases, timeout=1800)
        print_table(num_ranks, cases, results, options)
        if options.stages == "sleep":
            alone = [[round(1000 * t, 2) for t in rank[0][0]["alone"]] for rank in results]
            print(f"ms of a forward and a backward pass alone, by rank: {alone}", flush=True)
    print(f"load of the machine at the end: {os.getloadavg()}")


def card_setup(size: str, steps: int) -> gpu_training.Setup:
    """What cards train: all weights; looped_bfs and gpipe keep all micro-batches at a time."""
    sequence, count = (8, 2) if size == "tiny" else (2048, 8)
    shape = {"sequence": sequence, "rows": 1, "micro_batches": count}
    return gpu_training.Setup(size=size, steps=steps, **shape)


def on_one_card(setup: gpu_training.Setup) -> Iterator[dict]:
    """Every schedule on one GPU: the ideal is one stage's tokens/s, for one rank has no bubble."""
    with distributed_context(num_ranks=1, device="cuda") as context:
        ceiling = gpu_training.matmul_ceiling(context.device, setup.size)
        one = None
        for name, num_stages in [("1f1b", 1), *gpu_cases()]:
            case = replace(setup, schedule=name, num_stages=num_stages)
            found = gpu_training.measure(case, context, ceiling, plans=False)
            one = one or found["tokens/s"]
            yield {**found, "of one stage": round(found["tokens/s"] / one, 3)}


def on_several_cards(setup: gpu_training.Setup, names: list[str]) -> Iterator[dict]:
    """Every schedule on a GPU a rank; yields on the first rank."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    schedules = [make_schedule(name, num_ranks=num_ranks) for name in names]
    pairs = sorted({pair for schedule in schedules for pair in schedule.pairs})
    with distributed_context(num_ranks=num_ranks, device="cuda", pairs=pairs) as context:
        for schedule in schedules:
            ranks: list = [None] * num_ranks
            dist.all_gather_object(ranks, card_steps(setup, context, schedule))
            if context.is_main:
                count = schedule.legal_micro_batches(setup.micro_batches)
                yield judge_cards(schedule, count, ranks)


def card_steps(setup: gpu_training.Setup, context, schedule) -> list[tuple[float, list]]:
    """(seconds, events) of each step on this rank; the first one warms up."""
    config, device = gpu_training.config_of(setup.size, setup.sequence), context.device
    gc.collect()  # the stages of the schedule before
    torch.cuda.empty_cache()
    stages = [
        gpu_training.make_stage(setup, config, stage, schedule.num_stages, device)
        for stage in schedule.stages_of(context.rank)
    ]
    given = {"group": context.pp_group, "channels": context.channels}
    runner = PipelineRunner(stages, device=device, schedule=schedule, **given)
    recorder = Recorder(device, rank=context.rank)
    count = schedule.legal_micro_batches(setup.micro_batches)
    batches = gpu_training.micro_batches(replace(setup, micro_batches=count))
    found = []
    for _ in range(setup.steps + 1):
        torch.cuda.synchronize(device)
        dist.barrier()
        recorder.start()
        start = time.perf_counter()
        runner.step(batches, loss_fn=loss_of, recorder=recorder)
        torch.cuda.synchronize(device)
        found.append((time.perf_counter() - start, recorder.events()))
        for stage in stages:
            stage.zero_grad()
    return found[1:]


def judge_cards(schedule, count: int, ranks: list[list[tuple[float, list]]]) -> dict:
    """Medians over the steps of one schedule, beside its ideal."""
    rounds = []
    for steps in zip(*ranks, strict=True):
        events = [event for _, own in steps for event in own]
        orders = schedule.orders(count)
        ideal = simulate(orders, pass_times(events), num_stages=schedule.num_stages)
        seconds = max(taken for taken, _ in steps)
        rounds.append((seconds, ideal.seconds, 100 * bubble(events), 100 * ideal.bubble))
    seconds, ideal, idle, ideal_idle = map(statistics.median, zip(*rounds, strict=True))
    return {
        "schedule": schedule.name,
        "ranks": len(ranks),
        "micro-batches": count,
        "s": round(seconds, 4),
        "ideal s": round(ideal, 4),
        "of ideal": round(ideal / seconds, 3),
        "bubble %": round(idle, 1),
        "ideal bubble %": round(ideal_idle, 1),
    }


def on_gpu(options) -> None:
    settle_allocators()
    setup = card_setup(options.size, options.rounds)
    names = options.schedules.split(",") if options.schedules else list(SCHEDULES)
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    for found in on_one_card(setup) if is_alone else on_several_cards(setup, names):
        print(json.dumps(found), flush=True)


def gpu_cases() -> list[tuple[str, int]]:
    """The schedules that have several stages on a rank, with how many."""
    return [
        (name, count)
        for name, kind in SCHEDULES.items()
        if kind.is_multi
        for count in ((2,) if kind.is_v else (2, 4))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--stages", choices=KINDS, default="sleep")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--schedules", help="some of them, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pass-ms", type=float, default=30.0)
    parser.add_argument("--gc", action="store_true", help="let Python collect during a step")
    parser.add_argument("--size", default="1b", help="on a GPU: a shape of gpu_training.py")
    options = parser.parse_args()
    on_gpu(options) if options.device == "cuda" else on_cpu(options)


if __name__ == "__main__":
    main()
