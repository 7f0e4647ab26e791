"""Save answers that a run trains on: lines of `samples.jsonl`, small images in `samples/`."""

import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stageline.data.images.images import decode_image

FILE, FOLDER = "samples.jsonl", "samples"
MOST_PIXELS = 256  # a longer side is scaled down to it
MOST_PLAIN_PIXELS = 64  # an image with no longer side is kept as it is
MOST_PICTURES = 2000  # per run: about 20 MB
Record = Mapping[str, Any]


def thumbnail(image: Image.Image, *, name: str) -> bytes:
    """Return a small copy as the content of a file: PNG of a picture that is small, else JPEG.

    Args:
        name: of the row, for errors.
    """
    # the model has been shown it, so it is within the limit of the run
    picture = decode_image(image, name=name, max_pixels=image.width * image.height)
    is_plain = max(picture.size) <= MOST_PLAIN_PIXELS
    picture.thumbnail((MOST_PIXELS, MOST_PIXELS))
    content = io.BytesIO()
    picture.save(content, "PNG" if is_plain else "JPEG")
    return content.getvalue()


class SampleFile:
    """Answers with their rewards in the run folder, a line a prompt.

    Args:
        folder: of the run.
        start_step: steps done; lines of later steps, from an earlier start, are removed.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self.folder, self.path = folder, folder / FILE
        self._pictures: set[str] = set()
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_bytes().splitlines(keepends=True) if start_step else ():
            try:
                record = json.loads(line)
            except ValueError:  # cut off by a crash
                continue
            if record["step"] <= start_step:
                kept.append(line)
                self._pictures.update(record.get("images", ()))
        draft = self.path.with_name(FILE + ".tmp")
        draft.write_bytes(b"".join(kept))
        os.replace(draft, self.path)

    def __call__(self, step: int, records: Sequence[Record]) -> None:
        """Write the answers of a step.

        Args:
            records: `images` are contents of files, as `thumbnail` makes them.
        """
        # half of a surrogate pair, which a row may have, is written as JSON escapes it
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for record in records:
                names = [self._written(content) for content in record.get("images") or ()]
                told = {**record, "images": [name for name in names if name]}
                if not names:
                    del told["images"]
                file.write(json.dumps(told, ensure_ascii=False) + "\n")

    def _written(self, content: bytes) -> str | None:
        """Return the picture's path below the run folder; None where there are too many of them."""
        suffix = "png" if content.startswith(b"\x89PNG") else "jpg"
        name = f"{FOLDER}/{hashlib.sha256(content).hexdigest()[:16]}.{suffix}"
        if name not in self._pictures:
            if len(self._pictures) >= MOST_PICTURES:
                return None
            (self.folder / FOLDER).mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)
            self._pictures.add(name)
        return name
