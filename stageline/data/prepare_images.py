"""Makes a processor ready for a run: its tiles, its limits, its cache."""

from typing import Any

from stageline.data.image_settings import ImageSettings
from stageline.data.images import ImageExpander
from stageline.data.tiling import Tiling, apply_tiling


def prepare_images(processor: Any, settings: ImageSettings, tiling: Tiling) -> None:
    """Changes the processor in place; one without images is left alone.

    Raises:
        UserError: it cannot do what `tiling` asks for.
    """
    apply_tiling(processor, tiling)
    expander = ImageExpander.of(processor)
    if expander is not None:
        expander.use(settings)
