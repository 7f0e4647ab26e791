"""The default job's processor. tests/scripts/test_docs_jobs.py runs every file of examples/."""

import runpy
from pathlib import Path

from PIL import Image

from stageline.data.images.images import ImageExpander

ROOT = Path(__file__).resolve().parents[2]


def test_the_default_job_reads_a_picture_as_one_tile():
    """So its four tokens; tiles took most of its time, on the first stage, and taught nothing."""
    module = runpy.run_path(str(ROOT / "scripts/make_digits_model.py"))
    processor = module["make_processor"](module["make_tokenizer"]())
    expander = ImageExpander.of(processor)
    text = expander.facts((32, 32)).text
    assert text.count("<IMG_CONTEXT>") == module["num_image_tokens"]() == 4
    assert len(expander.pixels([[Image.new("RGB", (32, 32))]])["pixel_values"]) == 1
