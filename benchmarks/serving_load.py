"""Puts load on a server of serve.py: many clients at once, of which many misbehave.

    python benchmarks/serving_load.py --model-path my_model
    python benchmarks/serving_load.py --model-path my_model --clients 50 --num-stages 2

Claims: no status without a cause, memory that does not grow, right answers during and after it.
Right are the texts that plain transformers makes of the same weights, greedily. Clients leave in
the middle of an answer or before it begins, send bad JSON, huge bodies and bad pictures.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NUM_TOKENS = 8
PATIENCE = 900.0  # longer than a server's own
CHAT = "/v1/chat/completions"
BODY_MIB = 4
BUSY = {429, 503}
QUESTIONS = (
    "What is the capital of France?",
    "Name a colour.",
    "Say hello.",
    "What is two plus two?",
    "Write one word about the sea, and nothing else at all, please.",
    "Which animal barks?",
)
# kind of client -> (share, statuses that it may see besides a busy server's; 0: it did not wait)
KINDS: dict[str, tuple[int, set[int]]] = {
    "answer": (34, {200}),
    "stream": (24, {200}),
    "leaves in an answer": (10, {0}),
    "leaves before one": (10, {0}),
    "bad JSON": (6, {400}),
    "huge body": (4, {413}),
    "bad picture": (6, {400}),
    "unknown model": (3, {404}),
    "too long": (3, {400}),
}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"  # it is cut


@dataclass
class Seen:
    """What came of the load."""

    statuses: dict[str, collections.Counter] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB

    def note(self, kind: str, status: int, text: str = "") -> None:
        """One request has ended."""
        self.statuses.setdefault(kind, collections.Counter())[status] += 1
        if status not in KINDS[kind][1] | BUSY:
            self.unexpected.append(f"{kind}: {status} {text[:200]}")


class Connection:
    """One request over a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname or "", parts.port or 80)

    async def __aenter__(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection(*self.address, limit=2**24)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, content: bytes) -> None:
        """Asks the chat route."""
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.writer.write(head.encode() + content)
        await self.writer.drain()

    async def read(self) -> tuple[int, str]:
        """Status and body, chunks joined."""
        raw = await self.reader.read(-1)
        while more := await self.reader.read(-1):
            raw += more
        head, _, body = raw.partition(b"\r\n\r\n")
        if b"chunked" in head.lower():
            body = _dechunked(body)
        return int(head.split(b" ", 2)[1]), body.decode()


def _dechunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


def chat(model: str, text: object, **more: object) -> bytes:
    """The body of a request."""
    messages = [{"role": "user", "content": text}]
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, **more}
    return json.dumps({"model": model, "messages": messages, **options}).encode()


def text_of(body: str, *, is_stream: bool) -> str:
    """The answer."""
    if not is_stream:
        return json.loads(body)["choices"][0]["message"]["content"]
    lines = [line[6:] for line in body.split("\n\n") if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    return "".join(delta.get("content") or "" for delta in deltas)


async def one_client(
    url: str, model: str, wanted: dict[str, str], seen: Seen, *, until: float, seed: int
) -> None:
    """Asks again and again, each time as another kind of client."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        [kind] = draw.choices(list(KINDS), [share for share, _ in KINDS.values()])
        question = draw.choice(QUESTIONS)
        content = {
            "bad JSON": draw.choice([b"{", b'{"model": NaN}', b"\xff\xfe", b"[" * 10_000]),
            "huge body": chat(model, question, user="x" * (BODY_MIB * 2**20 + 10)),
            "bad picture": chat(model, [picture(draw)]),
            "unknown model": chat("another", question),
            "too long": chat(model, question * 20_000),
            "stream": chat(model, question, stream=True),
            "leaves in an answer": chat(model, question, stream=True, max_tokens=64),
            "leaves before one": chat(model, question, n=2),
        }.get(kind, chat(model, question))
        began = time.monotonic()
        try:
            status, body = await asyncio.wait_for(ask(url, kind, content, draw), PATIENCE)
        except TimeoutError:
            status, body = -2, f"no answer in {PATIENCE} s"
        except (OSError, asyncio.IncompleteReadError) as error:
            status, body = -1, repr(error)
        seen.note(kind, status, body)
        if status == 200:
            seen.seconds.append(time.monotonic() - began)
            found = text_of(body, is_stream=kind == "stream")
            if found != wanted[question]:
                seen.wrong.append(f"{question!r}: {found!r} in place of {wanted[question]!r}")
        await asyncio.sleep(draw.random() * 0.2)


async def ask(url: str, kind: str, content: bytes, draw: random.Random) -> tuple[int, str]:
    """One request; status 0 where it did not wait for the end."""
    async with Connection(url) as connection:
        await connection.send(content)
        if kind == "leaves before one":
            await asyncio.sleep(draw.random() * 0.3)
            return 0, ""
        if kind == "leaves in an answer":
            head = await connection.reader.read(64)
            status = int(head.split(b" ", 2)[1])
            return (0, "") if status == 200 else (status, "")
        return await connection.read()


def picture(draw: random.Random) -> dict[str, object]:
    """A part of a message with a picture that is none."""
    url = draw.choice(
        [f"data:image/png;base64,{PNG}", "data:image/png;base64,!", "http://127.0.0.1/x.png"]
    )
    return {"type": "image_url", "image_url": {"url": url}}


def right_answers(model_path: str) -> dict[str, str]:
    """What plain transformers answers, greedily."""
    import transformers

    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(model_path)
    has_images = hasattr(config, "vision_config")
    kind = "AutoModelForImageTextToText" if has_images else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_pretrained(model_path, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    answers = {}
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        made = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        answers[question] = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return answers


@contextlib.contextmanager
def server(args: argparse.Namespace):
    """serve.py with the model; gives its address and its process."""
    words = [
        *(sys.executable, ROOT / "serve.py", "--model-path", args.model_path, "--port", 0),
        *(
            "--device",
            args.device,
            "--num-stages",
            args.num_stages,
            "--max-running",
            args.max_running,
        ),
        *(
            "--limits.max_queue",
            args.clients,
            "--limits.max_body_mib",
            BODY_MIB,
            "--max-length",
            2048,
        ),
        *("--served-model-name", "loaded"),
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(word) for word in words], stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
        )
        try:
            line = process.stdout.readline()
            if not line.startswith("serving "):
                log.seek(0)
                raise SystemExit(f"no server: {line}{log.read()}")
            yield line.rsplit(" ", 1)[1].strip().removesuffix("/v1"), process
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            log.seek(0)
            print(f"\nthe server ended with {code}; its log has {len(log.readlines())} lines")
            log.seek(0)
            print("".join(log.readlines()[-5:]))


def memory_of(pid: int) -> float:
    """MiB that a process and its children have in memory."""
    tree, found = [pid], 0.0
    while tree:
        one = tree.pop()
        with contextlib.suppress(OSError):
            tree += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
            status = Path(f"/proc/{one}/status").read_text()
            found += int(status.split("VmRSS:")[1].split()[0]) / 1024
    return found


async def watch_memory(pid: int, seen: Seen) -> None:
    """Notes the memory every second."""
    began = time.monotonic()
    while True:
        seen.memory.append((time.monotonic() - began, memory_of(pid)))
        await asyncio.sleep(1)


async def load(url: str, pid: int, wanted: dict[str, str], args: argparse.Namespace) -> Seen:
    """The whole load, and a check of all questions behind it."""
    seen = Seen()
    watch = asyncio.create_task(watch_memory(pid, seen))
    until = time.monotonic() + args.seconds
    clients = [
        one_client(url, "loaded", wanted, seen, until=until, seed=args.seed + number)
        for number in range(args.clients)
    ]
    await asyncio.gather(*clients)
    await asyncio.sleep(3)
    after = Seen()
    for question in QUESTIONS:
        async with Connection(url) as connection:
            await connection.send(chat("loaded", question))
            status, body = await connection.read()
            after.note("answer", status, body)
            if status == 200 and text_of(body, is_stream=False) != wanted[question]:
                after.wrong.append(question)
    seen.wrong += [f"afterwards: {question}" for question in after.wrong]
    seen.unexpected += [f"afterwards: {text}" for text in after.unexpected]
    watch.cancel()
    return seen


def report(seen: Seen) -> bool:
    """Prints what was seen; whether the claims hold."""
    print("\n| client | requests | " + "statuses |\n|---|---|---|")
    for kind in KINDS:
        counts = seen.statuses.get(kind, collections.Counter())
        told = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        print(f"| {kind} | {counts.total()} | {told} |")
    places = [len(seen.memory) * part // 10 for part in range(10)]
    print("\n| s | " + " | ".join(f"{seen.memory[p][0]:.0f}" for p in places) + " |")
    print("|---|" + "---|" * len(places))
    print("| MiB | " + " | ".join(f"{seen.memory[p][1]:.0f}" for p in places) + " |")
    half = seen.memory[len(seen.memory) // 2 :]
    fit = statistics.linear_regression(*zip(*half, strict=True))
    print(f"\nsecond half: {fit.slope * 60:+.1f} MiB a minute")
    if len(seen.seconds) > 1:
        cuts = statistics.quantiles(seen.seconds, n=20)
        print(f"answers: {len(seen.seconds)}; median {cuts[9]:.2f} s, 95 % within {cuts[18]:.2f} s")
    print(f"wrong answers: {len(seen.wrong)}; statuses without a cause: {len(seen.unexpected)}")
    for text in [*seen.wrong[:5], *seen.unexpected[:5]]:
        print(f"  {text}")
    return not seen.wrong and not seen.unexpected


def main() -> int:
    """Runs the load; 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-stages", type=int, default=1)
    parser.add_argument("--max-running", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wanted = right_answers(args.model_path)
    with server(args) as (url, process):
        seen = asyncio.run(load(url, process.pid, wanted, args))
        holds = report(seen)
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
