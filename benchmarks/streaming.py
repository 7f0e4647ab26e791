"""The streaming engine beside its peers: tokens/s, device memory, share of the roofline, a trace.

On a GPU each peer is a process of its own, one after the other in one run, since each takes most of
the host's memory; they are forked, so the first process touches no card. The roofline is of rates
measured just before. On a CPU, where nothing can overlap, the peers take turns step by step: it
shows what the engine itself costs, and that the script works. The model is in streaming_model.py,
the peers in streaming_workers.py. Figures: benchmarks/streaming_cpu_DATE.md. Usage:

    python benchmarks/streaming.py [--size 5b] [--lora] [--out traces]   # needs a GPU
    python benchmarks/streaming.py --device cpu                         # two minutes
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path

# whether there is a card is asked of its driver's library, and forks may use it still
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import streaming_model as models
import streaming_workers as workers
import torch

from commands.train_engines import settle_allocators

WIDE = 256 << 20  # bytes of a copy that is timed


def host_memory() -> int:
    """Bytes of this machine, or of the group of processes if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))


def size_that_fits(setup: models.Setup) -> str:
    """The largest model whose stated host memory takes at most 85 % of the machine's."""
    found = "tiny"
    for size in models.SHAPES:
        if size_bytes(setup, size) <= 0.85 * host_memory():
            found = size
    return found


def rates() -> dict:
    """Operations and bytes a second of this GPU and its link, of AdamW on this host; its name."""
    up, down = (torch.empty(WIDE, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, back = (torch.empty(WIDE, dtype=torch.uint8, device="cuda") for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(*, upward: bool, downward: bool) -> None:
        with torch.cuda.stream(streams[0]):
            if upward:
                there.copy_(up, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            if downward:
                down.copy_(back, non_blocking=True)

    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    weights = torch.nn.Parameter(torch.zeros(1 << 27))
    weights.grad = torch.zeros(1 << 27)
    optimizer = workers.adamw([weights], "cpu")
    return {
        "card": torch.cuda.get_device_name(),
        "matmul": 2 * 8192**3 / seconds_of(lambda: left @ right),
        "up": WIDE / seconds_of(lambda: copy(upward=True, downward=False)),
        "down": WIDE / seconds_of(lambda: copy(upward=False, downward=True)),
        "both": WIDE / seconds_of(lambda: copy(upward=True, downward=True)),
        "adamw": weights.numel() / seconds_of(optimizer.step, repeats=2),
    }


def seconds_of(work, repeats: int = 10) -> float:
    """The median of five, each of several repeats."""
    taken = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) / repeats)
    return statistics.median(taken[1:])


def operations(setup: models.Setup, recomputed: float) -> float:
    """Of one step: matrices and causal attention; LoRA needs no gradient of frozen weights."""
    hidden, _, layers, _, _ = models.SHAPES[setup.size]
    model = models.make_model(setup, "meta")
    weights = sum(each.numel() for each in model.parameters() if each.dim() > 1)
    weights -= setup.vocabulary * hidden  # the embedding is looked up
    blocks = weights - setup.vocabulary * hidden
    passes = 2 if setup.lora else 3
    attention = 2 * layers * hidden * setup.sequence  # half of all pairs, two products
    matrices = 2 * passes * weights + 2 * recomputed * blocks
    return setup.tokens * (matrices + (3 + recomputed) * attention)


def roofline(setup: models.Setup, found: dict, speed: dict[str, float]) -> dict[str, float]:
    """The least seconds that a step can take, by what limits it."""
    is_both = found.get("up", 0) and found.get("down", 0)
    return {
        "compute": operations(setup, found.get("recomputed", 1.0)) / speed["matmul"],
        "up": found.get("up", 0) / (speed["both"] if is_both else speed["up"]),
        "down": found.get("down", 0) / (speed["both"] if is_both else speed["down"]),
    }


def compute_gaps(events: list[dict]) -> dict[str, float]:
    """Of a trace: seconds from the first to the last kernel of the busiest stream, and its gaps.

    `hidden_copies`: the share of all copies' time in which that stream computes.
    """
    timed = [event for event in events if event.get("ph") == "X" and "ts" in event]
    streams: dict[object, list[tuple[float, float]]] = {}
    copies = []
    for event in timed:
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "kernel":
            streams.setdefault(event["args"]["stream"], []).append(span)
        elif event.get("cat") == "gpu_memcpy" and "Pin" in event.get("name", ""):
            copies.append(span)
    if not streams:
        return {}
    busiest = max(streams.values(), key=lambda spans: sum(end - start for start, end in spans))
    busy = joined(busiest)
    whole = busy[-1][1] - busy[0][0]
    worked = sum(end - start for start, end in busy)
    copied = sum(end - start for start, end in copies)
    under = sum(overlap(copy, busy) for copy in copies)
    gaps = {"span": whole / 1e6, "gaps": (whole - worked) / 1e6}
    return {**gaps, "hidden_copies": under / copied if copied else 1.0}


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def overlap(span: tuple[float, float], busy: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in busy)


def forked(work, *given) -> dict:
    """What `work` returns in a process of its own; {"error": why} where there is nothing."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def answer() -> None:
        try:
            there.send(work(*given))
        except Exception as error:
            there.send({"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})

    process = context.Process(target=answer)
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = None
    process.join()
    return {"error": f"ended with {process.exitcode}"} if found is None else found


def run_peer(name: str, setup: models.Setup, out: str = "") -> dict:
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        kind = "lora" if setup.lora else "full"
        trace = str(Path(out) / f"{name}_{setup.size}_{kind}.json")
        setup = dataclasses.replace(setup, trace=trace)
    return forked(workers.run_on_gpu, name, setup)


def gpu(options, setup: models.Setup) -> None:
    speed = forked(rates)
    if "error" in speed:
        raise SystemExit(speed["error"])
    name = speed.pop("card")
    said = ", ".join(f"{name} {value:.3g}" for name, value in speed.items())
    print(f"{name}, torch {torch.__version__}; a second: {said}")
    for lora in (False, True) if options.lora is None else (options.lora,):
        own = dataclasses.replace(setup, lora=lora)
        size = options.size or size_that_fits(own)
        own = dataclasses.replace(own, size=size)
        stated = models.stated_host_bytes(own)
        print(f"\n{size}, {'LoRA' if lora else 'full'}, {own}; stated host bytes {stated:,}")
        heads = (
            "peer|tokens/s|peak GPU GiB|peak host GiB|of roofline|limit|gaps|copies hidden|losses"
        )
        print("|" + heads + "|\n" + "|---" * 9 + "|", flush=True)
        for name in options.only.split(","):
            found = run_peer(name, own, options.out)
            print(gpu_row(name, own, found, speed), flush=True)


def gpu_row(name: str, setup: models.Setup, found: dict, speed: dict[str, float]) -> str:
    if "error" in found:
        return f"| {name} | {found['error']} |"
    limits = roofline(setup, found, speed)
    limit = max(limits, key=lambda key: limits[key])
    gaps = {}
    if found["trace"]:
        gaps = compute_gaps(json.loads(Path(found["trace"]).read_text())["traceEvents"])
    said = (
        f"{gaps['gaps']:.3f} of {gaps['span']:.3f} s | {gaps['hidden_copies']:.2f}" if gaps else "|"
    )
    return (
        f"| {name} | {setup.tokens / found['seconds']:.0f} | {found['peak'] / 2**30:.1f} "
        f"| {found['host'] / 2**30:.1f} | {limits[limit] / found['seconds']:.2f} | {limit} "
        f"| {said} | {found['losses'][0]:.4f} - {found['losses'][-1]:.4f} |"
    )


def cpu(options, setup: models.Setup) -> None:
    """All peers in this process, in turn, in an order that changes, and on one core.

    A second core would show how the optimizer's thread runs beside a pass, not what it costs. The
    time is the processor's, of all threads: others may use this machine.
    """
    check_figures(setup)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    setup = dataclasses.replace(setup, lora=bool(options.lora))
    peers, seconds, losses = {}, {}, {}
    for name in options.only.split(","):
        try:
            peers[name], seconds[name], losses[name] = workers.PEERS[name](setup), [], []
        except (ImportError, RuntimeError) as error:
            print(f"{name}: not run: {error}")
    names = list(peers)
    for step in range(options.rounds + 1):  # the first one warms up
        for name in names[step % len(names) :] + names[: step % len(names)]:
            began = time.process_time()
            losses[name].append(peers[name].step(models.batch_of(setup, step)))
            peers[name].finish()
            seconds[name].append(time.process_time() - began)
    best = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    print(f"{setup}\nload {os.getloadavg()}, torch {torch.__version__}")
    print("|peer|tokens a CPU second|rounds|of plain_checkpoint|us a layer|slots|MiB|losses|")
    print("|---" * 8 + "|")
    places = (models.SHAPES[setup.size][2] + 2) * setup.micro_batches
    for name, peer in peers.items():
        rounds = [setup.tokens / each for each in seconds[name][1:]]
        facts = peer.facts()
        compared = best["plain_checkpoint"] / best[name] if "plain_checkpoint" in best else 1.0
        print(
            f"| {name} | {setup.tokens / best[name]:.0f} | {min(rounds):.0f} - {max(rounds):.0f} "
            f"| {compared:.2f} | {best[name] / places * 1e6:.0f} | {facts.get('slots', '')} "
            f"| {facts.get('pool_peak', 0) / 2**20:.1f} "
            f"| {losses[name][0]:.5f}, {losses[name][-1]:.5f} |"
        )


def check_figures(setup: models.Setup) -> None:
    """What a GPU run would print, of made-up figures."""
    kernel = {"ph": "X", "cat": "kernel", "args": {"stream": 7}}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)"}
    events = [{**kernel, "ts": ts, "dur": dur} for ts, dur in ((0, 4e5), (3e5, 2e5), (9e5, 1e5))]
    events.append({**copy, "ts": 4e5, "dur": 2e5})
    gaps = compute_gaps(events)
    assert all(abs(gaps[name] - value) < 1e-9 for name, value in (("span", 1.0), ("gaps", 0.4)))
    assert abs(gaps["hidden_copies"] - 0.5) < 1e-9
    speed = {"matmul": 1e12, "up": 4e9, "down": 4e9, "both": 2e9}
    found = {"recomputed": 1.0, "up": 8e9, "down": 2e9, "seconds": 5.0, "peak": 0, "host": 0}
    assert roofline(setup, found, speed)["up"] == 4.0
    assert "| 0.80 | up |" in gpu_row("name", setup, {**found, "trace": "", "losses": [1.0]}, speed)
    assert 0 < size_bytes(setup, "1b") < size_bytes(setup, "3b")


def size_bytes(setup: models.Setup, size: str) -> int:
    return models.stated_host_bytes(dataclasses.replace(setup, size=size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=models.SHAPES, help="default: what the host holds")
    parser.add_argument("--lora", action=argparse.BooleanOptionalAction, help="default: both")
    parser.add_argument("--only", default=",".join(workers.PEERS))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--budget-gib", type=float, help="of the device, for weights, gradients")
    parser.add_argument("--steps", type=int, default=4, help="that are timed on a GPU")
    parser.add_argument("--rounds", type=int, default=8, help="on a CPU")
    parser.add_argument("--out", default="", help="folder for traces (GPU)")
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    settle_allocators()
    if is_gpu and not torch.cuda.is_available():
        parser.error("no GPU was found, one was expected: use --device cpu for the small mode")
    if options.budget_gib is None:
        options.budget_gib = 32.0 if is_gpu else 20 / 1024
    setup = models.Setup(
        size=options.size or "tiny",
        lora=False,
        rows=options.rows or (16 if is_gpu else 4),
        sequence=options.sequence or (2048 if is_gpu else 128),
        micro_batches=options.micro_batches,
        device=options.device,
        budget=int(options.budget_gib * 2**30),
        steps=options.steps,
    )
    (gpu if is_gpu else cpu)(options, setup)


if __name__ == "__main__":
    main()
