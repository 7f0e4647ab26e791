"""What people see of the answers that a run learns from: a file of lines, small pictures, a page.

`samples.jsonl` has them all, `samples.html` those of the first step and of the newest ones. Prompts
and answers are whatever a row or a model says: on the page all of it is text.
"""

import hashlib
import html
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stageline.data.images.images import decode_image

FILE, PAGE, FOLDER = "samples.jsonl", "samples.html", "samples"
MOST_PIXELS = 256  # of a side
MOST_PLAIN_PIXELS = 64  # a picture that is no larger is kept as it is
MOST_PICTURES = 2000  # of a run: about 20 MB
MOST_STEPS = 20  # on the page
Record = Mapping[str, Any]


def thumbnail(image: Image.Image, *, name: str) -> bytes:
    """A small copy as the content of a file: PNG of a picture that is small already, else JPEG.

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
    """Answers with their rewards in the run folder: a line a prompt, and the page beside it.

    Args:
        folder: of the run.
        start_step: steps done; what an earlier start wrote beyond them is taken away.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self.folder, self.path = folder, folder / FILE
        self._pictures: set[str] = set()
        self._steps: dict[int, list[Record]] = {}
        if self.path.exists():
            kept = self._read(start_step) if start_step else []
            _replace(self.path, kept)
        self._write_page()

    def _read(self, last_step: int) -> list[str]:
        kept = []
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                record = _record_of(line)
                if record is not None and record["step"] <= last_step:
                    kept.append(line)
                    self._pictures.update(record.get("images", ()))
                    self._note(record["step"], [record])
        return kept

    def __call__(self, step: int, records: Sequence[Record]) -> None:
        """Writes the answers of a step.

        Args:
            records: `images` are contents of files, as `thumbnail` makes them.
        """
        records = [self._with_files(record) for record in records]
        lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in records]
        # half a pair of surrogates, which a row may have, is written as JSON escapes it
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
        self._note(step, records)
        self._write_page()

    def _write_page(self) -> None:
        if self._steps:
            _replace(self.folder / PAGE, page(self._steps, title=self.folder.name))
        else:  # one of an earlier run may lie there
            (self.folder / PAGE).unlink(missing_ok=True)

    def _note(self, step: int, records: Sequence[Record]) -> None:
        self._steps.setdefault(step, []).extend(records)
        if len(self._steps) > MOST_STEPS:
            del self._steps[sorted(self._steps)[1]]  # the first one stays, to compare with

    def _with_files(self, record: Record) -> Record:
        if not record.get("images"):
            return {name: value for name, value in record.items() if name != "images"}
        names = [self._written(content) for content in record["images"]]
        return {**record, "images": [name for name in names if name is not None]}

    def _written(self, content: bytes) -> str | None:
        """The picture's path below the run folder; None where there are too many of them."""
        suffix = "png" if content.startswith(b"\x89PNG") else "jpg"
        name = f"{FOLDER}/{hashlib.sha256(content).hexdigest()[:16]}.{suffix}"
        if name not in self._pictures:
            if len(self._pictures) >= MOST_PICTURES:
                return None
            (self.folder / FOLDER).mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)
            self._pictures.add(name)
        return name


def _record_of(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        return record if isinstance(record["step"], int) else None
    except (ValueError, KeyError, TypeError):  # cut off by a crash
        return None


def _replace(path: Path, parts: Iterable[str]) -> None:
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(parts)
    os.replace(draft, path)


# nothing is run, and nothing is fetched but the pictures beside the page, whatever stands in it
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif }}
body {{ max-width: 70rem; margin: 1rem auto; padding: 0 1rem }}
summary {{ font-size: 1.1rem; font-weight: 600; padding: .4rem 0; cursor: pointer }}
article {{ border-top: 1px solid #8886; padding: .6rem 0 1rem }}
.said {{ white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate }}
.note {{ color: #888; font-size: .85rem }}
img {{ margin: .4rem .4rem 0 0; min-width: 4rem }}
table {{ border-collapse: collapse; width: 100%; margin-top: .5rem }}
th, td {{ text-align: right; vertical-align: top; padding: .15rem .5rem; white-space: nowrap }}
th:last-child, td:last-child {{ text-align: left; width: 99% }}
th {{ font-weight: 600; border-bottom: 1px solid #8886 }}
tr.better td {{ background: #1a7f3722 }}
tr.worse td {{ background: #cf222e1c }}
</style></head><body><h1>{title}</h1>
<p class="note">Answers that were learnt from: the newest {count} steps of {file}, and the first.
Green had a better reward than the other answers to its prompt, red a worse one.</p>
"""


def page(steps: Mapping[int, Sequence[Record]], *, title: str) -> list[str]:
    """The page of some steps, newest first, in pieces.

    Args:
        steps: step -> its records, as `samples.jsonl` has them.
    """
    head = _HEAD.format(title=_text(title), count=MOST_STEPS - 1, file=FILE)
    newest = max(steps, default=0)
    parts = [head]
    for step in sorted(steps, reverse=True):
        rewards = [one["reward"] for record in steps[step] for one in record["answers"]]
        known = [reward for reward in rewards if reward is not None]
        mean = _number(sum(known) / len(known) if known else None)
        is_open = " open" if step == newest else ""
        parts.append(f"<details{is_open}><summary>Step {step}: reward {mean}</summary>\n")
        parts += map(_article, steps[step])
        parts.append("</details>\n")
    return [*parts, "</body></html>\n"]


def _article(record: Record) -> str:
    """A prompt with its pictures and answers."""
    keys = list(record["answers"][0]["rewards"])
    pictures = [
        f'<img src="{_text(name)}" alt="" loading="lazy">' for name in record.get("images", ())
    ]
    named = ["reward", "advantage", *keys, "tokens", "answer"]
    head = "".join(f"<th>{_text(name)}</th>" for name in named)
    rows = "".join(_row(answer, keys) for answer in record["answers"])
    return (
        f'<article><div class="note">row {_text(record["row"])}, id {_text(record["id"])}</div>\n'
        f'<div class="said">{_text(record["prompt"])}</div>{"".join(pictures)}\n'
        f"<table><tr>{head}</tr>\n{rows}</table></article>\n"
    )


def _row(answer: Record, keys: Sequence[str]) -> str:
    advantage = answer["advantage"]
    kind = "better" if advantage > 0 else "worse" if advantage < 0 else "equal"
    rewards = [answer["reward"], advantage, *(answer["rewards"][key] for key in keys)]
    cells = [*map(_number, rewards), f"{answer['num_tokens']}{' cut' * answer['is_cut']}"]
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    said = f'<td class="said">{_text(answer["text"])}</td>'
    return f'<tr class="{kind}">{numbers}{said}</tr>\n'


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _text(value: object) -> str:
    return html.escape(str(value))
