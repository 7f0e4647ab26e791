"""Bad images (cases G19 to G24): named with their row, and nothing is decoded that may not be."""

import io
import struct
import warnings
import zlib

import numpy
import pytest
from PIL import Image

from prompt_fn import auto, fill
from register import dataset_register, import_shelf
from stageline.data.batches.preflight import preflight
from stageline.data.images.images import MAX_PIXELS, check_image, decode_image
from stageline.data.rows.bad_rows import BadRows
from stageline.errors import DataError
from tests.helpers.tiny_datasets import write_lines
from tests.helpers.tiny_models import tiny_processor

import_shelf("dataset")


def png(width, height, *, bits=1):
    """Return a whole gray PNG of zeros; it packs to a thousandth of its pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer, row = zlib.compressobj(9), bytes(1 + (width * bits + 7) // 8)
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def saved(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(size=(60, 50), mode="RGB"):
    values = numpy.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    return Image.fromarray(values).convert(mode)


def dataset(folder, name, content=None, **options):
    """Return a dataset of one row with that image; the file is written if there is content."""
    if content is not None:
        (folder / name).write_bytes(content)
    file = folder / "rows.jsonl"
    write_lines(file, [{"question": "q", "answer": "a", "image": name}])
    return dataset_register["jsonl"](dataset_path=str(file), test_size=0, **options)


def look(rows, **options):
    """Check the data as a run does before it loads a model."""
    return preflight(
        rows,
        prompt="[IMAGE][QUESTION] [ANSWER]",
        prompt_fn=fill,
        image_token=auto,
        processor=tiny_processor("llava"),
        max_token_num=400,
        **options,
    )


def refused(rows, *words):
    """The look refuses the row, with exit code 3 and all words; it may be left out."""
    with pytest.raises(DataError) as caught:
        look(rows)
    assert caught.value.exit_code == 3
    for word in ("rows.jsonl:1", *words):
        assert word in str(caught.value)
    bad = BadRows(1)
    assert look(rows, bad_rows=bad).bad == [0] and len(bad) == 1


BAD_FILES = {
    "g19_missing": ("gone.jpg", None, "there is no image gone.jpg"),
    "g19_empty": ("a.png", b"", "a.png does not decode"),
    "g19_html_as_jpg": ("a.jpg", b"<!DOCTYPE html><html>404", "a.jpg does not decode"),
    "g19_other_format": ("a.tiff", saved(noise(), "TIFF"), "one of PNG, JPEG"),
    "g20_truncated_jpeg": ("a.jpg", saved(noise(), "JPEG")[:1500], "a.jpg does not", "truncated"),
    "g20_truncated_png": ("a.png", saved(noise(), "PNG")[:2000], "a.png does not", "truncated"),
    "g21_bomb_20000": ("a.png", png(20000, 20000), "a.png does not", "400000000 pixels"),
    "g21_bomb_10000": ("a.png", png(10000, 10000), "a.png of 10000 x 10000", "100000000 pixels"),
    "g22_1x30000": ("a.png", png(1, 30000), "a.png of 1 x 30000", "more than 200 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_image(case, tmp_path):
    """A bad image file: the row, the file and the reason are named, before a model is loaded."""
    name, content, *words = BAD_FILES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        refused(dataset(tmp_path, name, content), *words)


def test_g21_g22_images_from_any_dataset():
    """A dataset opened the image by itself: the limits hold too; white of 32 bits is undefined."""
    bomb = Image.open(io.BytesIO(png(8000, 8000)))
    said = {f"64000000 pixels; at most {MAX_PIXELS}": bomb}
    said |= {rf"32 bits \(mode {mode}\)": Image.new(mode, (4, 4)) for mode in "IF"}
    for words, image in said.items():
        for function in (check_image, decode_image):
            with pytest.raises(DataError, match=rf"row 5: .*{words}"):
                function(image, name="row 5")


def _gradient_16():
    return Image.fromarray((numpy.arange(4096, dtype=numpy.uint16) * 16).reshape(64, 64))


TAKEN = {
    "g22_1x1": (lambda: png(1, 1), (1, 1), None),
    "g22_cmyk": (lambda: saved(noise(mode="CMYK"), "JPEG"), (60, 50), None),
    "g22_16_bit": (lambda: saved(_gradient_16(), "PNG"), (64, 64), numpy.arange(4096) // 16),
    "g22_one_bit": (lambda: png(40, 40), (40, 40), numpy.zeros(1600)),
    "g22_animated_gif": (
        lambda: saved(Image.new("L", (30, 20), 10), "GIF", save_all=True,
                      append_images=[Image.new("L", (30, 20), 200)]),
        (30, 20), numpy.full(600, 10),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_unusual_image(case, tmp_path):
    """An unusual image: taken, converted to RGB of 8 bits; of an animation the first frame."""
    make, size, values = TAKEN[case]
    rows = dataset(tmp_path, "a.png", make())
    assert look(rows).num_checked == 1
    image = decode_image(rows[0][0][0], name="row")
    assert (image.mode, image.size) == ("RGB", size)
    if values is not None:
        found = numpy.asarray(image)[..., 0].ravel().astype(int)
        assert numpy.abs(found - values).max() <= 1


# -- names that lead elsewhere -----------------------------------------------------------------


@pytest.fixture
def house(tmp_path):
    """Return a data folder, and a picture outside of it that no row may reach."""
    (tmp_path / "data").mkdir()
    (tmp_path / "outside").mkdir()
    noise().save(tmp_path / "outside" / "secret.png")
    return tmp_path


ESCAPES = {
    "g23_parent": "../outside/{}.png",
    "g23_etc_passwd": "../../../../../../../../../etc/{}",
    "g23_absolute": "{root}/outside/{}.png",
}


@pytest.mark.parametrize("case", ESCAPES)
def test_name_that_leads_out(case, house):
    """An image name that leads out of the data: refused, in the same words if there is no file."""
    said = []
    for name in ("passwd", "nobody") if "passwd" in case else ("secret", "absent"):
        path = ESCAPES[case].format(name, root=house)
        with pytest.raises(DataError) as caught:
            dataset(house / "data", path)
        assert "rows.jsonl:1: sample rows-1: the image name" in str(caught.value)
        assert "leads out of the dataset's folders" in str(caught.value)
        said.append(str(caught.value).replace(name, "X"))
    assert said[0] == said[1]


@pytest.mark.parametrize("target", ["secret.png", "absent.png"])
def test_g23_link_that_leads_out(target, house):
    """A link in the data folder to a file elsewhere: refused, whether or not the file exists."""
    (house / "data" / "a.png").symlink_to(house / "outside" / target)
    rows = dataset(house / "data", "a.png")
    refused(rows, "'a.png' leads out")
    (house / "data" / "below").symlink_to(house / "outside")
    refused(dataset(house / "data", f"below/{target}"), "leads out")


def test_g23_names_that_stay(house):
    """Names that stay below the data, and folders that are links themselves: taken."""
    (house / "data" / "images").symlink_to(house / "outside")  # pictures on another disk
    noise().save(house / "data" / "a.png")
    (house / "data" / "below").mkdir()
    (house / "data" / "b.png").symlink_to(house / "data" / "a.png")
    for name in (
        "a.png", "b.png", "./a.png", "below/../a.png", "secret.png", "images/secret.png",
        f"{house}/data/a.png", f"{house}/outside/secret.png",
    ):  # fmt: skip
        assert dataset(house / "data", name)[0][0][0].size == (60, 50), name
    elsewhere = dataset(
        house / "data", f"{house}/outside/secret.png", image_path=f"{house}/outside"
    )
    assert elsewhere[0][0][0].size == (60, 50)
    with pytest.raises(DataError, match="leads out"):
        dataset(house / "data", f"{house}/data/a.png", image_path=f"{house}/outside")
