"""The options about data: rows, batches, images, corpora, examples and reports."""

from dataclasses import dataclass
from typing import Any, Literal

from options.fields import OptionError, free_option, option, option_fields, side_option, spelled


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data"""

    skip_bad_rows: int = option(
        0,
        "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run. All rows "
        "are then looked at before the first step",
        at_least=0,
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Batches"""

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


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Shapes"""

    micro_batch_order: Literal["sorted", "given"] = option(
        "sorted",
        "sorted: samples of near-equal length travel together; given: as drawn",
        resume="steps",
    )
    last_rows: Literal["drop", "pad"] = option(
        "drop",
        "rows that fill no whole step at the end of an epoch: drop = leave out, pad = add its "
        "first rows",
        in_check=False,
    )
    pad_to_multiple_of: int = option(
        1, "round the length of rows up to this, within --max-token-num", at_least=1
    )
    packing: bool = option(
        False, "several samples a row of --max-token-num tokens; none sees another", in_check=False
    )


def check_batches(run: BatchOptions) -> None:
    """Checks that a batch falls into whole micro-batches."""
    if run.batch_size % run.micro_batch_size:
        fits = run.batch_size // run.micro_batch_size * run.micro_batch_size
        better = sorted({fits, fits + run.micro_batch_size} - {0})
        raise OptionError(
            f"--batch-size {run.batch_size} is not divisible by --micro-batch-size "
            f"{run.micro_batch_size}. Whole micro-batches were expected, because a batch is cut "
            f"into equal ones. Set --batch-size to {' or '.join(map(str, better))}, or choose a "
            f"--micro-batch-size that divides {run.batch_size}."
        )


@dataclass(frozen=True, kw_only=True)
class PreviewOptions:
    """Preview"""

    preview: int = free_option(
        0,
        "training samples to show before a model is loaded, coloured by what is learnt; with "
        "--check-only the run then stops",
        at_least=0,
    )


@dataclass(frozen=True, kw_only=True)
class TilingOptions:
    """How images are cut and scaled"""

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

    def tiling(self) -> dict[str, int | None]:
        """What the processor is to do with images; None leaves it its own way."""
        return {name: getattr(self, name) for name in option_fields(TilingOptions)}


@dataclass(frozen=True, kw_only=True)
class ImageOptions(TilingOptions):
    """Images"""

    # more than this Pillow takes for an attack
    max_image_pixels: int = free_option(
        50_000_000,
        "largest image, width x height; one more is refused",
        at_least=1,
        at_most=178_000_000,
        shapes_answers=False,
    )
    max_images_per_sample: int | None = free_option(
        None, "most images of a sample; default: any number", at_least=1, shapes_answers=False
    )

    def image_limits(self) -> dict[str, Any]:
        """What holds for all images, by the engine's names."""
        return {
            "max_pixels": self.max_image_pixels,
            "max_images": self.max_images_per_sample,
        }


def check_images(run: ImageOptions) -> None:
    """Refuses limits that exclude each other."""
    for least, most in (("min_tiles", "max_tiles"), ("min_pixels", "max_pixels")):
        low, high = getattr(run, least), getattr(run, most)
        if low is not None and high is not None and low > high:
            raise OptionError(
                f"{spelled(least)} {low} is more than {spelled(most)} {high}. At most as much was "
                "expected, because an image must fit both: exchange them, or leave one out."
            )


@dataclass(frozen=True, kw_only=True)
class CorpusRunOptions:
    """Corpus"""

    global_batch_distributed: list[int] | None = option(
        None,
        "rows of each type in a global batch, 64,64; default: in proportion to the types' sizes",
        excludes={"--mixture-weights": "both say how much of each type is drawn"},
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


@dataclass(frozen=True, kw_only=True)
class FewshotOptions:
    """Examples in the prompt"""

    num_fewshot: int = option(
        0, "solved samples before each question: turns of a chat, or filled templates", at_least=0
    )
    fewshot_split: Literal["train", "test"] = option(
        "train",
        "split that they are drawn from; a sample is never its own example",
        needs={"--num-fewshot 2": "it says where examples come from"},
    )
    fewshot_seed: int = option(
        0,
        "seed of the draw",
        at_least=0,
        needs={"--num-fewshot 2": "it says how examples are drawn"},
    )
    fewshot_per_sample: bool = option(
        False,
        "draw for each sample anew; else all have the same",
        needs={"--num-fewshot 2": "it says how examples are drawn"},
    )


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Report"""

    compare_with: str | None = side_option(
        None,
        "predictions.jsonl of another run on the same samples: paired differences",
        is_path=True,
    )
    bootstrap_resamples: int = side_option(
        10_000, "draws of a bootstrap interval; 0: none", at_least=0, at_most=1_000_000
    )
    bootstrap_seed: int = side_option(0, "seed of these draws", at_least=0)
    skip_bad_rows: int = side_option(
        0,
        "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run",
        at_least=0,
    )
