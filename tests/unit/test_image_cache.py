"""The image cache: every bit as without it, any number of writers, nothing damaged is believed."""

import multiprocessing
import os
import shutil
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from stageline.data.batches.batch import add_image_inputs
from stageline.data.images.image_cache import ImageCache, find_layout
from stageline.data.images.image_files import FileFacts, ImageFolders, ImageIndex
from stageline.data.images.image_settings import ImageSettings, using_images
from stageline.data.images.images import ImageExpander, decode_image
from tests.helpers.tiny_models import PROCESSOR_FAMILIES, tiny_processor

GIB = 2**30
# of each row: several, none; PNG with alpha, a turned photograph, a palette
ROWS = (("wide.jpg", "alpha.png"), (), ("turned.jpg",), ("palette.gif", "high.png", "wide.jpg"))


@pytest.fixture(scope="module", params=PROCESSOR_FAMILIES)
def family(request):
    try:
        tiny_processor(request.param)
    except ImportError as error:  # older releases of the library want torchvision for some
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def folder(tmp_path):
    return make_pictures(tmp_path / "data")


def make_pictures(folder: Path) -> Path:
    folder.mkdir()
    draw = numpy.random.default_rng(0)

    def noise(width, height, channels=3):
        return Image.fromarray(draw.integers(0, 256, (height, width, channels), numpy.uint8))

    noise(60, 24).save(folder / "wide.jpg")
    noise(33, 30, 4).save(folder / "alpha.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(50, 20).save(folder / "turned.jpg", exif=exif)
    noise(20, 41).convert("P").save(folder / "palette.gif")
    noise(21, 90).save(folder / "high.png")
    return folder


def expander_with(family: str, cache: ImageCache | None) -> ImageExpander:
    expander = ImageExpander.of(tiny_processor(family))
    expander.use(ImageSettings(cache=cache))
    return expander


def inputs(family: str, folder: Path, cache: ImageCache | None, *, stage: int = 0, rows=ROWS):
    """What one process makes of the rows; with objects of its own, as a new process has."""
    expander = expander_with(family, cache)
    with using_images(expander.settings):
        folders = ImageFolders([folder])
    images = [[folders.open(name, source="row") for name in row] for row in rows]
    batch = {"input_ids": torch.zeros(len(rows), 4, dtype=torch.long)}
    names = ["row"] * len(rows)
    processor = expander.processor
    add_image_inputs(batch, images, processor=processor, names=names, with_pixels=stage == 0)
    return batch


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def make_cache(tmp_path: Path, gib: float = 1) -> ImageCache:
    return ImageCache(tmp_path / "cache", max_bytes=int(gib * GIB))


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/pixels").rglob("*.safetensors"))


def test_every_bit_is_as_without_a_cache(family, folder, tmp_path):
    expected = inputs(family, folder, None)
    assert any(name.startswith("pixel") for name in expected)
    for num_hits in (0, 6):
        cache = make_cache(tmp_path)
        assert_equal(inputs(family, folder, cache), expected)
        assert cache.num_hits >= num_hits
    assert len(entries(tmp_path)) == 5  # a picture that comes twice is kept once
    assert not list((tmp_path / "cache/unfinished").iterdir())
    later = {name: value for name, value in expected.items() if not name.startswith("pixel")}
    assert_equal(inputs(family, folder, make_cache(tmp_path), stage=1), later)


def test_an_entry_is_a_file_that_safetensors_reads(folder, tmp_path):
    expected = inputs("llava", folder, make_cache(tmp_path), rows=(("high.png",),))
    (path,) = entries(tmp_path)
    assert torch.equal(load_file(path)["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("how", ["cut", "flip", "header", "empty", "other", "text"])
def test_a_damaged_entry_is_made_again(how, folder, tmp_path):
    expected = inputs("internvl", folder, None)
    inputs("internvl", folder, make_cache(tmp_path))
    before = {path: path.read_bytes() for path in entries(tmp_path)}
    for path, content in before.items():
        path.write_bytes(damaged(content, how, list(before.values())))
        assert path.read_bytes() != content
    cache = make_cache(tmp_path)
    assert_equal(inputs("internvl", folder, cache), expected)
    assert cache.num_misses == len(before)
    assert {path: path.read_bytes() for path in entries(tmp_path)} == before


def damaged(content: bytes, how: str, others: list[bytes]) -> bytes:
    length = 8 + int.from_bytes(content[:8], "little")
    flipped = bytearray(content)
    flipped[-1000] ^= 4
    return {
        "cut": content[:-7],
        "flip": bytes(flipped),
        # the same bytes in another shape: safetensors alone finds nothing wrong
        "header": content[:length].replace(b"3,16,16]", b"16,3,16]") + content[length:],
        "empty": b"",
        "other": next(other for other in others if other != content),
        "text": b"\x08" + bytes(7) + b"[1, 2]  ",
    }[how]


def test_an_entry_is_of_its_name(tmp_path):
    tensors = {"pixel_values": torch.randn(2, 3, 4, 4), "pixel_mask": torch.ones(2, 4).bool()}
    cache = make_cache(tmp_path)
    cache.put("aa", tensors)
    assert_equal(cache.get("aa"), tensors)
    (path,) = entries(tmp_path)
    shutil.copy(path, path.with_stem("ab"))
    assert cache.get("ab") is None and cache.num_misses == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (5, 12), (7,)])
def test_odd_values_come_back_to_the_bit(dtype, shape, tmp_path):
    cache = make_cache(tmp_path)
    few = (torch.randint(0, 200, shape) / 7).to(dtype)
    odd = few.clone()
    if few.is_floating_point():
        odd.view(-1)[:4] = torch.tensor([-0.0, 0.0, torch.inf, torch.nan], dtype=dtype)
    many = torch.randn(shape).to(dtype) * 1000
    for number, value in enumerate((few, odd, many, few[:0], many.T if many.ndim == 2 else many)):
        cache.put(f"{number}x", {"x": value})
        (back,) = cache.get(f"{number}x").values()
        assert back.dtype == dtype and back.shape == value.shape
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
        assert torch.equal(back.view(bits), value.contiguous().view(bits))


def test_a_changed_file_is_processed_again(folder, tmp_path):
    rows = (("high.png",),)
    old = inputs("llava", folder, make_cache(tmp_path), rows=rows)
    stat = os.stat(folder / "high.png")
    Image.new("RGB", (21, 90), (1, 2, 3)).save(folder / "high.png")
    os.utime(folder / "high.png", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as cp -p does
    new = inputs("llava", folder, make_cache(tmp_path), rows=rows)
    assert_equal(new, inputs("llava", folder, None, rows=rows))
    assert not torch.equal(new["pixel_values"], old["pixel_values"])


def test_a_copied_folder_uses_the_same_entries(folder, tmp_path):
    inputs("llava", folder, make_cache(tmp_path))
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    cache = make_cache(tmp_path)
    assert_equal(inputs("llava", copy, cache), inputs("llava", folder, None))
    assert cache.num_misses == 0


def test_other_settings_make_other_entries(folder, tmp_path):
    inputs("internvl", folder, make_cache(tmp_path))
    before = set(entries(tmp_path))
    processor = tiny_processor("internvl")
    processor.image_processor.image_mean = [0.4] * 3
    pixels = []
    for cache in (make_cache(tmp_path), None):
        ImageExpander.of(processor).use(ImageSettings(cache=cache))
        with using_images(ImageSettings(cache=cache)):
            picture = ImageFolders([folder]).open("wide.jpg", source="row")
        pixels.append(ImageExpander.of(processor).decode_pixels([[picture]], ["row"]))
    assert_equal(*pixels)
    assert len(set(entries(tmp_path)) - before) == 1


def test_a_wrong_entry_is_found_out_and_none_is_used(folder, tmp_path):
    """As of a library that computes otherwise and does not say so."""
    expected = inputs("llava", folder, None)
    inputs("llava", folder, make_cache(tmp_path))
    cache = make_cache(tmp_path)
    for path in entries(tmp_path):
        cache.put(path.stem, {"pixel_values": cache.get(path.stem)["pixel_values"] + 1})
    with pytest.warns(UserWarning, match="empty the folder"):
        assert_equal(inputs("llava", folder, cache), expected)
    assert_equal(inputs("llava", folder, cache), expected)


def test_what_is_drawn_or_turned_in_memory_is_never_kept(folder, tmp_path):
    cache = make_cache(tmp_path)
    expander = expander_with("llava", cache)
    with using_images(expander.settings):
        folders = ImageFolders([folder])

    def opened():
        return folders.open("high.png", source="row")

    drawn, small = opened(), opened()
    ImageDraw.Draw(drawn).rectangle((0, 0, 9, 9), fill="red")
    small.thumbnail((8, 8))
    by_hand = Image.open(folder / "high.png")
    for image in (opened().rotate(90, expand=True), drawn, small, by_hand):
        expected = expander.pixels([[decode_image(image, name="row")]])
        assert_equal(expander.decode_pixels([[image]], ["row"]), expected)
    assert not entries(tmp_path)
    expander.decode_pixels([[opened()]], ["row"])
    assert len(entries(tmp_path)) == 1


def _write_all(folder, cache_folder, seed):
    cache = ImageCache(cache_folder, max_bytes=GIB)
    for _ in range(3):
        order = torch.randperm(4, generator=torch.Generator().manual_seed(seed)).tolist()
        for row in order:
            inputs("llava", folder, cache, rows=ROWS[row : row + 1])


def test_writers_at_the_same_time(folder, tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = [(folder, tmp_path / "cache", seed) for seed in range(4)]
    writers = [context.Process(target=_write_all, args=these) for these in arguments]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(entries(tmp_path)) == 5
    cache = make_cache(tmp_path)
    assert all(cache.get(path.stem) for path in entries(tmp_path))
    assert_equal(inputs("llava", folder, cache), inputs("llava", folder, None))
    assert cache.num_misses == 0


def test_a_full_cache_keeps_what_it_has(folder, tmp_path):
    block = 1 << 16
    cache = ImageCache(tmp_path / "cache", max_bytes=3 * block)
    with pytest.warns(UserWarning, match="--image-cache-gib"):
        found = inputs("llava", folder, cache)
    assert_equal(found, inputs("llava", folder, None))
    kept = entries(tmp_path)
    assert 1 <= len(kept) <= 3 and cache.used_bytes <= 3 * block
    assert sum(path.stat().st_size for path in kept) <= 3 * block
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert_equal(inputs("llava", folder, cache), found)  # it is told once
    assert entries(tmp_path) == kept


def test_a_full_disk_only_warns(folder, tmp_path, monkeypatch):
    cache = make_cache(tmp_path)

    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match="No space left") as told:
        found = inputs("llava", folder, cache)
    assert sum("No space left" in str(item.message) for item in told) == 1
    assert_equal(found, inputs("llava", folder, None))


def test_a_cache_that_cannot_be_made_only_warns(folder, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(UserWarning, match="cannot be made"):
        cache = make_cache(tmp_path)
    with pytest.warns(UserWarning, match="is not kept"):
        found = inputs("llava", folder, cache)
    assert_equal(found, inputs("llava", folder, None))


def test_files_of_killed_processes_are_swept(tmp_path):
    make_cache(tmp_path)
    old, new = (tmp_path / "cache/unfinished" / name for name in "ab")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    make_cache(tmp_path)
    assert not old.exists() and new.exists()


def _count_opens(monkeypatch, folder) -> list[str]:
    """Every way to open one of the pictures is counted."""
    opened = []
    real = os.open

    def count(path, *args, **kwargs):
        if str(path).startswith(str(folder)):
            opened.append(str(path))

    import builtins

    real_open = builtins.open

    def counted_open(path, *args, **kwargs):
        count(path)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", counted_open)
    monkeypatch.setattr(os, "open", lambda path, *a, **k: (count(path), real(path, *a, **k))[1])
    return opened


def test_later_stages_and_later_runs_open_no_image_file(folder, tmp_path, monkeypatch):
    expected = inputs("internvl", folder, None)
    opened = _count_opens(monkeypatch, folder)
    inputs("internvl", folder, make_cache(tmp_path), stage=1)
    assert len(set(opened)) == 5, "the headers, once"
    opened.clear()
    inputs("internvl", folder, make_cache(tmp_path), stage=1)
    assert opened == []
    inputs("internvl", folder, make_cache(tmp_path))
    inputs("internvl", folder, make_cache(tmp_path))  # its first picture is compared
    opened.clear()
    cache = make_cache(tmp_path)
    assert_equal(inputs("internvl", folder, cache), expected)
    assert set(opened) == {str(folder / "wide.jpg")}


def test_without_a_cache_a_process_reads_each_header_once(folder, monkeypatch):
    opened = _count_opens(monkeypatch, folder)
    folders = ImageFolders([folder])
    sizes = [folders.open("turned.jpg", source="row").upright_size for _ in range(3)]
    assert sizes == [(20, 50)] * 3 and len(opened) == 1


@pytest.mark.parametrize("name", ["alpha.png", "turned.jpg", "palette.gif"])
def test_a_picture_that_was_not_opened_is_as_one_that_was(folder, name):
    folders = ImageFolders([folder])
    folders.open(name, source="row")
    late, plain = folders.open(name, source="row"), Image.open(folder / name)
    assert (late.size, late.mode, late.format) == (plain.size, plain.mode, plain.format)
    assert dict(late.getexif()) == dict(plain.getexif()) and late.info == plain.info
    assert late.convert("RGB").tobytes() == plain.convert("RGB").tobytes()
    assert getattr(late, "n_frames", 1) == getattr(plain, "n_frames", 1)
    assert folders.open(name, source="row").rotate(90).tobytes() == plain.rotate(90).tobytes()
    again = folders.open(name, source="row").copy()
    assert type(again) is Image.Image and again.tobytes() == plain.tobytes()


def test_lines_of_the_index_that_are_torn_or_wrong_are_passed_over(tmp_path):
    file = tmp_path / "files.txt"
    facts = FileFacts((3, 4), "RGB", "PNG", digest="d", is_whole=True)
    ImageIndex(file).note("a", facts)
    with file.open("ab") as lines:
        lines.write(b'["b", 1, 2]\n\xff\xfe\n["b", [3, 4], "torn')
    ImageIndex(file).note("c", facts)
    index = ImageIndex(file)
    assert index.get("a") == index.get("c") == facts and index.get("b") is None


def test_a_processor_with_a_way_of_its_own_is_not_cached(folder, tmp_path):
    class Reversed:
        """Joins images from the last to the first."""

        def __call__(self, rows):
            images = [torch.from_numpy(numpy.array(i.resize((4, 4)))) for row in rows for i in row]
            return {"pixel_values": torch.stack(images[::-1]).float()}

    assert find_layout(Reversed()) is None
