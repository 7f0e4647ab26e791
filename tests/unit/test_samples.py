"""Answers in the run folder: lines and small pictures."""

import io
import json

import numpy
import pytest
from PIL import Image, ImageOps

from stageline.training import samples
from stageline.training.samples import SampleFile, thumbnail


def record(step, *texts, **fields):
    answers = [
        {
            "text": text,
            "reward": None if place else 0.5,
            "advantage": 1.0 - place,
            "rewards": {"number": 0.5, "<b>": None},
            "num_tokens": 3,
            "is_cut": bool(place),
        }
        for place, text in enumerate(texts)
    ]
    return {"step": step, "row": 1, "id": "a", "prompt": "?", "images": []} | {
        **fields,
        "answers": answers,
    }


def lines_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def pictures():
    random = numpy.random.default_rng(0)
    small = Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=numpy.uint8))
    large = Image.linear_gradient("L").resize((600, 300))
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation 6 means rotated by 90 degrees
    content = io.BytesIO()
    large.save(content, "JPEG", exif=exif)
    return small, large, Image.open(content)


def test_a_picture_is_small_upright_and_written_once(tmp_path, monkeypatch):
    small, large, turned = pictures()
    written = [thumbnail(one, name="a row") for one in (small, large, turned)]
    opened = [Image.open(io.BytesIO(content)) for content in written]
    assert [one.format for one in opened] == ["PNG", "JPEG", "JPEG"]
    assert [one.size for one in opened] == [(30, 20), (256, 128), (128, 256)]
    assert (numpy.asarray(opened[0]) == numpy.asarray(small)).all()
    upright = ImageOps.exif_transpose(turned).convert("RGB").resize((128, 256))
    apart = numpy.asarray(opened[2], dtype=int) - numpy.asarray(upright, dtype=int)
    assert numpy.abs(apart).mean() < 4
    monkeypatch.setattr(samples, "MOST_PICTURES", 2)
    file = SampleFile(tmp_path, start_step=0)
    for step in (1, 2):
        file(step, [record(step, "x", images=written[:2]), record(step, "x", images=written[1:])])
    names = [line["images"] for line in lines_of(tmp_path)]
    assert names[0] == [*names[0]] and names[1] == names[0][1:] and names[2:] == names[:2]
    assert sorted(tmp_path.glob("samples/*")) == sorted(tmp_path / name for name in names[0])
    assert [(tmp_path / name).read_bytes() for name in names[0]] == written[:2]


@pytest.mark.parametrize("start_step", [0, 2])
def test_a_resumed_run_goes_on_behind_its_checkpoint(start_step, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MOST_PICTURES", 2)
    content = [thumbnail(one, name="a row") for one in pictures()]

    def write(file, steps):
        for step in steps:
            file(step, [record(step, "x", images=[content[step % 3]])])

    write(SampleFile(tmp_path, start_step=0), range(1, 5))
    whole = (tmp_path / "samples.jsonl").read_bytes()
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 5, "answ')
    write(SampleFile(tmp_path, start_step=start_step), range(start_step + 1, 5))
    assert (tmp_path / "samples.jsonl").read_bytes() == whole
