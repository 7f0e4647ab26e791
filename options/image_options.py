"""The options about images, of training and evaluation alike, and what they must be together."""

from dataclasses import dataclass
from typing import Any

from options.fields import OptionError, option, spelled


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
