"""What saving costs training: ours, DCP's async_save and torch.save in turn.

Two ranks of one thread train a llama with AdamW in float32. A round gives each way its turn: steps
without saving, then a save, then steps until nothing is written any more. The stall is what the
second part takes longer than so many steps without saving. The disk's own speed, a plain write of
as many bytes with fsync, is taken in the same round. Prints a finished table; figures:
benchmarks/checkpoint.md. Usage: checkpoint.py [--sizes 20M,135M] [--rounds 3] [--folder DIR]
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.checkpoint.writer import CheckpointWriter
from stageline.pipeline.runner import PipelineRunner
from stageline.training.optimizers import optimizer_groups
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks

# hidden size, inner size, layers, heads, heads of keys, vocabulary; the second is SmolLM2-135M
SIZES = {"20M": (384, 1024, 10, 6, 2, 4096), "135M": (576, 1536, 30, 9, 3, 49152)}
WAYS = ("ours", "async_save", "torch.save", "ours, waiting")
IN_BACKGROUND = ("ours", "async_save")
SEQUENCE = 32
NUM_MICRO_BATCHES = 2
PLAIN_STEPS = 3
MIB = 1 << 20


def config_of(size):
    hidden, inner, layers, heads, keys, vocabulary = SIZES[size]
    return AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )


def tokenizer_of(config):
    """As many words as the model knows: a checkpoint has its tokenizer beside it."""
    words = {f"word{index}": index for index in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="word0")


def make_step(config, rank):
    stage = CausalLMStage(config, stage=rank, num_stages=2)
    init_split_model(stage, seed=0, device="cpu", dtype=torch.float32)
    stage.frozen()
    return TrainStep(
        PipelineRunner(stage.train(), device=torch.device("cpu")),
        make_optimizer=lambda parameters: torch.optim.AdamW(
            optimizer_groups(parameters, weight_decay=0.0), lr=1e-5
        ),
        loss_fn=sft,
        learning_rate=lambda step: 1e-5,
    )


def micro_batches(config):
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_MICRO_BATCHES, 1, SEQUENCE)
    ids = torch.randint(0, config.vocab_size, shape, generator=generator)
    return [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": i} for i in ids]


def plain_state(train_step):
    """Weights and moments by name: what the other ways are given."""
    parameters = train_step.weights.parameters
    state = train_step.optimizer.state
    return {
        "weights": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": {name: dict(state[parameter]) for name, parameter in parameters.items()},
    }


class Ways:
    """Each way to save: starts one save, and says whether it is still being written."""

    def __init__(self, train_step, processor, folder, rank):
        self.train_step, self.folder, self.rank = train_step, folder, rank
        self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=5))
        self.count = 0
        self.future = None
        self.writers = {waits: self._writer(processor, waits) for waits in (False, True)}

    def _writer(self, processor, waits):
        return CheckpointWriter(
            self.folder / f"ours_{waits}",
            stages=self.train_step.runner.local.models,
            processor=processor,
            optimizer=self.train_step.optimizer,
            parameters=self.train_step.weights.parameters,
            rows={},
            with_weights=False,
            group=dist.new_group(backend="gloo"),
            waits=waits,
        )

    def save(self, way):
        self.count += 1
        folder = self.folder / f"other_{self.count}"
        if way.startswith("ours"):
            self.writers["waiting" in way].save(self.count, {})
        elif way == "async_save":
            state = plain_state(self.train_step)
            self.future = dcp.async_save(state, checkpoint_id=folder, process_group=self.group)
        else:
            folder.mkdir(exist_ok=True)
            torch.save(plain_state(self.train_step), folder / f"{self.rank}.pt")

    def is_writing(self, way):
        thread = self.writers[False]._thread
        if way == "ours":
            return thread is not None and thread.is_alive()
        return way == "async_save" and not self.future.done()

    def finish(self, way):
        """Raises what went wrong; frees the disk."""
        for writer in self.writers.values():
            writer.finish()
        if way == "async_save":
            self.future.result()
        size = sum(p.stat().st_size for p in self.folder.rglob("*") if p.is_file())
        dist.barrier()
        if self.rank == 0:
            for path in [*self.folder.glob("ours*/*"), *self.folder.glob("other*")]:
                shutil.rmtree(path)
            os.sync()
        dist.barrier()
        return size


def cpu_of_both(seconds):
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told)
    return told.item()


def anyone(flag):
    told = torch.tensor(float(flag))
    dist.all_reduce(told)
    return told.item() > 0


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def one_turn(step, ways, way):
    """Figures of one save: the call, its stall, how long until it was on the disk."""
    plain = []
    worked = time.process_time()
    for _ in range(PLAIN_STEPS):
        plain.append(timed(lambda: (step(), anyone(False))))
    plain = statistics.median(plain)
    plain_cpu = (time.process_time() - worked) / PLAIN_STEPS
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    call = timed(lambda: ways.save(way))
    steps, is_writing = 0, True
    while is_writing or not steps:
        step()
        steps += 1
        is_writing = anyone(ways.is_writing(way))
    total = time.perf_counter() - start
    cpu = cpu_of_both(time.process_time() - worked - steps * plain_cpu)
    saved = total if way in IN_BACKGROUND else call
    size = ways.finish(way)
    stall = total - steps * plain
    return {"step": plain, "call": call, "stall": stall, "saved": saved, "size": size, "cpu": cpu}


def disk_seconds(folder, rank, num_bytes):
    """Both ranks write their half, one after another block, then fsync."""
    block = torch.randint(0, 255, (8 * MIB,), dtype=torch.uint8).numpy()
    path = folder / f"plain_{rank}"

    def write():
        with path.open("wb", buffering=0) as file:
            for _ in range(max(1, num_bytes // 2 // len(block))):
                file.write(block)
            os.fsync(file.fileno())
        dist.barrier()

    dist.barrier()
    seconds = timed(write)
    path.unlink()
    return seconds


def compare(rank, size, rounds, folder):
    config = config_of(size)
    train_step, batches = make_step(config, rank), micro_batches(config)
    processor = tokenizer_of(config)
    ways = Ways(train_step, processor, Path(folder), rank)

    def step():
        train_step(batches, step=0)

    for _ in range(2):
        step()
    turns = {way: [] for way in WAYS}
    disk = []
    for index in range(rounds + 1):
        for way in WAYS:
            turn = one_turn(step, ways, way)
            if index:  # the first round warms up
                turns[way].append(turn)
        if index:
            disk.append(disk_seconds(Path(folder), rank, turn["size"]))
    return {"turns": turns, "disk": disk}


def table(size, figures):
    """Medians over the rounds, as Markdown."""
    disk = statistics.median(figures["disk"])
    lines = [
        f"{size}: a save is {figures['turns']['ours'][0]['size'] / MIB:,.0f} MiB",
        "",
        "| way | step s | save call s | stall s | of the rounds | CPU s of both | "
        "on the disk after s | MiB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, turns in figures["turns"].items():
        of = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        stalls = [turn["stall"] for turn in turns]
        lines.append(
            f"| {way} | {of['step']:.3f} | {of['call']:.3f} | {of['stall']:.3f} | "
            f"{min(stalls):.3f} - {max(stalls):.3f} | {of['cpu']:.2f} | {of['saved']:.2f} | "
            f"{of['size'] / MIB / of['saved']:,.0f} |"
        )
    written = figures["turns"]["ours"][0]["size"] / MIB / disk
    lines.append(f"| plain write and fsync | | | | | | {disk:.2f} | {written:,.0f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="20M,135M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="on the disk to be measured")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    for size in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            figures = run_ranks(compare, 2, size, arguments.rounds, folder, timeout=900)[0]
        print(f"\n{table(size, figures)}", flush=True)
    print(f"\nLoad: {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end (itself: 2).")


if __name__ == "__main__":
    main()
