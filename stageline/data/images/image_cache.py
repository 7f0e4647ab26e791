"""A folder that keeps what a processor makes of image files, for later epochs and other runs.

One safetensors file an image, named by the hash of the picture's content and of the processor's
settings, so an entry is never out of date. Any number of processes write at the same time: an
entry appears whole, by a rename. At its size the folder takes nothing more; nothing is removed.
Trouble with the disk is told once, and the run goes on without.
"""

import hashlib
import importlib.metadata
import json
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from PIL import Image, features
from safetensors import SafetensorError
from safetensors.torch import load, save

from stageline.data.images.image_files import ImageIndex, PictureFile
from stageline.errors import spelled

BLOCK = 1 << 16  # bytes that one byte of the file `used` stands for
OLD_SECONDS = 3600  # after which a file that was not finished never will be
_CHECK = "crc32"
_TRIAL_ROWS = (((60, 40),), (), ((50, 170), (64, 64), (31, 70)))  # sizes of images, by row

Pixels = dict[str, torch.Tensor]  # the inputs whose names begin with "pixel"
Layout = Literal["images", "rows"]
Decode = Callable[..., Image.Image]
Process = Callable[[Sequence[Sequence[Any]]], dict[str, torch.Tensor]]


class ImageCache:
    """Pixels by name, and what is known of image files.

    Args:
        folder: is made; may be used by several runs and machines.
        max_bytes: of all entries together.

    Attributes:
        index: of image files; it is small and has no limit.
        num_hits, num_misses: of this process.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int) -> None:
        self.folder = Path(folder).absolute()
        self.max_bytes = max_bytes
        self.num_hits = self.num_misses = 0
        self._reads = self._writes = True
        self._unfinished = self.folder / "unfinished"
        self._used = self.folder / "used"
        try:
            self._unfinished.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            self._stop_writing(f"cannot be made: {error}")
        self.index = ImageIndex(self.folder / "files.txt")

    def get(self, name: str) -> Pixels | None:
        """An entry; None where there is none, or none that is whole."""
        if not self._reads:
            return None
        try:
            # read, not mapped: a file that shrinks below a mapping ends the process
            pixels = load(self._path(name).read_bytes())
            if int(pixels.pop(_CHECK)) == _checksum(name, pixels):
                self.num_hits += 1
                return pixels
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError):
            pass
        self.num_misses += 1
        return None

    def put(self, name: str, pixels: Pixels) -> None:
        """Keeps an entry, if there is room."""
        if not self._writes:
            return
        pixels = {key: value.contiguous() for key, value in pixels.items()}
        content = save({**pixels, _CHECK: torch.tensor(_checksum(name, pixels))})
        try:
            if self.used_bytes + len(content) > self.max_bytes:
                advice = spelled("Raise `image_cache_gib`, or empty the folder")
                self._stop_writing(
                    f"holds its {self.max_bytes / 2**30:.4g} GiB; the other pictures are processed "
                    f"each time. {advice}"
                )
                return
            self._write(self._path(name), content)
        except OSError as error:
            self._stop_writing(f"cannot be written to: {error}. What it holds is still used")

    def ignore(self) -> None:
        """From now on nothing is read or written: what is there is wrong."""
        self._reads = self._writes = False

    @property
    def used_bytes(self) -> int:
        """Of all entries, as the processes that wrote them counted: rounded up to blocks."""
        try:
            return self._used.stat().st_size * BLOCK
        except FileNotFoundError:
            return 0

    def _path(self, name: str) -> Path:
        return self.folder / "pixels" / name[:2] / f"{name}.safetensors"

    def _write(self, path: Path, content: bytes) -> None:
        is_new = not path.exists()
        unfinished = self._unfinished / f"{path.stem}-{uuid.uuid4().hex}"
        try:
            unfinished.write_bytes(content)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        if is_new:
            # appending needs no lock, and no process has to add up the files of all others
            with self._used.open("ab", buffering=0) as used:
                used.write(b"." * -(-len(content) // BLOCK))

    def _sweep(self) -> None:
        """Removes what killed processes left."""
        for path in self._unfinished.iterdir():
            try:
                if time.time() - path.stat().st_mtime > OLD_SECONDS:
                    path.unlink()
            except FileNotFoundError:  # another process was faster
                continue

    def _stop_writing(self, why: str) -> None:
        self._writes = False
        warnings.warn(f"the image cache {self.folder} {why}", stacklevel=3)


class CachedPixels:
    """Processes images one by one, and keeps what was made of files.

    Only a picture that nobody has drawn on, turned or scaled since its file was opened is looked
    up. The first one that is found is processed all the same, and compared. `layout` says how
    single images make a batch; None: this processor's are not kept.

    Args:
        process: rows of decoded images -> the processor's inputs for them.
        settings: all that decides what it makes of them.
    """

    def __init__(self, cache: ImageCache, process: Process, *, settings: dict[str, Any]) -> None:
        self.cache = cache
        self._process = process
        text = json.dumps(settings, sort_keys=True, default=str)
        self._key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._is_compared = False
        self.layout = find_layout(self._pixels)
        if self.layout is None:
            said = spelled(
                f"`image_cache` does nothing here: {settings.get('processor')} joins images to a "
                "batch in a way of its own, so those of single files cannot be kept"
            )
            warnings.warn(said, stacklevel=2)

    def __call__(
        self, images: Sequence[Sequence[Any]], names: Sequence[str], decode: Decode
    ) -> Pixels:
        """The pixels of a batch; arguments as `ImageExpander.decode_pixels` has them."""
        assert self.layout is not None
        rows = [
            [self._one(image, name, decode) for image in row]
            for row, name in zip(images, names, strict=True)
        ]
        return _join(rows, self.layout)

    def _one(self, image: Any, name: str, decode: Decode) -> Pixels:
        is_file = isinstance(image, PictureFile) and image.is_untouched
        digest = image.read_digest() if is_file else None
        if digest is None:
            return self._pixels([[decode(image, name=name)]])
        entry = f"{digest}-{self._key}"
        found = self.cache.get(entry)
        if found is not None and self._is_compared:
            return found
        made = self._pixels([[decode(image, name=name)]])
        if found is None:
            self.cache.put(entry, made)
        else:
            self._compare(found, made, image)
        return made

    def _compare(self, found: Pixels, made: Pixels, image: PictureFile) -> None:
        self._is_compared = _is_equal(found, made)
        if not self._is_compared:
            warnings.warn(
                f"the image cache {self.cache.folder} has other pixels of {image.filename} than "
                "were made of it now, so none of them is used: empty the folder",
                stacklevel=2,
            )
            self.cache.ignore()

    def _pixels(self, images: Sequence[Sequence[Any]]) -> Pixels:
        made = self._process(images)
        return {name: value for name, value in made.items() if name.startswith("pixel")}


def processor_settings(processor: Any) -> dict[str, Any]:
    """What decides the pixels that a processor makes: its options, and who computes them."""
    images = processor.image_processor
    return {
        "processor": type(processor).__name__,
        "image processor": type(images).__name__,
        "settings": images.to_dict() if hasattr(images, "to_dict") else vars(images),
        "versions": {name: _version(name) for name in ("transformers", "pillow", "torchvision")},
        "jpeg": features.version("libjpeg_turbo") or features.version("jpg"),
    }


def find_layout(process: Callable[[Sequence[Sequence[Any]]], Pixels]) -> Layout | None:
    """How a processor joins images: tried on one small batch, since a list of classes would age."""
    draw = numpy.random.default_rng(0)
    rows = [
        [Image.fromarray(draw.integers(0, 256, (height, width, 3), numpy.uint8))
         for width, height in row]
        for row in _TRIAL_ROWS
    ]  # fmt: skip
    whole, single = process(rows), [[process([[image]]) for image in row] for row in rows]
    layouts: tuple[Layout, ...] = ("images", "rows")
    for layout in layouts:
        try:
            if _is_equal(_join(single, layout), whole):
                return layout
        except (RuntimeError, ValueError, IndexError):  # it does not even fit
            continue
    return None


def _join(rows: Sequence[Sequence[Pixels]], layout: Layout) -> Pixels:
    """The pixels of a batch; smaller images are filled with zeros.

    Args:
        layout: "images": dim 0 is images, or their tiles or patches, one after the other;
            "rows": dim 0 is rows, dim 1 the images of a row.
    """
    images = [image for row in rows for image in row]
    if layout == "images":
        return {name: _cat([image[name] for image in images]) for name in images[0]}
    joined = {}
    for name, first in images[0].items():
        none = first.new_zeros((1, 0, *first.shape[2:]))
        joined[name] = _cat([_cat([image[name] for image in row] or [none], dim=1) for row in rows])
    return joined


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Joins along `dim`, with zeros where a tensor is smaller in another one."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        shape[dim] = tensor.shape[dim]
        if tuple(shape) != tensor.shape:
            small, tensor = tensor, tensor.new_zeros(shape)
            tensor[tuple(map(slice, small.shape))] = small
        padded.append(tensor)
    return torch.cat(padded, dim) if len(padded) > 1 else padded[0]


def _is_equal(found: Pixels, expected: Pixels) -> bool:
    """Whether both have the same names, types, shapes and values."""
    return set(found) == set(expected) and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


def _checksum(name: str, pixels: Pixels) -> int:
    """Of names, types, shapes and bits: safetensors has none of its own."""
    told = 0
    for key, value in sorted(pixels.items()):
        told = zlib.crc32(f"{name} {key} {value.dtype} {tuple(value.shape)}".encode(), told)
        told = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, told)
    return told


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
