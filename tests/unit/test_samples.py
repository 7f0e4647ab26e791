"""Answers in the run folder: lines, small pictures, and a page on which all of it is text."""

import html.parser
import io
import json

import numpy
import pytest
from PIL import Image, ImageOps

from stageline.training import samples
from stageline.training.samples import MOST_STEPS, SampleFile, thumbnail

HOSTILE = [
    "<script>alert(1)</script>",
    "</td></table><img src=x onerror='alert(1)'>",
    "&lt;b&gt; \"quoted\" 'too' <!-- <![CDATA[ ]]>",
    "{title} %s {0}",
    "\u202emirrored \x07 \ud83d half",
]


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


class Page(html.parser.HTMLParser):
    """The elements of a page, and the texts in those that show what was said."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.said, self.headings = set(), set(), [], []
        self.sources, self._into = [], None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.add(tag)
        self.attributes.update(attrs)
        self.sources += [attrs["src"]] if "src" in attrs else []
        self._into = self.said if attrs.get("class") == "said" else None
        if tag == "summary":
            self._into = self.headings
        if self._into is not None:
            self._into.append("")

    def handle_endtag(self, tag):
        self._into = None

    def handle_data(self, data):
        if self._into is not None:
            self._into[-1] += data


def test_what_was_said_is_text_on_the_page(tmp_path):
    file = SampleFile(tmp_path, start_step=0)
    file(1, [record(1, "fine", "better")])
    plain = Page(tmp_path / "samples.html")
    file(2, [record(2, *HOSTILE, prompt=HOSTILE[0], id=HOSTILE[1])])
    page = Page(tmp_path / "samples.html")
    assert page.tags == plain.tags and page.attributes == plain.attributes
    assert "script" not in page.tags and page.sources == []
    shown = [text.encode("utf-8", "backslashreplace").decode() for text in HOSTILE]
    assert page.said == [HOSTILE[0], *shown, "?", "fine", "better"]
    assert page.headings == ["Step 2: reward 0.5", "Step 1: reward 0.5"]
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one["text"] for one in lines[1]["answers"]] == HOSTILE and "images" not in lines[1]


def test_the_page_has_the_first_step_and_the_newest(tmp_path):
    file = SampleFile(tmp_path, start_step=0)
    for step in range(1, MOST_STEPS + 6):
        file(step, [record(step, "x")])
    wanted = [*range(MOST_STEPS + 5, 6, -1), 1]
    headings = Page(tmp_path / "samples.html").headings
    assert [int(one.split()[1][:-1]) for one in headings] == wanted
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == MOST_STEPS + 5


def pictures():
    random = numpy.random.default_rng(0)
    small = Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=numpy.uint8))
    large = Image.linear_gradient("L").resize((600, 300))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
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
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    names = [line["images"] for line in lines]
    assert names[0] == [*names[0]] and names[1] == names[0][1:] and names[2:] == names[:2]
    assert sorted(tmp_path.glob("samples/*")) == sorted(tmp_path / name for name in names[0])
    assert [(tmp_path / name).read_bytes() for name in names[0]] == written[:2]
    assert Page(tmp_path / "samples.html").sources == [*names[0], *names[1]] * 2


@pytest.mark.parametrize("start_step", [0, 2])
def test_a_resumed_run_goes_on_behind_its_checkpoint(start_step, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MOST_PICTURES", 2)
    content = [thumbnail(one, name="a row") for one in pictures()]

    def write(file, steps):
        for step in steps:
            file(step, [record(step, "x", images=[content[step % 3]])])

    write(SampleFile(tmp_path, start_step=0), range(1, 5))
    whole = {name: (tmp_path / name).read_bytes() for name in ("samples.jsonl", "samples.html")}
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 5, "answ')
    again = SampleFile(tmp_path, start_step=start_step)
    assert (tmp_path / "samples.html").exists() == bool(start_step)
    write(again, range(start_step + 1, 5))
    assert {name: (tmp_path / name).read_bytes() for name in whole} == whole
