"""Servers of one model side by side: ours with one and two stages, and `transformers serve`.

python benchmarks/decoding_servers.py --model .cache/smollm2 --rounds 2

Each server is started alone, asked the same chats greedily over HTTP with streams, and ended; all
take turns. Start-up ends with the first answered token; user seconds are those of all its processes
until then. All have two cores: one process two threads, two stages one each. Prints Markdown.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHAT = "/v1/chat/completions"
STREAMS = (1, 8, 32, 64)
TIMED = 8  # streams in which the first token is timed
PATIENCE = 300.0
TICKS = os.sysconf("SC_CLK_TCK")
OURS = f"{ROOT / 'serve.py'} --device cpu --model-path"
LIBRARY = f"{Path(sys.executable).with_name('transformers')} serve --device cpu --dtype float32"
PAGES = "--continuous-batching --cb-block-size 64 --cb-num-blocks 256 --cb-max-batch-tokens 4096"
# name -> words behind the interpreter, threads of a process
SERVERS = {
    "ours, one stage": (f"{OURS} MODEL --num-stages 1 --port PORT", 2),
    "ours, two stages": (f"{OURS} MODEL --num-stages 2 --port PORT", 1),
    "transformers serve": (f"{LIBRARY} --port PORT MODEL", 2),
    "transformers serve, continuous batching": (f"{LIBRARY} {PAGES} --port PORT MODEL", 2),
}


def user_seconds(pid: int) -> float:
    """User time of a process and all below it, as far as they live."""
    total, left = 0, [pid]
    while left:
        one = left.pop()
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(words[11]) + int(words[13])
            for task in os.listdir(f"/proc/{one}/task"):
                children = Path(f"/proc/{one}/task/{task}/children").read_text()
                left += map(int, children.split())
    return total / TICKS


def ask(port: int, model: str, text: str, num_tokens: int) -> tuple[str, float, float]:
    """(the answer, seconds until its first letters, seconds until its end)."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
    }
    start, first, parts = time.perf_counter(), 0.0, []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {answer.read()[:500]!r}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:]).get("choices")
            if choices and (piece := choices[0]["delta"].get("content")):
                first = first or time.perf_counter() - start
                parts.append(piece)
    return "".join(parts), first, time.perf_counter() - start


@contextlib.contextmanager
def server(words: str, threads: int, model: Path) -> Iterator[tuple[int, float, float]]:
    """(port, seconds and user seconds until it answered a token)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [word.replace("PORT", str(port)) for word in words.split()]
    command = [str(model) if word == "MODEL" else word for word in command]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=log, env=environment, cwd=ROOT
        )
        try:
            while True:
                with contextlib.suppress(OSError):
                    ask(port, name_of(words, model), "Say hello.", 1)
                    break
                if process.poll() is not None or time.perf_counter() - start > PATIENCE:
                    log.seek(0)
                    raise SystemExit(f"no server: {log.read()[-2000:]}")
                time.sleep(0.05)
            yield port, time.perf_counter() - start, user_seconds(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def name_of(words: str, model: Path) -> str:
    """What requests call the model."""
    return model.name if "serve.py" in words else str(model)


def measure(words: str, threads: int, options: argparse.Namespace) -> dict[str, float]:
    """One server from its start to its end."""
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(options.model), {}
    text = (ROOT / "README.md").read_text(encoding="utf-8").split()
    longest = max(options.streams)
    questions = [" ".join(text[8 * place : 8 * place + 24]) for place in range(longest)]
    name = name_of(words, options.model)
    with server(words, threads, options.model) as (port, seconds, user):
        found |= {"start-up, s": seconds, "start-up, user s": user}
        time.sleep(options.settle)  # ours measures its steps behind its start
        for count in options.streams:
            with ThreadPoolExecutor(count) as pool:
                start = time.perf_counter()
                jobs = [
                    pool.submit(ask, port, name, one, options.tokens) for one in questions[:count]
                ]
                answers = [job.result() for job in jobs]
                seconds = time.perf_counter() - start
            num_tokens = sum(len(tokenizer(one)["input_ids"]) for one, _, _ in answers)
            found[f"{count} streams, tokens/s"] = num_tokens / seconds
            if count == TIMED:
                firsts = [first for _, first, _ in answers]
                found[f"first token of {TIMED}, median s"] = statistics.median(firsts)
                found[f"first token of {TIMED}, last s"] = max(firsts)
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "smollm2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--settle", type=float, default=15.0)
    parser.add_argument("--only", nargs="*", default=list(SERVERS), choices=SERVERS)
    options = parser.parse_args()
    options.model = options.model.absolute()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    for number in range(options.rounds):
        for name in options.only if number % 2 == 0 else options.only[::-1]:
            found[name].append(measure(*SERVERS[name], options))
            load = os.getloadavg()[0]
            told = {key: round(value, 2) for key, value in found[name][-1].items()}
            print(f"{name}: {told}, load {load:.1f}", file=sys.stderr, flush=True)
    print("| | " + " | ".join(found) + " |\n" + "|---" * (len(found) + 1) + "|")
    for key in next(iter(found.values()))[0]:
        cells = [
            f"{statistics.median(one[key] for one in rounds):.2f}" for rounds in found.values()
        ]
        print(f"| {key} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
