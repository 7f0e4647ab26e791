"""The options of a run about bad data."""

from dataclasses import dataclass
from typing import Any, Literal

from options.fields import OptionError, option, spelled


@dataclass(kw_only=True)
class DataOptions:
    """Data"""

    skip_bad_rows: int = option(
        0,
        "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run. All rows "
        "are then looked at before the first step",
        at_least=0,
    )


# -- the option that shows samples before a run ---------------------------------------------------


@dataclass(kw_only=True)
class PreviewOptions:
    """Preview"""

    preview: int = option(
        0,
        "training samples to show before a model is loaded, coloured by what is learnt; with "
        "--check-only nothing else happens",
        at_least=0,
    )


# -- the options about images, of training and evaluation alike, and what they must be together ---


@dataclass(kw_only=True)
class ImageOptions:
    """Images"""

    image_cache: str | None = option(
        None,
        "folder that keeps processed images for later epochs and runs; default: none is kept",
        is_output=True,
    )
    image_cache_gib: float = option(
        20.0, "size at which nothing more is added to --image-cache", at_least=0
    )
    # more than this Pillow takes for an attack
    max_image_pixels: int = option(
        50_000_000, "largest image, width x height; one more is refused", at_least=1,
        at_most=178_000_000,
    )  # fmt: skip
    max_images_per_sample: int | None = option(
        None, "most images of a sample; default: any number", at_least=1
    )
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

    def image_limits(self) -> dict[str, Any]:
        """What holds for all images, by the engine's names."""
        return {
            "max_pixels": self.max_image_pixels,
            "max_images": self.max_images_per_sample,
            "cache_folder": self.image_cache,
            "cache_gib": self.image_cache_gib,
        }

    def tiling(self) -> dict[str, int | None]:
        """What the processor is to do with images; None leaves it its own way."""
        names = ("min_tiles", "max_tiles", "min_pixels", "max_pixels")
        return {name: getattr(self, name) for name in names}


def check_images(run: ImageOptions) -> None:
    """Refuses limits that exclude each other and a size of no cache."""
    for least, most in (("min_tiles", "max_tiles"), ("min_pixels", "max_pixels")):
        low, high = getattr(run, least), getattr(run, most)
        if low is not None and high is not None and low > high:
            raise OptionError(
                f"{spelled(least)} {low} is more than {spelled(most)} {high}. At most as much was "
                "expected, because an image must fit both: exchange them, or leave one out."
            )
    default = type(run).__dataclass_fields__["image_cache_gib"].default
    if run.image_cache is None and run.image_cache_gib != default:
        raise OptionError(
            f"--image-cache-gib {run.image_cache_gib:g} came without --image-cache. It is the size "
            "of that folder, and nothing is kept without one. Add --image-cache FOLDER."
        )


# -- the options of a run about token ids that are kept -------------------------------------------


@dataclass(kw_only=True)
class TokenCacheOptions:
    """Token cache"""

    token_cache: str | None = option(
        None,
        "folder that keeps the token ids of all rows for later epochs and runs; default: none is "
        "kept",
        is_output=True,
    )
    token_cache_workers: int = option(
        0, "processes that fill --token-cache before training; 0: the run's own", at_least=0
    )


def check_token_cache(run: TokenCacheOptions) -> None:
    """Refuses processes that would fill nothing."""
    if run.token_cache_workers and run.token_cache is None:
        raise OptionError(
            f"--token-cache-workers {run.token_cache_workers} came without --token-cache. They "
            "fill that folder, and nothing is kept without one. Add --token-cache FOLDER."
        )


# -- the options of a run on a pre-training corpus: what a batch has of each type of text ---------

# of all other datasets, rows are drawn evenly
_ONLY_CORPUS = ("global_batch_distributed", "mixture_weights", "drop_mode")


@dataclass(kw_only=True)
class CorpusRunOptions:
    """Corpus"""

    global_batch_distributed: list[int] | None = option(
        None,
        "rows of each type in a global batch, 64,64; default: in proportion to the types' sizes",
    )
    mixture_weights: list[float] | None = option(
        None, "share of each type in all that is drawn, 0.7,0.3, instead of whole rows a batch"
    )
    drop_mode: str | None = option(
        None,
        "when an epoch ends and what fills it: first_ends_drop (the default, or 0), "
        "first_ends_fill (1), last_ends_drop (2), last_ends_fill (3)",
    )


def check_corpus_run(run: CorpusRunOptions, *, dataset_key: str, has_types: bool) -> None:
    """Refuses a mixture of a dataset without types, and two mixtures at once.

    Raises:
        OptionError: names the option.
    """
    given = [name for name in _ONLY_CORPUS if getattr(run, name) is not None]
    if given and not has_types:
        option_name = "--" + given[0].replace("_", "-")
        raise OptionError(
            f"{option_name} came with --dataset {dataset_key}. --dataset corpus was expected, "
            f"because rows of other datasets have no types to choose from: leave {option_name} "
            "out; --dataset sets has ways of its own to mix (--dataset.mix)."
        )
    if run.global_batch_distributed is not None and run.mixture_weights is not None:
        raise OptionError(
            "--global-batch-distributed and --mixture-weights were both given. One of them was "
            "expected, because both say how much of each type is drawn: leave one out."
        )


# -- the options of examples that a model is shown before each question of an evaluation ----------

NAMES = ("num-fewshot", "fewshot-split", "fewshot-seed", "fewshot-per-sample")


@dataclass(kw_only=True)
class FewshotOptions:
    """Examples in the prompt"""

    num_fewshot: int = option(
        0, "solved samples before each question: turns of a chat, or filled templates", at_least=0
    )
    fewshot_split: Literal["train", "test"] = option(
        "train", "split that they are drawn from; a sample is never its own example"
    )
    fewshot_seed: int = option(0, "seed of the draw", at_least=0)
    fewshot_per_sample: bool = option(False, "draw for each sample anew; else all have the same")


# -- the options of an evaluation's report --------------------------------------------------------


@dataclass(kw_only=True)
class ReportOptions:
    """Report"""

    compare_with: str | None = option(
        None, "predictions.jsonl of another run on the same samples: paired differences",
        is_path=True,
    )  # fmt: skip
    bootstrap_resamples: int = option(
        10_000, "draws of a bootstrap interval; 0: none", at_least=0, at_most=1_000_000
    )
    bootstrap_seed: int = option(0, "seed of these draws", at_least=0)
    skip_bad_rows: int = option(
        0, "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run",
        at_least=0,
    )  # fmt: skip
