"""How long the first and the last stage wait for images, with and without workers.

python benchmarks/image_loading.py --seconds 1 --steps 6

Photographs made here (JPEG, several a sample), InternVL's processor with its real tiles of 448
pixels, the loader and the collate part of a training run. The step itself is a sleep: it stands for
a GPU that computes while the processor's cores are free. Each line is a process of its own. Prints
a table in Markdown.
"""

import argparse
import functools
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy
import torch
import transformers
from PIL import Image

from dataset import sft
from prompt_fn import auto, fill
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.images.image_files import ImageSettings
from stageline.data.images.tiling import Tiling, prepare_images
from stageline.data.rows.json_lines import JsonLines
from stageline.data.text.processor import compose_processor
from tests.helpers.tiny_datasets import write_lines
from tests.helpers.tiny_models import tiny_processor

NUM_STAGES = 2
IMAGES_PER_SAMPLE = 3
ROWS_PER_STEP = 4


def real_tiles() -> Any:
    """InternVL's processor as its checkpoints have it; the tokenizer is a tiny one."""
    tiny = tiny_processor("internvl")
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448},
        min_patches=1,
        max_patches=12,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    return compose_processor(
        "InternVLProcessor",
        image_processor=images,
        tokenizer=tiny.tokenizer,
        chat_template=tiny.chat_template,
        image_seq_length=256,
    )


def make_data(folder: Path, *, num_rows: int, side: int) -> None:
    """Photographs: smooth with some grain, of eight sizes, and rows that name them."""
    draw = numpy.random.default_rng(0)
    rows = []
    for row in range(num_rows):
        names = []
        for number in range(IMAGES_PER_SAMPLE):
            width = side + 16 * ((row * IMAGES_PER_SAMPLE + number) % 8)
            height = side * 3 // 4
            small = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=numpy.uint8))
            pixels = numpy.asarray(small.resize((width, height), Image.Resampling.BICUBIC))
            grain = draw.integers(-6, 7, pixels.shape)
            picture = Image.fromarray((pixels + grain).clip(0, 255).astype(numpy.uint8))
            names.append(f"{row}-{number}.jpg")
            picture.save(folder / names[-1], quality=90)
        rows.append({"id": str(row), "question": "What is it?", "answer": "7", "image": names})
    write_lines(folder / "rows.jsonl", rows)


def run_epoch(folder: str, stage: int, num_workers: int, seconds: float, results: Any) -> None:
    """One epoch in a new process: what each step waited, and the time of cores it took here."""
    torch.set_num_threads(1)
    processor = real_tiles()
    images = ImageSettings()
    prepare_images(processor, images, Tiling())
    dataset = JsonLines(dataset_path=f"{folder}/rows.jsonl", test_size=0)
    collate = functools.partial(
        sft,
        prompt="[IMAGE]\n[QUESTION]\n[ANSWER]",
        prompt_fn=fill,
        image_token=auto,
        processor=processor,
        pad_token_id=0,
        max_token_num=1 << 16,
        stage=stage,
        num_stages=NUM_STAGES,
    )
    loader = MicroBatchLoader(
        dataset,
        collate=collate,
        batch_size=ROWS_PER_STEP,
        micro_batch_size=2,
        num_workers=num_workers,
    )
    steps, waits, cores = iter(loader), [], []
    for _ in range(len(loader)):
        start, busy = time.perf_counter(), time.process_time()
        next(steps)
        waits.append(time.perf_counter() - start)
        cores.append(time.process_time() - busy)
        time.sleep(seconds)
    results.put((waits, cores))


def measure(*arguments: Any) -> tuple[list[float], list[float]]:
    """`run_epoch` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=run_epoch, args=(*arguments, results))
    process.start()
    found = results.get()
    process.join()
    return found


def report(options: argparse.Namespace, folder: Path) -> None:
    """The table: first step apart, since it has nothing to overlap with."""
    print("| stage | workers | first step, s | wait of later steps, s | share | cores, s |")
    print("|---|---|---|---|---|---|")
    for stage in (0, NUM_STAGES - 1):
        for num_workers in options.workers:
            waits, cores = measure(str(folder), stage, num_workers, options.seconds)
            later, busy = (sum(times[1:]) / len(times[1:]) for times in (waits, cores))
            share = 100 * later / (later + options.seconds)
            name = "first" if stage == 0 else "last"
            print(
                f"| {name} | {num_workers} | {waits[0]:.2f} | {later:.3f} | {share:.0f} % | "
                f"{busy:.3f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of an epoch")
    parser.add_argument("--seconds", type=float, default=1.0, help="that a step computes")
    parser.add_argument("--side", type=int, default=1280, help="width of a picture, at least")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, transformers {transformers.__version__}; {ROWS_PER_STEP} samples a "
        f"step with {IMAGES_PER_SAMPLE} pictures of {options.side}..{options.side + 112} x "
        f"{options.side * 3 // 4}, InternVL, up to 12 tiles of 448; a step computes "
        f"{options.seconds} s\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder), num_rows=options.steps * ROWS_PER_STEP, side=options.side)
        report(options, Path(folder))


if __name__ == "__main__":
    main()
