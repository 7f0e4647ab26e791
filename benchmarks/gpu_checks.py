"""The checks that gpu_check.py runs, in order of worth: each is a function that yields rows.

Weights are random, so nothing is downloaded. On emulated cards shapes are tiny, and figures of
speed and memory are not judged.
"""

import argparse
import contextlib
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_training
import schedules
from gpu_training import Setup

from stageline.distributed.process_group import distributed_context

ROOT = Path(__file__).resolve().parents[1]
Machine = dict[str, Any]
Rows = Iterator[dict[str, Any]]
WITHIN = 0.15  # of the planner's bytes
NEMO = 12_473  # tokens/s: 8B, LoRA, 4,096 tokens, one H100, as NeMo Automodel's own page says
HOPPERS = ("H100", "H200")  # the cards that it is promised on
CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        run: machine -> rows, see `row`.
        seconds: its time limit.
        least: seconds of the call below which it is not begun.
        cards: number of cards that it needs.
        beside: it is about numbers, and runs side by side with others, on one thread.
    """

    name: str
    run: Callable[[Machine], Rows]
    seconds: float
    least: float = 5.0
    cards: int = 1
    beside: bool = False


def row(what: str, expected: str, came: str, met: bool | None = None) -> dict[str, Any]:
    """A row of the report; `met` None: nothing is promised, or nobody can say."""
    return {"what": what, "expected": expected, "came": came, "met": met}


def look() -> Iterator[Machine]:
    """The cards of this machine, and what lies between them and us."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds none")
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(words, capture_output=True, text=True).stdout.split()
    cards = range(torch.cuda.device_count())
    memory = torch.cuda.get_device_properties(0).total_memory
    yield {
        "cards": [torch.cuda.get_device_name(index) for index in cards],
        "emulated": False,
        "GiB a card": round(memory / 2**30, 1),
        "driver": told[0] if told else "unknown",
        "CUDA": torch.version.cuda or torch.version.hip,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        **_software(),
    }


def emulated_machine(count: int) -> Iterator[Machine]:
    """What is known where no card is."""
    yield {"cards": ["an emulated card"] * count, "emulated": True, **_software()}


def _software() -> Machine:
    import streaming

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": ".".join(map(str, sys.version_info[:3])),
        "cores": os.cpu_count(),
        "GiB of the host": round(streaming.host_memory() / 2**30),
    }


def judged(machine: Machine, met: bool) -> bool | None:
    """Of speed and memory, which emulated cards do not have."""
    return None if machine["emulated"] else met


# -- tests and numbers ---------------------------------------------------------------------------


class _Outcomes:
    """A pytest plugin that counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2])
        elif report.skipped or report.when == "call":
            self.counts[report.outcome] += 1

    def __str__(self) -> str:
        told = [f"{count} {outcome}" for outcome, count in sorted(self.counts.items())]
        failed = f"{len(self.failed)} failed: {', '.join(self.failed)}"
        return ", ".join([*told, *([failed] if self.failed else [])]) or "no test"


def run_tests(machine: Machine, *, file: str, words: str, tiny: str) -> Rows:
    """A file of tests/gpu; of `tiny` alone, pytest's -k, where cards are emulated."""
    import pytest

    outcomes = _Outcomes()
    chosen = ["-k", tiny] if machine["emulated"] else shlex.split(words)
    fixed = ["-n0", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    fixed += ["-c", str(ROOT / "pyproject.toml")]
    code = pytest.main([str(ROOT / "tests" / "gpu" / file), *fixed, *chosen], plugins=[outcomes])
    ran = bool(outcomes.counts["passed"])
    met = None if code == 0 and not ran else code == 0
    expected = "all pass" + (f" (of -k '{tiny}')" if machine["emulated"] else "")
    yield row(f"tests/gpu/{file}", expected, str(outcomes), met)


def tests(
    file: str, seconds: float, *, tiny: str, name: str = "", words: str = "", beside: bool = True
) -> Check:
    run = functools.partial(run_tests, file=file, words=words, tiny=tiny)
    return Check(name or f"tests: {file}", run, seconds, beside=beside)


def run_quantised(machine: Machine) -> Rows:
    """Run test_quantised_base_gpu.py in a new Python, which sees its packages from the start.

    transformers asks once per process which packages there are.
    """
    file = "test_quantised_base_gpu.py"
    if machine["emulated"]:
        yield from run_tests(machine, file=file, words="", tiny="nf4")
        return
    paths = [os.environ.get(name) for name in ("PYTHONPATH", "STAGELINE_MORE_PACKAGES")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = ["-m", "pytest", "-n0", "-rs", "-p", "no:cacheprovider", f"tests/gpu/{file}"]
    done = run_python(*words, env=given)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["it wrote nothing"]
    failed = [line.split(" - ")[0] for line in lines if line.startswith("FAILED")]
    met = None if done.returncode == 0 and "passed" not in lines[-1] else done.returncode == 0
    yield row(f"tests/gpu/{file}", "all pass", "; ".join([lines[-1], *failed])[:600], met)


def run_python(*words: Any, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the project, and copy the end of its output into the log."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    print(done.stdout[-6000:], done.stderr[-6000:])
    return done


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the exit code and the last line of a process's errors."""
    lines = done.stderr.strip().splitlines() or ["no error"]
    return f"exit code {done.returncode}: {lines[-1][:300]}"


def follow_streams(machine: Machine) -> Rows:
    """Streaming below torch's own sanitizer of streams."""
    if machine["emulated"]:
        yield row("torch's stream sanitizer", "no race", "emulated cards follow streams themselves")
        return
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    for found in run_tests(machine, file="test_streaming_gpu.py", words="-k steps", tiny=""):
        yield {**found, "what": "test_streaming_gpu.py -k steps, with torch's stream sanitizer"}


def split_a_family(machine: Machine, *, kind: str, name: str) -> Rows:
    """Two stages against the library's whole model on the same card."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    import families

    from benchmarks.families_split import ROUNDING, TOLERANCES, try_family

    for dtype in (torch.float32, torch.bfloat16):
        (found,) = try_family(
            families.family_config(name),
            families.KINDS[kind][0],
            families.build_stage,
            name=name,
            num_stages=(2,),
            dtypes=(dtype,),
            device="cuda",
        )
        most = ROUNDING[dtype] if dtype == torch.float32 else TOLERANCES[dtype]
        met = found.said in ("equal", "close") and found.largest <= most
        came = f"{found.said}, {found.largest:.0e} apart {found.detail}"
        what = f"{name} on 2 stages, {str(dtype).removeprefix('torch.')}"
        expected = f"loss, logits, gradients of the whole model within {most:.0e}"
        yield row(what, expected, came, met)


def parity(kind: str, name: str) -> Check:
    run = functools.partial(split_a_family, kind=kind, name=name)
    return Check(f"parity: {name}", run, 120, beside=True)


def resume(machine: Machine) -> Rows:
    """A run on a card that is killed, and goes on."""
    from tests.helpers.small_run import Job

    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        options = ("--device", "cuda", "--total-steps", 6, "--sync-save")
        whole = job.fork("whole", *options, ranks=1, timeout=120)
        job.fork("killed", *options, ranks=1, chaos="at=forward,step=3,do=sigkill", timeout=120)
        again = job.fork("killed", *options, "--resume", "auto", ranks=1, timeout=120)
        for done in (whole, again):
            print(done.out, done.err)
        apart = _apart(job.losses("killed"), job.losses("whole"))
    what = "train_pp.py is killed in its fourth step, then --resume auto"
    yield row(what, "losses of an undisturbed run within 1e-4", f"{apart:.0e} apart", apart <= 1e-4)


def runs_on_one_card(machine: Machine) -> Rows:
    """Run train_pp.py on one card in the ways of tests/gpu/test_a_runs.py, next to the CPU.

    The tests themselves need emulated cards, which report races. On a true card the same runs show
    kernels, streams and NCCL. Dropout draws other numbers there, so those losses are not compared.
    """
    from tests.gpu import test_a_runs as runs
    from tests.helpers.small_run import Job
    from tests.helpers.tiny_checkpoints import tiny_whole
    from tests.helpers.tiny_models import tiny_tokenizer

    os.environ["STAGELINE_PROVE_SPLIT"] = "never"  # it runs on the host; the default job has it
    cases = {name: case for name, case in runs.CASES.items() if case.ranks == 1}
    if machine["emulated"]:
        cases = {name: cases[name] for name in ("zbv recompute chunk", "streaming one card")}
    else:  # emulated cards have no kernels for these
        zbv = f"{runs.ZBV} --save-steps 1 --eval-samples 4"
        cases["bf16 sdpa zbv"] = runs.Case("--bf16", zbv)
        cases["bf16 compiled layers"] = runs.Case("--bf16 --attention sdpa", "--compile-layers")
        target = "--lora.target q_proj,experts.gate_up_proj,experts.down_proj"
        like = f"{runs.LORA} {target}"
        cases["lora on experts"] = runs.Case(like, runs.ZBV, family="mixtral")
        cases["bf16 lora on experts"] = runs.Case(f"{runs.BF16} {like}", family="mixtral")
        scored = "--eval-samples 4 --eval-completions 4 --eval-max-new-tokens 4"
        cases["held-out answers"] = runs.Case(words=f"{scored} --metric exact_match")
    num_runs = 1 if machine["emulated"] else 6  # at a time
    seconds = 600 if machine["emulated"] else 150
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, Job] = {}
        for family in dict.fromkeys(case.family for case in cases.values()):
            place = Path(folder, family)
            place.mkdir()
            jobs[family] = Job(place, family=family, num_layers=4)
            runs.write_preferences(place)
        if not machine["emulated"]:
            teacher = Path(folder, "llama", "teacher")
            sizes = {"vocab_size": len(tiny_tokenizer()), "num_hidden_layers": 3}
            tiny_whole("llama", teacher, noise=0.3, **sizes)
            like = f"--loss-fn distill --teacher.path {teacher}"
            cases["distill"] = runs.Case(like, runs.ZBV)
        # a run on the CPU stands before the first one that is compared with it
        waiting: list[tuple[str, Job, list]] = []
        reference: dict[str, str] = {}  # case -> name of the run on the CPU
        made: dict[tuple, str] = {}
        for name, case in cases.items():
            job, key = jobs[case.family], (case.family, case.like, case.rows)
            rows = runs.rows_of(job, case)
            if key not in made:
                made[key] = f"cpu {len(made)}"
                waiting.append((made[key], job, [*runs.TWO_STEPS, *case.like.split(), *rows]))
            reference[name] = made[key]
            words = [*f"--device cuda --num-stages 1 {case.like} {case.words}".split(), *rows]
            waiting.append((name, job, [*runs.TWO_STEPS, *words]))
        running: dict[str, Any] = {}
        ended: dict[str, tuple[int, str]] = {}  # run -> exit code, end of its errors
        left = dict(cases)
        while waiting or running:
            while waiting and len(running) < num_runs:
                name, job, words = waiting.pop(0)
                running[name] = job.start_forked(name, *words, ranks=1)
            time.sleep(0.05)
            for name, run in list(running.items()):
                if run.is_running() and time.monotonic() - run.started_at < seconds:
                    continue
                del running[name]
                try:
                    done = run.wait(0)
                    ended[name] = done.code, done.err[-1500:]
                except AssertionError as error:
                    ended[name] = -1, str(error)[-1500:]
            for name in [n for n in left if n in ended and reference[n] in ended]:
                case = left.pop(name)
                ends = ended[name], ended[reference[name]]
                yield _compared(name, reference[name], case, jobs[case.family], *ends)


def _compared(name: str, cpu: str, case: Any, job: Any, end: tuple, cpu_end: tuple) -> dict:
    what = f"train_pp.py on a card: {name}"
    for where, (code, text) in ((f"{what}", end), ("the run on the CPU", cpu_end)):
        if code:
            print(where, text)
            lines = text.strip().splitlines() or ["no error"]
            error = next((line for line in lines if line.startswith("error")), lines[-1])
            return row(
                what, "it comes to its end", f"{where}: exit code {code}: {error[:250]}", False
            )
    found, expected, words = job.losses(name), job.losses(cpu), f"{case.like} {case.words}"
    if "dropout" in words or "neftune" in words:
        return row(what, "it comes to its end (random numbers differ)", f"losses {found}", True)
    if "--stale-step" in words:  # the first update comes a step later
        expected = {1: expected[1], 2: found[2]}
    most = 2e-2 if "16" in case.like or "niter" in case.like else 1e-3  # niter: a random SVD
    gap = _apart(found, expected)
    return row(what, f"losses of the CPU within {most:.0e}", f"{gap:.0e} apart", gap <= most)


def default_job(machine: Machine) -> Rows:
    """Train the README's first job on one card until it reads digits, and answer with it."""
    from stageline.run_records import read_log

    steps, device = (2, "cpu") if machine["emulated"] else (450, "cuda")
    parts = "--dataset digits --prompt digits --prompt-fn fill --image-token auto"
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder, "model"), Path(folder, "run")
        made = run_python("scripts/make_digits_model.py", model)
        if made.returncode:
            raise RuntimeError(last_words(made))
        words = (
            f"--train-model internvl {parts} --collate-fn sft --loss-fn sft --device {device} "
            "--schedule interleaved_1f1b --num-stages 2 --stages-per-rank 2 --batch-size 64 "
            "--micro-batch-size 16 --max-token-num 64 --learning-rate 2e-3 --min-lr 1e-4 "
            f"--warmup-steps {min(20, steps - 1)} --weight-decay 0.05 --total-steps {steps} "
            f"--eval-steps 150 --eval-samples {36 if machine['emulated'] else 360} --bf16 true "
            "--num-workers 2"
        ).split()
        began = time.monotonic()
        done = run_python("train_pp.py", *words, "--config-path", model, "--output-dir", out)
        what = f"the default job, {steps} steps of 2 virtual stages, bf16"
        if done.returncode:
            yield row(what, "it comes to its end", last_words(done), False)
            return
        trained, evaluated = read_log(out / "log.jsonl")
        last = evaluated[-1] if evaluated else {}
        accuracy = last.get("token_accuracy", last.get("accuracy", 0.0))
        expected = "token accuracy of the held-out digits of at least 0.96 (0.986 on a CPU)"
        came = f"{accuracy:.4f}, loss {trained[-1]['loss']:.4f}, {time.monotonic() - began:.0f} s"
        yield row(what, expected, came, judged(machine, accuracy >= 0.96))
        newest = sorted((out / "checkpoints").glob("step-*"))[-1]
        words = (
            f"{parts} --model generate --metric exact_match --device {device} --batch-size 60 "
            "--max-new-tokens 4 --bootstrap.resamples 10"
            f"{' --limit 12' if machine['emulated'] else ''}"
        ).split()
        for engine in ("--engine device_map", "--engine pipeline --num-stages 1"):
            paths = ["--model-path", newest, "--output-dir", Path(folder, "evaluation")]
            done = run_python("evaluate.py", *words, *engine.split(), *paths)
            score = next((line for line in done.stdout.splitlines() if line.startswith("all")), "")
            met = bool(score) and float(score.split()[1]) >= 0.93
            met = judged(machine, met) if score else False
            what = f"evaluate.py {engine}: answers of the held-out digits"
            yield row(what, "at least 0.93 right", score or last_words(done), met)


def _apart(ours: dict[int, float], theirs: dict[int, float]) -> float:
    if ours.keys() != theirs.keys() or not ours:
        raise RuntimeError(f"steps {sorted(ours)} have losses, {sorted(theirs)} were expected")
    return max(abs(ours[step] / theirs[step] - 1) for step in ours)


# -- one card ------------------------------------------------------------------------------------


def the_host(machine: Machine) -> Rows:
    """Report the host's memory; where --host-gib says that it grows, take half of it once.

    What was taken once is there for what is measured later.
    """
    kernel, promised = _software()["GiB of the host"], machine["GiB of the host"]
    taken, began = 0, time.monotonic()
    if not machine["emulated"] and kernel < 0.7 * promised:
        Path("/proc/self/oom_score_adj").write_text("1000")  # if it does not grow, this one ends
        kept = []
        while taken < promised // 2:
            kept.append(bytearray(1 << 30))
            kept[-1][::4096] = b"x" * (1 << 18)
            taken += 1
    came = f"{kernel} GiB at first, then {_software()['GiB of the host']}; "
    came += f"{taken} GiB were taken in {time.monotonic() - began:.0f} s"
    yield row("memory of the host, as the kernel reports it", "-", came)


def the_card(machine: Machine) -> Rows:
    """Measure the ceilings of the card, its link and its host."""
    if machine["emulated"]:
        yield row("rates of the card", "-", "emulated cards have none")
        return
    for what, measure in (
        ("first tensor of a process on the card; its group of NCCL and gloo", _first_tensor),
        ("torch's allocator has the settings of a run", _allocator_settings),
        ("2 GiB of the host", _host_pages),
        ("a small operation, from Python into the card's queue", _launch),
        ("sdpa, 4,096 tokens, 32 heads of 128 on 8, bf16, forward and backward", _attention),
        ("rates", _rates),
    ):
        try:
            came, met, expected = measure()
        except Exception as error:  # the others follow
            traceback.print_exc()
            came, met, expected = f"{type(error).__name__}: {error}"[:200], None, "-"
        yield row(what, expected, came, met)


Measured = tuple[str, bool | None, str]  # what came, whether it is met, what was expected


def _first_tensor() -> Measured:
    began = time.perf_counter()
    torch.zeros(1, device=CUDA)
    torch.cuda.synchronize()
    first, began = time.perf_counter() - began, time.perf_counter()
    with distributed_context(num_ranks=1, device="cuda"):
        group = time.perf_counter() - began
    return f"{first:.1f} s; {group:.1f} s", None, "-"


def _allocator_settings() -> Measured:
    asked = os.environ.get("PYTORCH_ALLOC_CONF", "none")
    found = torch.cuda.memory._snapshot().get("allocator_settings", {})
    print(found)
    came = found.get("expandable_segments")
    met = bool(came) if "expandable_segments:True" in asked else None
    return f"expandable_segments {came}", met, f"as asked: {asked}"


def _host_pages() -> Measured:
    size, seconds = 2 << 30, []
    block = torch.empty(size, dtype=torch.uint8)
    for value in (1, 2):
        began = time.perf_counter()
        block.fill_(value)
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    torch.empty(size, dtype=torch.uint8, pin_memory=True)
    seconds.append(time.perf_counter() - began)
    first, again, pinned = (size / 2**30 / each for each in seconds)
    came = f"first touch {first:.1f} GiB/s, again {again:.1f}, page-locked at {pinned:.1f} GiB/s; "
    return f"{came}{torch.get_num_threads()} threads", None, "-"


def _launch() -> Measured:
    one = torch.ones(1, device=CUDA)
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5000):
            one.add_(1)
        issued = time.perf_counter() - began
    torch.cuda.synchronize()
    return f"{issued / 5000 * 1e6:.1f} us", None, "-"


def _attention() -> Measured:
    import streaming
    from torch.nn.attention import SDPBackend, sdpa_kernel

    made = {"device": CUDA, "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.randn(1, heads, 4096, 128, **made) for heads in (32, 8, 8))

    def attend() -> None:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        attended.sum().backward()

    told = []
    for kernel in (None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        name = kernel.name.lower() if kernel else "torch's choice"
        try:
            with sdpa_kernel(kernel) if kernel else contextlib.nullcontext():
                seconds = streaming.seconds_of(attend)
            # two products forward, five backward, of half of all pairs
            told.append(f"{name} {7 * 32 * 4096**2 * 128 / seconds / 1e12:.0f} TFLOP/s")
        except RuntimeError as error:
            told.append(f"{name}: {str(error).splitlines()[0][:60]}")
    return ", ".join(told), None, "-"


def _rates() -> Measured:
    import streaming

    found = streaming.rates()
    up, down, both = (f"{found[name] / 1e9:.1f}" for name in ("up", "down", "both"))
    came = (
        f"{found['card']}: bf16 matrices {found['matmul'] / 1e12:.0f} TFLOP/s, {up} GB/s up, "
        f"{down} down, {both} each way at once; AdamW on the host "
        f"{found['adamw'] / 1e9:.2f} billion weights/s"
    )
    return came, None, "-"


def see_more_packages() -> None:
    """Let this process import a peer, or bitsandbytes, of STAGELINE_MORE_PACKAGES."""
    if folder := os.environ.get("STAGELINE_MORE_PACKAGES"):
        sys.path.append(folder)


def train(machine: Machine, *, setup: Setup, least: int = 0, most_gib: float = 0) -> Rows:
    """Steps of a shape: speed, and memory beside the plan or a limit."""
    if machine["emulated"]:
        size = "tiny-a3b" if setup.size in gpu_training.EXPERTS else "tiny"
        small = {"size": size, "sequence": 16, "rows": 2, "micro_batches": 2, "steps": 1}
        setup = replace(setup, **small, profiled=False, compiled=False, quantization="")
    see_more_packages()
    with distributed_context(num_ranks=1, device="cuda") as context:
        ceiling = gpu_training.matmul_ceiling(context.device, setup.size)
        found = gpu_training.measure(setup, context, ceiling)
    kind = "LoRA" if setup.lora else "all weights"
    kind += f" on {setup.quantization}" if setup.quantization else ""
    kind += ", experts one by one" if setup.eager else ""
    shape = f"{setup.rows} x {setup.sequence} tokens{', padded' if setup.padded else ''}"
    shape += ", compiled layers" if setup.compiled else ""
    what = f"{setup.size}, {kind}, bf16, {setup.micro_batches} micro-batches of {shape}"
    speed, rest = found["tokens/s"], f"{found['MFU %']} % of {ceiling / 1e12:.1f} TFLOP/s"
    expected = f"above {least:,} tokens/s (NeMo Automodel on an H100)" if least else "-"
    is_fair = least and any(name in machine["cards"][0] for name in HOPPERS)
    met = judged(machine, speed > least) if is_fair else None
    yield row(what, expected, f"{speed:,} tokens/s, {rest}, loss {found['loss']}", met)
    planned, peak = found["planned GiB"], found["peak GiB"]
    if most_gib:
        met = judged(machine, peak <= most_gib)
        yield row("its memory", f"at most {most_gib} GiB", f"{peak} GiB", met)
    else:
        met = judged(machine, abs(planned / peak - 1) <= WITHIN)
        yield row("its memory", f"{planned} GiB by the plan, within 15 %", f"{peak} GiB", met)
    if setup.profiled:
        yield row("where a step's time goes", "-", str(found["kernels"]))


def training(
    name: str,
    seconds: float,
    least: float,
    *,
    promised: int = 0,
    most_gib: float = 0,
    **shape: Any,
) -> Check:
    run = functools.partial(train, setup=Setup(**shape), least=promised, most_gib=most_gib)
    return Check(f"training: {name}", run, seconds, least)


def stream(machine: Machine, *, size: str, peers: dict[str, float | None]) -> Rows:
    """The streaming engine beside its peers at equal arithmetic, all weights in bf16.

    Args:
        peers: name -> the least ratio of our tokens/s to theirs; None: none is promised.
    """
    import streaming
    import streaming_model

    from stageline.streaming import host_weights

    see_more_packages()
    budget = int(min(32, machine.get("GiB a card", 8) / 2) * 2**30)
    shape = {"rows": 16, "sequence": 2048, "micro_batches": 4, "steps": 6}
    if machine["emulated"]:
        size, shape = "tiny", {"rows": 2, "sequence": 8, "micro_batches": 2, "steps": 1}
    setup = streaming_model.Setup(size, lora=False, device="cuda", budget=budget, **shape)
    needs, has = streaming_model.stated_host_bytes(setup), machine["GiB of the host"] << 30
    if has > streaming.host_memory() + 2**30:  # it grows: --host-gib
        host_weights.available_memory = lambda: int(0.85 * has)
    if needs > 0.85 * has:
        why = f"not run: it needs {needs / 2**30:.0f} GiB of the host's {has / 2**30:.0f}"
        yield row(f"{size} streamed", "-", why)
        return
    found = {name: streaming.run_peer(name, setup) for name in ("ours_async", *peers)}
    for name, one in found.items():
        came = one.get("error") or (
            f"{setup.tokens / one['seconds']:,.0f} tokens/s, {one['peak'] / 2**30:.1f} GiB of the "
            f"card, {one['host'] / 2**30:.1f} of the host, loss {one['losses'][-1]:.4f}"
        )
        is_ours = name == "ours_async"
        yield row(f"{size}: {name}", "-", came, False if is_ours and "error" in one else None)
    for name, least in peers.items():
        expected = f"at least {least} x {name}" if least else "-"
        lacking = [each for each in ("ours_async", name) if "error" in found[each]]
        if lacking:
            came = f"no figure of {lacking[0]}: {found[lacking[0]]['error']}"
            yield row(f"{size}: ours / {name}", expected, came)
            continue
        ratio = found[name]["seconds"] / found["ours_async"]["seconds"]
        met = judged(machine, ratio >= least) if least else None
        yield row(f"{size}: ours / {name}", expected, f"{ratio:.2f} x", met)


def streaming_check(
    size: str, seconds: float, least: float, *, name: str = "", **peers: float | None
) -> Check:
    run = functools.partial(stream, size=size, peers=peers)
    return Check(f"streaming: {name or size}", run, seconds, least)


def trace_streaming(machine: Machine) -> Rows:
    """Trace streamed steps: their share of the roofline, gaps, copies next to compute."""
    import streaming
    import streaming_model

    if machine["emulated"]:
        yield row("a trace of streamed steps", "-", "emulated cards have no kernels to trace")
        return
    speed = streaming.forked(streaming.rates)
    if "error" in speed:
        raise RuntimeError(speed["error"])
    for lora in (False, True):
        shape = {"rows": 16, "sequence": 2048, "micro_batches": 4, "steps": 2}
        setup = streaming_model.Setup("1b", lora=lora, device="cuda", budget=32 << 30, **shape)
        what = f"1b streamed, {'LoRA' if lora else 'all weights'}"
        with tempfile.TemporaryDirectory() as folder:
            found = streaming.run_peer("ours_async", setup, folder)
            if "error" in found:
                yield row(what, "it comes to its end", found["error"], False)
                continue
            events = json.loads(Path(found["trace"]).read_text())["traceEvents"]
        gaps, limits = streaming.compute_gaps(events), streaming.roofline(setup, found, speed)
        limit = max(limits, key=lambda key: limits[key])
        came = (
            f"{setup.tokens / found['seconds']:,.0f} tokens/s, "
            f"{limits[limit] / found['seconds']:.2f} of the roofline ({limit}); gaps "
            f"{gaps.get('gaps', 0):.3f} of {gaps.get('span', 0):.3f} s, "
            f"{gaps.get('hidden_copies', 0):.2f} of copies next to compute; "
            f"slots {found.get('slots')}"
        )
        yield row(what, "-", came)


def decode(machine: Machine) -> Rows:
    """Our engine beside the library's generate: equal weights, equal prompts, greedy."""
    from stageline.inference.decoding.chain import LocalChain
    from stageline.inference.decoding.engine import DecodingEngine
    from stageline.inference.decoding.scheduler import Limits
    from stageline.inference.decoding.stage_decoder import StageDecoder
    from tests.helpers.tiny_models import tiny_tokenizer

    is_tiny = machine["emulated"]
    setup = Setup(size="tiny" if is_tiny else "1b")
    config = gpu_training.config_of(setup.size, 4096)
    stage = gpu_training.make_stage(setup, config, 0, 1, CUDA).eval()
    with CUDA:  # a host takes seconds to draw weights that are replaced
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole.load_state_dict(stage.state_dict())
    whole.eval().generation_config.eos_token_id = None
    for num_rows in (2,) if is_tiny else (1, 8, 32):
        decoder = StageDecoder(stage, device=CUDA)
        engine = DecodingEngine(
            LocalChain([decoder]),
            tokenizer=tiny_tokenizer(),
            limits=Limits(max_rows=num_rows, prefill_tokens=decoder.pass_tokens()),
            device=CUDA,
        )
        length, num_tokens = (8, 3) if is_tiny else (512, 64)
        ids = torch.randint(9, config.vocab_size, (num_rows, length), device=CUDA)
        ways = {"ours": functools.partial(answer, engine), "generate": generate(whole)}
        rates = timed(ways, ids, num_tokens)
        for place, phase in enumerate(("prefill", "decode")):
            ours, theirs = (rates[name][place] for name in ways)
            came = f"{ours:,.0f} tokens/s, {ours / theirs:.2f} x"
            what = f"{phase}, {setup.size}, bf16, {num_rows} prompts of {length} tokens"
            met = judged(machine, ours >= theirs)
            yield row(what, f"at least generate's {theirs:,.0f} tokens/s", came, met)


def answer(engine: Any, ids: torch.Tensor, num_tokens: int) -> None:
    from stageline.inference.decoding.request import Failed, Request, Sampling

    sampling = Sampling(max_new_tokens=num_tokens, stop_token_ids=())
    mask = torch.ones(1, ids.shape[1], dtype=torch.long)
    asked = (
        Request(str(index), {"input_ids": one.cpu(), "attention_mask": mask}, sampling)
        for index, one in enumerate(ids.split(1))
    )
    for event in engine.answer(asked):
        if isinstance(event, Failed):
            raise event.error


def generate(whole: Any) -> Callable[[torch.Tensor, int], None]:
    def way(ids: torch.Tensor, num_tokens: int) -> None:
        given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
        given["use_cache"] = True  # the stage turned it off in the configuration that both have
        with torch.inference_mode():
            whole.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, **given)

    return way


def timed(
    ways: dict[str, Callable], ids: torch.Tensor, num_tokens: int
) -> dict[str, tuple[float, float]]:
    """(prompt tokens a second, new tokens a second beyond the first), medians of rounds in turn."""
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(5):
        for name, way in ways.items():
            for count in (1, 1 + num_tokens):
                torch.cuda.synchronize()
                start = time.perf_counter()
                way(ids, count)
                torch.cuda.synchronize()
                taken.setdefault((name, count), []).append(time.perf_counter() - start)
    rates = {}
    for name in ways:
        first, whole = (statistics.median(taken[name, n][1:]) for n in (1, 1 + num_tokens))
        more = len(ids) * num_tokens / max(whole - first, 1e-9)
        rates[name] = ids.numel() / first, more
    return rates


def cut_logits(machine: Machine) -> Rows:
    """Head and loss over all tokens at once and in chunks, of all tokens and of half of them."""
    import chunked_loss

    shape = {"vocabulary": 128256, "tokens": 4096, "hidden": 4096}
    if machine["emulated"]:
        shape = {"vocabulary": 512, "tokens": 64, "hidden": 32}
    fixed = {"dtype": "bfloat16", "device": "cuda", "repeats": 3, "loss": "sft"}
    for learnt in (None, shape["tokens"] // 2):
        full, cut = (
            chunked_loss.measure(argparse.Namespace(**shape, **fixed, learnt=learnt, child=chunk))
            for chunk in (0, 256)
        )
        memory, seconds = (cut[name] / full[name] for name in ("bytes", "seconds"))
        apart = abs(cut["loss"] / full["loss"] - 1)
        what = f"--logits-chunk 256, {learnt or shape['tokens']} of {shape['tokens']} tokens learnt"
        yield row(f"{what}: loss", "as at once, within 1e-3", f"{apart:.0e} apart", apart <= 1e-3)
        came = f"{memory:.2f} x of {full['bytes'] / 2**30:.2f} GiB in {seconds:.2f} x the time"
        yield row(f"{what}: memory", "at most 0.75 x", came, judged(machine, memory <= 0.75))


def plan(machine: Machine) -> Rows:
    """Peak memory of each rank of two, by the planner and as it comes."""
    import plan_memory

    size, tokens = ("tiny", 16) if machine["emulated"] else ("1b", 2048)
    ways = ("lora",) if machine["emulated"] else tuple(plan_memory.WAYS)
    for way in ways:
        for found in plan_memory.compare(
            gpu_training.config_of(size, tokens),
            way,
            plan_memory.WAYS[way],
            num_ranks=2,
            tokens=tokens,
            dtype=torch.bfloat16,
            device=CUDA,
            schedules=("1f1b",) if machine["emulated"] else plan_memory.SCHEDULES,
        ):
            ratios = found["predicted_to_measured"]
            met = judged(machine, all(abs(ratio - 1) <= WITHIN for ratio in ratios))
            what = f"{size}, {way}, {found['schedule']}: bytes planned / measured, by rank"
            yield row(what, "within 15 %", ", ".join(map(str, ratios)), met)


def schedules_on_one_card(machine: Machine) -> Rows:
    """Several virtual stages on one card, which has no bubble."""
    setup = schedules.card_setup(*(("tiny", 1) if machine["emulated"] else ("1b", 5)))
    if not machine["emulated"]:  # with fewer tokens in a micro-batch the host sets the pace
        setup = replace(setup, rows=2, micro_batches=4)
    for found in schedules.on_one_card(setup):
        share = found["of one stage"]
        what = f"{found['schedule']}, {found['stages']} stages of {setup.size} on one card"
        came = f"{found['tokens/s']:,} tokens/s, {share} of one stage, {found['peak GiB']} GiB"
        yield row(what, "at least 0.95 of one stage", came, judged(machine, share >= 0.95))


# -- several cards -------------------------------------------------------------------------------


def on_ranks(words: list[Any], num_ranks: int, *, seconds: float) -> Iterator[dict]:
    """The JSON lines of a benchmark on so many ranks, a card each, as they come."""
    from tests.helpers.small_run import ForkedRun

    run = ForkedRun([str(ROOT / "benchmarks" / words[0]), *map(str, words[1:])], ranks=num_ranks)
    deadline, seen, is_running = time.monotonic() + seconds, 0, True
    while is_running and time.monotonic() < deadline:
        time.sleep(0.05)
        is_running = run.is_running()
        lines = run.text("out").splitlines(keepends=True)
        found = [line for line in lines if line.startswith("{") and line.endswith("\n")]
        yield from map(json.loads, found[seen:])
        seen = len(found)
    done = run.wait(0)
    print(done.out, done.err)
    if done.code:
        lines = done.err.strip().splitlines() or ["it wrote nothing"]
        raise RuntimeError(f"a rank ended with {done.code}: {lines[-1]}")


def schedules_on_cards(machine: Machine) -> Rows:
    """Every schedule beside its ideal: the same passes with nothing to wait for but each other.

    One that fails or hangs is a row, and the others go on.
    """
    count = len(machine["cards"])
    size, rounds = ("tiny", 1) if machine["emulated"] else ("1b", 5)
    words = ["schedules.py", "--device", "cuda", "--size", size, "--rounds", rounds]
    # tests/gpu/test_a_runs.py has all of them on emulated cards
    left = ["1f1b", "zbv"] if machine["emulated"] else list(schedules.SCHEDULES)
    while left:
        try:
            for found in on_ranks([*words, "--schedules", ",".join(left)], count, seconds=180):
                left.remove(found["schedule"])
                shape = f"{size}, {found['micro-batches']} micro-batches"
                what = f"{found['schedule']} on {count} cards, {shape}"
                came = f"{found['of ideal']} of ideal; bubble {found['bubble %']} %"
                expected = f"at least 0.9 of ideal; bubble {found['ideal bubble %']} %"
                yield row(what, expected, came, judged(machine, found["of ideal"] >= 0.9))
        except (RuntimeError, AssertionError) as error:
            print(error)
            came = str(error).strip().splitlines()[-1][:300]
            yield row(f"{left.pop(0)} on {count} cards, {size}", "it comes to its end", came, False)


def replicas(machine: Machine) -> Rows:
    """Replicas that hold all weights, and that share them out (FSDP2), beside one card."""
    count = len(machine["cards"])
    words = ["gpu_training.py", "--stages", 1, "--size", "1b", "--steps", 5]
    if machine["emulated"]:
        words += "--size tiny --sequence 16 --rows 1 --micro-batches 2 --steps 1".split()
    (one,) = on_ranks(words, 1, seconds=180)
    (whole,) = on_ranks(words, count, seconds=180)
    (shared,) = on_ranks([*words, "--shard"], count, seconds=180)
    for name, found, least in (("whole weights", whole, 0.9), ("FSDP2", shared, 0.85)):
        ratio = found["tokens/s"] / one["tokens/s"] / count
        came = f"{found['tokens/s']:,} tokens/s, {ratio:.2f} x, {found['peak GiB']} GiB a card"
        expected = f"at least {least} x {count} times one card's {one['tokens/s']:,} tokens/s"
        met = judged(machine, ratio >= least)
        yield row(f"{count} replicas, {name}", expected, came, met)
    apart = abs(shared["loss"] / whole["loss"] - 1)
    yield row("FSDP2: loss", "of whole weights, within 1e-2", f"{apart:.0e} apart", apart <= 1e-2)
    saved = shared["peak GiB"] / whole["peak GiB"]
    came = f"{saved:.2f} x of {whole['peak GiB']} GiB"
    yield row("FSDP2: memory", "less than with whole weights", came, judged(machine, saved < 1))


def kill_ranks(machine: Machine) -> Rows:
    """A rank that is killed, and one that hangs, in the middle of a step on NCCL."""
    from tests.helpers.small_run import Job

    limit = 5 if machine["emulated"] else 20
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        fixed = ("--device", "cuda", "--total-steps", 6, "--sync-save", "--hang-timeout", limit)
        # where there are cards, below the launcher that a user has
        start = job.fork if machine["emulated"] else launched(job)
        whole = start("whole", *fixed, timeout=180)
        if whole.code:
            raise RuntimeError(f"the undisturbed run ended with {whole.code}: {whole.err[-300:]}")
        for name, do in (("is killed", "sigkill"), ("hangs", "hang")):
            fault = f"at=forward,rank=1,step=3,do={do}"
            done = start(do, *fixed, chaos=fault, timeout=180)
            print(done.out, done.err)
            said = next((x for x in done.err.splitlines() if x.startswith("error")), "no error")
            is_told = done.code != 0 and said != "no error" and done.seconds < limit + 60
            expected = f"all ranks end within {limit + 60} s, and an error says why"
            came = f"{done.seconds:.0f} s, exit code {done.code}: {said[:160]}"
            yield row(f"rank 1 of 2 {name} in a step", expected, came, is_told)
            again = start(do, *fixed, "--resume", "auto", timeout=180)
            print(again.out, again.err)
            apart = _apart(job.losses(do), job.losses("whole"))
            expected = "losses of an undisturbed run within 1e-4"
            yield row("--resume auto after it", expected, f"{apart:.0e} apart", apart <= 1e-4)


def launched(job: Any) -> Callable[..., Any]:
    """Runs two ranks below the launcher, in the process group of this check."""
    from tests.helpers.faults import environment
    from tests.helpers.small_run import Finished

    def start(name: str, *options: Any, timeout: float, chaos: str = "") -> Finished:
        words = job.command(name, "--num-stages", 2, *options)
        given = {**os.environ, **environment(chaos), "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        done = subprocess.run(words, env=given, capture_output=True, text=True, timeout=timeout)
        return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    return start


BUDGET_TEST = "test_the_budget_is_a_share_of_free_memory"  # other processes change what is free

EXPERT_LORA = {"size": "a3b", "sequence": 4096, "rows": 1, "lora": True}

CHECKS = (
    # numbers, side by side
    Check("the host", the_host, 60, beside=True),
    Check("runs on one card", runs_on_one_card, 170, beside=True),
    Check("the default job", default_job, 190, beside=True),
    tests("test_streaming_gpu.py", 170, tiny="buffers_change"),
    tests("test_flash_packing.py", 170, tiny="gemma2"),
    tests("test_training_on_gpu.py", 150, tiny="gpipe"),
    Check("resume", resume, 150, beside=True),
    tests("test_vision_on_gpu.py", 150, tiny="qwen2_5_vl"),
    tests("test_decoding_gpu.py", 150, tiny="most_tokens", words=f"-k 'not {BUDGET_TEST}'"),
    Check("tests: test_quantised_base_gpu.py", run_quantised, 150, beside=True),
    parity("text", "llama"),
    parity("text", "qwen3_moe"),
    parity("text", "gemma3_text"),
    parity("text", "mamba"),
    parity("vision", "qwen2_5_vl"),
    parity("vision", "internvl"),
    tests("test_rewards_on_gpu.py", 100, tiny="scores"),
    # time and memory, one after the other
    Check("the card", the_card, 50, 12),
    training(
        "8B LoRA", 140, 55, promised=NEMO,
        size="8b", sequence=4096, rows=1, lora=True, profiled=True,
    ),
    streaming_check("1b", 160, 70, plain_checkpoint=0.95, plain=None, roundpipe=1.2),
    Check("several cards: schedules", schedules_on_cards, 600, 120, cards=2),
    Check("several cards: replicas and FSDP2", replicas, 360, 120, cards=2),
    Check("several cards: NCCL kills", kill_ranks, 360, 120, cards=2),
    training("1B, all weights", 80, 30, profiled=True),
    Check("decoding", decode, 110, 45),
    Check("schedules on one card", schedules_on_one_card, 130, 50),
    tests(
        "test_decoding_gpu.py", 40, tiny="budget_is_a_share", words=f"-k {BUDGET_TEST}",
        name="tests: test_decoding_gpu.py, free memory", beside=False,
    ),
    training("1B LoRA", 60, 25, lora=True),
    Check("chunked loss", cut_logits, 40, 12),
    training("experts, LoRA", 60, 25, **EXPERT_LORA, profiled=True),
    training("experts, LoRA on nf4", 90, 30, **EXPERT_LORA, quantization="nf4", profiled=True),
    training(
        "30B-A3B on 24 GiB", 120, 50, most_gib=22, size="30b-a3b", sequence=2048, rows=1, steps=2,
        lora=True, quantization="nf4", checkpointing=True, logits_chunk=256,
    ),
    training("one by one, LoRA", 160, 75, **EXPERT_LORA, eager=True, steps=1),
    training("1B, all weights, padded", 60, 28, padded=True),
    training(
        "8B LoRA, compiled layers", 140, 75, promised=NEMO,
        size="8b", sequence=4096, rows=1, lora=True, compiled=True, profiled=True,
    ),
    Check("streaming: where the time goes", trace_streaming, 110, 45),
    Check("plan of memory", plan, 150, 50),
    streaming_check("1b", 120, 60, name="1b, FSDP2", fsdp2_offload=None),
    Check("stream sanitizer", follow_streams, 120, 60),
    streaming_check("5b", 720, 300, fsdp2_offload=None, roundpipe=1.2),
)  # fmt: skip
