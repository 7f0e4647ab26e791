"""Options of data: rows, batches, images, corpora, examples and reports."""

import functools
from typing import Any, Literal

from options.fields import OptionError, Options, free_option, mapping, option, side_option

BAD_ROWS = "most bad rows that are left out (listed in bad_rows.jsonl); one more ends the run"


class RowSettings(Options):
    """Batch and length: rows of a batch"""

    order: Literal["sorted", "given"] = option(
        "sorted", "sorted = like lengths share a micro-batch, given = as drawn", resume="steps"
    )
    last: Literal["drop", "pad"] = option(
        "drop", "last rows of an epoch: drop = leave out, pad = add the epoch's first rows"
    )
    pad_to_multiple_of: int = option(1, "row lengths are rounded up to a multiple of this", ge=1)


class BatchOptions(Options):
    """Batch and length"""

    batch_size: int = free_option(
        16, "samples per replica and batch; a step has --accumulate-steps batches", ge=1
    )
    micro_batch_size: int = option(2, "samples per micro-batch, on average", ge=1, resume="steps")
    accumulate_steps: int = free_option(1, "batches per optimizer step", ge=1)
    max_token_num: int = option(512, "max length of a sample, in tokens", ge=1)
    packing: bool = option(False, "pack separate samples into rows of --max-token-num tokens")
    rows: RowSettings = mapping(RowSettings)
    skip_bad_rows: int = option(0, f"{BAD_ROWS}; all are read before the first step", ge=0)
    preview: int = free_option(0, "training samples to print, loss tokens colored (0 = none)", ge=0)


def check_batches(run: BatchOptions) -> None:
    """Refuse a batch that does not fall into whole micro-batches."""
    if run.batch_size % run.micro_batch_size:
        fits = run.batch_size // run.micro_batch_size * run.micro_batch_size
        better = sorted({fits, fits + run.micro_batch_size} - {0})
        raise OptionError(
            f"--batch-size {run.batch_size} is not divisible by --micro-batch-size "
            f"{run.micro_batch_size}. Set --batch-size to {' or '.join(map(str, better))}."
        )


class ImageSettings(Options):
    """Data: images"""

    min_tiles: int | None = option(None, "least tiles of an image (InternVL, LLaVA-Next)", ge=1)
    max_tiles: int | None = option(
        None, "most tiles of an image (InternVL, LLaVA-Next, Idefics3, SmolVLM)", ge=1
    )
    min_pixels: int | None = option(None, "least pixels of an enlarged image (Qwen-VL)", ge=1)
    max_pixels: int | None = option(None, "most pixels of a scaled image (Qwen-VL)", ge=1)
    # Pillow treats more than at_most as an attack
    pixel_limit: int = free_option(
        50_000_000, "most pixels of an image", ge=1, le=178_000_000, shapes_answers=False
    )
    max_count: int | None = free_option(None, "most images of a sample", ge=1, shapes_answers=False)

    def tiling(self) -> dict[str, int | None]:
        """Return the tiling settings of the processor; None keeps its own."""
        others = ("pixel_limit", "max_count")
        return {name: value for name, value in vars(self).items() if name not in others}

    def limits(self) -> dict[str, Any]:
        """Return the limits of all images, by the engine's names."""
        return {"max_pixels": self.pixel_limit, "max_images": self.max_count}


class ImageOptions(Options):
    """Data: images"""

    images: ImageSettings = mapping(ImageSettings)


class CorpusRunOptions(Options):
    """Data: corpus"""

    global_batch_distributed: list[int] | None = option(
        None, "rows of each type in a batch, 64,64", excludes=("--mixture-weights",), to="dataset?"
    )
    mixture_weights: list[float] | None = option(None, "share of each type, 0.7,0.3", to="dataset?")
    drop_mode: str | None = option(
        None,
        "end of an epoch, and its last batch: first_ends_drop (0, the default), first_ends_fill "
        "(1), last_ends_drop (2), last_ends_fill (3)",
        to="dataset?",
    )


_fewshot = functools.partial(option, needs=("--num-fewshot 2",))


class FewshotSettings(Options):
    """Data: examples in the prompt"""

    split: Literal["train", "test"] = _fewshot("train", "split of the examples, never the sample")
    seed: int = _fewshot(0, "seed of the draw", ge=0)
    per_sample: bool = _fewshot(False, "draw examples for each sample, not once for all")


class BootstrapSettings(Options):
    """Output: bootstrap intervals of the report"""

    resamples: int = side_option(10_000, "draws per interval (0 = off)", ge=0, le=1_000_000)
    seed: int = side_option(0, "seed of the draws", ge=0)
