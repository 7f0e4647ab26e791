"""Ours beside its peers on two processes of one thread: same model, data, precision, in one run.

Every peer is a pair of processes of its own, started once; a round gives each its turn with the
same global batch, in an order that changes. Prints real tokens/s, peak memory of each rank and the
losses, which prove that all did the same work. The peers are in peers_workers.py. Figures:
benchmarks/peers_cpu_DATE.md. Usage, where `pip install deepspeed accelerate` was done:

    DS_ACCELERATOR=cpu python benchmarks/peers.py [--rounds 6] [--only ours_1f1b,ddp_trainer]
"""

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

DATA = Path(__file__).resolve().parents[1] / "data" / "manpages_instruct.jsonl"
VOCABULARY = 4096
LONGEST = 256
ROWS = 4  # of a micro-batch
NUM_MICRO_BATCHES = 8
PEERS = {  # name -> processes
    "ours_1f1b": 2,
    "ours_interleaved_1f1b": 2,
    "torch_gpipe": 2,
    "torch_1f1b": 2,
    "deepspeed": 2,
    "deepspeed_dynamic": 2,
    "ddp_trainer": 2,
    "naive": 2,
    "one_process": 1,
}


def token_rows() -> list[list[int]]:
    """The text as token ids, shuffled; the tokenizer is trained on the same text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    samples = [json.loads(line) for line in DATA.read_text().splitlines()]
    texts = [f"{sample['question']}\n{sample['answer']}" for sample in samples]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    rows = [tokenizer.encode(text).ids[:LONGEST] for text in texts]
    random.Random(0).shuffle(rows)
    return rows


class Turn:
    """A worker's side of the rounds: iterate over the turns, hand each one's loss back."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def __iter__(self):
        while self.wait():
            yield self

    def wait(self) -> bool:
        """Blocks until it is this peer's turn; False at the end."""
        return self.pipe.recv()

    def done(self, loss: float) -> None:
        self.pipe.send(("done", loss))


def work(name: str, rank: int, port: int, log: str, batches: list, pipe: Connection) -> None:
    """One process of a peer."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(PEERS[name]))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        import peers_workers

        turn = Turn(pipe)
        base = peers_workers.prepare(name)
        peers_workers.WORKERS[name](rank, batches, turn)
        pipe.send(("memory", base, status_mib("VmHWM")))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def status_mib(field: str) -> float:
    """VmHWM (the peak) or VmRSS of this process; getrusage would count the parent's in."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


class Peer:
    """The parent's side of a peer's processes."""

    def __init__(self, name: str, batches: list, folder: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.error = ""
        self.memory: list[tuple[float, float]] = []
        context = multiprocessing.get_context("fork")  # one import of torch for all
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(PEERS[name]):
            mine, theirs = context.Pipe()
            log = f"{folder}/{name}_{rank}.log"
            process = context.Process(target=work, args=(name, rank, port, log, batches, theirs))
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def turn(self, limit: float) -> None:
        """Lets all processes do one step, and takes the time until the last one is done."""
        start = time.perf_counter()
        answers = self.ask(True, limit)
        if not self.error:
            self.seconds.append(time.perf_counter() - start)
            self.losses.append(max(answer[1] for answer in answers))
            print(f"{self.name}: {self.seconds[-1]:.3f} s, loss {self.losses[-1]:.5f}", flush=True)

    def finish(self, limit: float) -> None:
        if not self.error:
            self.memory = [answer[1:] for answer in self.ask(False, limit)]
        for process in self.processes:
            process.join(5)
            process.kill()

    def ask(self, goes_on: bool, limit: float) -> list[tuple]:
        answers = []
        try:
            for pipe in self.pipes:
                pipe.send(goes_on)
            for pipe in self.pipes:
                if not pipe.poll(limit):
                    raise TimeoutError(f"no answer in {limit:g} s")
                answers.append(pipe.recv())
        except (OSError, EOFError, TimeoutError) as error:
            answers.append(("error", f"{type(error).__name__}: {error}"))
        errors = [answer[1] for answer in answers if answer[0] == "error"]
        self.error = self.error or (errors[0] if errors else "")
        return answers


def report(peer: Peer, tokens: list[int], best: float) -> str:
    if peer.error:
        return f"| {peer.name} | failed: {peer.error.splitlines()[0]} |"
    speeds = [count / seconds for count, seconds in zip(tokens, peer.seconds, strict=True)][1:]
    speed = statistics.median(speeds)
    memory = " / ".join(f"{peak:.0f}" for _, peak in peer.memory)
    grown = " / ".join(f"{peak - base:.0f}" for base, peak in peer.memory)
    return (
        f"| {peer.name} | {speed:.0f} | {min(speeds):.0f} - {max(speeds):.0f} "
        f"| {speed / best:.2f} | {memory} | {grown} "
        f"| {peer.losses[0]:.5f} | {peer.losses[-1]:.5f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--limit", type=float, default=120, help="seconds for one turn")
    options = parser.parse_args()
    import peers_workers  # noqa: F401  before the fork

    rows = token_rows()
    size = ROWS * NUM_MICRO_BATCHES
    batches = [
        [rows[(step * size + row) % len(rows)] for row in range(size)]
        for step in range(options.rounds + 1)
    ]
    tokens = [sum(map(len, batch)) for batch in batches]
    print(f"{len(rows)} rows of {min(map(len, rows))} to {max(map(len, rows))} tokens")
    with tempfile.TemporaryDirectory() as folder:
        peers = [Peer(name, batches, folder) for name in options.only.split(",")]
        for index in range(options.rounds + 1):  # the first one warms up
            for peer in peers[index % len(peers) :] + peers[: index % len(peers)]:
                if not peer.error:
                    peer.turn(options.limit)
        for peer in peers:
            peer.finish(options.limit)
            if peer.error:
                text = Path(f"{folder}/{peer.name}_0.log").read_text()
                print(f"--- {peer.name}\n{text[-3000:]}\n---")
    speeds = {
        peer.name: statistics.median(
            count / took for count, took in list(zip(tokens, peer.seconds, strict=True))[1:]
        )
        for peer in peers
        if not peer.error
    }
    best = max((v for name, v in speeds.items() if name.startswith("ours")), default=1.0)
    heads = ("peer", "tokens/s", "of the rounds", "of our best", "peak MiB", "above imports")
    print("| " + " | ".join((*heads, "first loss", "last loss")) + " |\n" + "|---" * 8 + "|")
    for peer in peers:
        print(report(peer, tokens, best))
    print(f"load of the machine at the end: {os.getloadavg()}")


if __name__ == "__main__":
    main()
