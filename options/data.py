"""The options about data: rows, batches, images, corpora, examples and reports."""

from typing import Any, Literal

from options.fields import OptionError, Options, free_option, mapping, option, side_option


class RowSettings(Options):
    """Rows of a batch"""

    order: Literal["sorted", "given"] = option(
        "sorted",
        "sorted: samples of near-equal length share a micro-batch; given: as drawn",
        resume="steps",
    )
    last: Literal["drop", "pad"] = option(
        "drop",
        "rows that fill no whole step at the end of an epoch: drop = leave out, pad = add its "
        "first rows",
        in_check=False,
    )
    pad_to_multiple_of: int = option(
        1, "round the length of rows up to this, within --max-token-num", at_least=1
    )


class BatchOptions(Options):
    """Data and batches"""

    batch_size: int = free_option(
        16, "samples of one schedule step, per replica", at_least=1, is_common=True
    )
    micro_batch_size: int = option(
        2,
        "rows that travel together; of sorted ones the mean",
        at_least=1,
        is_common=True,
        resume="steps",
    )
    accumulate_steps: int = free_option(
        1, "batches of one optimizer step", at_least=1, in_check=False
    )
    max_token_num: int = option(512, "longest sample, in tokens", at_least=1, is_common=True)
    packing: bool = option(
        False, "several samples a row of --max-token-num tokens; none sees another", in_check=False
    )
    rows: RowSettings = mapping(RowSettings)
    skip_bad_rows: int = option(
        0,
        "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run. All rows "
        "are then looked at before the first step",
        at_least=0,
    )
    preview: int = free_option(
        0,
        "training samples to show before a model is loaded, coloured by what is learnt; with "
        "--check-only the run then stops",
        at_least=0,
    )


def check_batches(run: BatchOptions) -> None:
    """Checks that a batch falls into whole micro-batches."""
    if run.batch_size % run.micro_batch_size:
        fits = run.batch_size // run.micro_batch_size * run.micro_batch_size
        better = sorted({fits, fits + run.micro_batch_size} - {0})
        raise OptionError(
            f"--batch-size {run.batch_size} is not divisible by --micro-batch-size "
            f"{run.micro_batch_size}. Set --batch-size to {' or '.join(map(str, better))}, or "
            f"choose a --micro-batch-size that divides {run.batch_size}."
        )


class ImageSettings(Options):
    """Images"""

    min_tiles: int | None = option(
        None, "least tiles of an image (InternVL, LLaVA-Next); default: the processor's", at_least=1
    )
    max_tiles: int | None = option(
        None,
        "most tiles of an image, thumbnail not counted (InternVL, LLaVA-Next, Idefics3, SmolVLM); "
        "default: the processor's",
        at_least=1,
    )
    min_pixels: int | None = option(
        None, "smaller images are enlarged to so many pixels (Qwen-VL)", at_least=1
    )
    max_pixels: int | None = option(
        None, "larger images are scaled down to so many pixels (Qwen-VL)", at_least=1
    )
    # more than this Pillow takes for an attack
    pixel_limit: int = free_option(
        50_000_000,
        "largest image, width x height; one more is refused",
        at_least=1,
        at_most=178_000_000,
        shapes_answers=False,
    )
    max_count: int | None = free_option(
        None, "most images of a sample; default: any number", at_least=1, shapes_answers=False
    )

    def tiling(self) -> dict[str, int | None]:
        """What the processor is to do with images; None leaves it its own way."""
        others = ("pixel_limit", "max_count")
        return {name: value for name, value in vars(self).items() if name not in others}

    def limits(self) -> dict[str, Any]:
        """What holds for all images, by the engine's names."""
        return {"max_pixels": self.pixel_limit, "max_images": self.max_count}


class ImageOptions(Options):
    """Images"""

    images: ImageSettings = mapping(ImageSettings)


def check_images(run: ImageOptions) -> None:
    """Refuses limits that exclude each other."""
    for least, most in (("min_tiles", "max_tiles"), ("min_pixels", "max_pixels")):
        low, high = getattr(run.images, least), getattr(run.images, most)
        if low is not None and high is not None and low > high:
            raise OptionError(
                f"--images.{least} {low} is more than --images.{most} {high}. Exchange them, or "
                "leave one out."
            )


class CorpusRunOptions(Options):
    """Corpus"""

    global_batch_distributed: list[int] | None = option(
        None,
        "rows of each type in a global batch, 64,64; default: in proportion to the types' sizes",
        excludes=("--mixture-weights",),
        to="dataset?",
        in_check=False,
    )
    mixture_weights: list[float] | None = option(
        None,
        "share of each type in all that is drawn, 0.7,0.3, instead of whole rows a batch",
        to="dataset?",
    )
    drop_mode: str | None = option(
        None,
        "when an epoch ends and what fills it: first_ends_drop (the default, or 0), "
        "first_ends_fill (1), last_ends_drop (2), last_ends_fill (3)",
        to="dataset?",
    )


class FewshotSettings(Options):
    """Draw of the examples in the prompt"""

    split: Literal["train", "test"] = option(
        "train",
        "split that they are drawn from; a sample is never its own example",
        needs=("--num-fewshot 2",),
    )
    seed: int = option(0, "seed of the draw", at_least=0, needs=("--num-fewshot 2",))
    per_sample: bool = option(
        False, "draw for each sample anew; else all have the same", needs=("--num-fewshot 2",)
    )


class FewshotOptions(Options):
    """Examples in the prompt"""

    num_fewshot: int = option(
        0, "solved samples before each question: turns of a chat, or filled templates", at_least=0
    )
    fewshot: FewshotSettings = mapping(FewshotSettings)


class BootstrapSettings(Options):
    """Bootstrap intervals of the report"""

    resamples: int = side_option(
        10_000, "draws of an interval; 0: none", at_least=0, at_most=1_000_000
    )
    seed: int = side_option(0, "seed of these draws", at_least=0)


class ReportOptions(Options):
    """Report"""

    compare_with: str | None = side_option(
        None,
        "predictions.jsonl of another run on the same samples: paired differences",
        is_path=True,
    )
    bootstrap: BootstrapSettings = mapping(BootstrapSettings)
    skip_bad_rows: int = side_option(
        0,
        "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run",
        at_least=0,
    )
