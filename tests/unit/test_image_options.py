"""Limits of images, and what the options about tiles make of each family's processor."""

import math
import re

import pytest
import transformers
from PIL import Image

from options.fields import OptionError
from parse_args import parse_evaluate_args
from register import import_shelf
from stageline.data.batches.batch import encode_sample
from stageline.data.images.image_files import ImageFolders, ImageSettings
from stageline.data.images.images import ImageExpander
from stageline.data.images.tiling import Tiling, apply_tiling, match_config, prepare_images
from stageline.data.text.processor import load_processor, save_processor
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError
from tests.helpers.tiny_models import (
    IMAGE_TOKEN_ID,
    PROCESSOR_FAMILIES,
    tiny_processor,
    tiny_tokenizer,
)

import_shelf("models", "prompt", "prompt_fn", "dataset", "metric")

# width, height: square, small, large, and as long as the shape of a thread
SIZES = ((16, 16), (5, 7), (64, 33), (33, 64), (300, 200), (400, 3), (3, 400), (31, 150))


def processor_of(family: str):
    try:
        return tiny_processor(family)
    except ImportError as error:  # older releases of transformers need torchvision for some
        pytest.skip(str(error))


def plain(processor, size, text=None):
    """Process one image with transformers only."""
    text = text or processor.image_token
    return processor(text=[text], images=[[Image.new("RGB", size)]], return_tensors="pt")


def num_tokens(output) -> int:
    return int((output["input_ids"] == IMAGE_TOKEN_ID).sum())


def num_tiles(processor, size) -> int:
    """Tiles that come of an image, with a thumbnail or a picture of all of it."""
    pixels = plain(processor, size)["pixel_values"]
    return pixels.shape[1] if pixels.ndim == 5 else pixels.shape[0]


# -- what a family makes by itself --------------------------------------------------------------


@pytest.mark.parametrize("family", PROCESSOR_FAMILIES)
def test_text_and_pixels_agree_about_the_tokens(family):
    processor = processor_of(family)
    piece = Piece(processor.image_token, is_image=True)
    rendered = Rendered((piece, Piece("x")), is_chat=True)
    for size in SIZES:
        count = num_tokens(plain(processor, size))
        encoded = encode_sample(rendered, [Image.new("RGB", size)], processor=processor, name="row")
        assert encoded.input_ids.count(IMAGE_TOKEN_ID) == count


# -- tiles as they are asked for ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("internvl", {"max_tiles": 2}, {1, 3}),
        ("internvl", {"min_tiles": 2, "max_tiles": 3}, {3, 4}),
        ("llava_next", {"max_tiles": 2}, {3}),
        ("llava_next", {"min_tiles": 4}, {5}),
        ("idefics3", {"max_tiles": 10}, {4, 7, 10}),
        ("smolvlm", {"max_tiles": 8}, {3, 5}),
    ],
)
def test_tiles_of_each_family(family, options, expected, tmp_path):
    processor = processor_of(family)
    apply_tiling(processor, Tiling(**options))
    found = {num_tiles(processor, size) for size in SIZES}
    assert found == expected
    save_processor(processor, tmp_path)
    saved = load_processor(tmp_path)
    for size in SIZES:
        facts = ImageExpander.of(saved).facts(size)
        assert num_tiles(saved, size) == num_tiles(processor, size)
        assert facts.text.count(saved.image_token) == num_tokens(plain(saved, size))


@pytest.mark.parametrize("options", [{"max_pixels": 300}, {"min_pixels": 500}])
def test_pixels_of_qwen(options, tmp_path):
    processor = processor_of("qwen2_5_vl")
    save = tmp_path / "saved"
    apply_tiling(processor, Tiling(**options))
    save_processor(processor, save)
    for size in ((16, 16), (64, 33), (31, 150)):
        area = int(plain(load_processor(save), size)["image_grid_thw"].prod()) * 4 * 4
        assert area <= options.get("max_pixels", math.inf)
        assert area >= options.get("min_pixels", 0)
        assert area == int(plain(processor, size)["image_grid_thw"].prod()) * 4 * 4


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llava", {"max_tiles": 2}, "same number of tiles"),
        ("qwen2_5_vl", {"max_tiles": 2}, "--images.max_pixels"),
        ("internvl", {"max_pixels": 9999}, "--images.max_tiles"),
        ("idefics3", {"min_tiles": 2}, "no least number"),
        ("llava_next", {"min_tiles": 3, "max_tiles": 3}, "grids of 2, 4 tiles"),
        ("qwen2_5_vl", {"max_pixels": 9}, "--images.min_pixels and --images.max_pixels"),
    ],
)
def test_what_a_processor_cannot_do_is_refused(family, options, words):
    processor = processor_of(family)
    before = processor.image_processor.to_dict()
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        apply_tiling(processor, Tiling(**options))
    assert "--" in str(caught.value) and type(processor.image_processor).__name__ in str(
        caught.value
    )
    assert processor.image_processor.to_dict() == before


def test_mllama_refuses_and_so_does_a_tokenizer():
    """Refuse another number of tiles: the ids of aspect ratios are trained for one number."""
    images = transformers.MllamaImageProcessorPil()

    class Processor:
        image_processor = images

    for processor in (Processor(), tiny_tokenizer()):
        with pytest.raises(UserError, match="--images.max_tiles 2"):
            apply_tiling(processor, Tiling(max_tiles=2))


def test_the_model_of_llava_next_counts_as_its_processor():
    processor = processor_of("llava_next")
    config = transformers.LlavaNextConfig()
    apply_tiling(processor, Tiling(max_tiles=2))
    match_config(config, processor)
    assert config.image_grid_pinpoints == [[16, 32], [32, 16]]
    other = transformers.LlavaConfig()
    match_config(other, processor)
    assert not hasattr(other, "image_grid_pinpoints")


# -- limits -------------------------------------------------------------------------------------


def test_an_image_above_the_limit_is_refused_with_row_file_and_size(tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    image = ImageFolders([tmp_path]).open("a.png", source="rows:7")
    rendered = Rendered((Piece("<image>", is_image=True),), is_chat=True)
    processor = tiny_processor("llava")
    prepare_images(processor, ImageSettings(max_pixels=1199), Tiling())
    with pytest.raises(DataError, match=r"rows:7: .*a\.png of 40 x 30 .*1200 pixels") as caught:
        encode_sample(rendered, [image], processor=processor, name="rows:7")
    assert "at most 1199" in str(caught.value) and "--images.pixel_limit" in str(caught.value)
    prepare_images(processor, ImageSettings(max_pixels=1200), Tiling())
    assert len(encode_sample(rendered, [image], processor=processor, name="rows:7"))


def test_too_many_images_of_a_sample():
    processor = tiny_processor("llava")
    prepare_images(processor, ImageSettings(max_pixels=1000, max_images=2), Tiling())
    images = [Image.new("RGB", (9, 9))] * 3
    rendered = Rendered(tuple(Piece("<image>", is_image=True) for _ in images), is_chat=True)
    with pytest.raises(DataError, match="row 4: it has 3 images; at most 2") as caught:
        encode_sample(rendered, images, processor=processor, name="row 4")
    assert "--images.max_count" in str(caught.value)


# -- the options themselves ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--image-cache", "a", "--token-cache", "b"), "a, --token-cache b: there is no such"),
        (("--image-cache-gib", "3"), "train with --num-workers 1"),
        (("--images.pixel_limit", "200000000"), "at most 178000000"),
    ],
)
def test_options_that_cannot_be(words, told):
    keys = (
        "--model generate --builder auto --dataset jsonl --prompt question --prompt-fn fill "
        "--image-token auto --metric exact_match"
    ).split()
    with pytest.raises(OptionError) as caught:
        parse_evaluate_args([*keys, *words])
    assert told in str(caught.value)
