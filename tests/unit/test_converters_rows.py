"""The jsonl part on rows of other formats, and videos as pictures."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from stageline.data.images.image_files import ImageFolders
from stageline.data.images.videos import read_frames
from stageline.data.rows.json_lines import JsonLines
from stageline.errors import DataError, UserError
from tests.helpers.tiny_datasets import picture, write_lines

DOCS = Path(__file__).resolve().parents[2] / "docs"
USER, BOT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def _rows(tmp_path, *rows, **options):
    write_lines(tmp_path / "rows.jsonl", rows)
    options.setdefault("test_size", 0)
    return JsonLines(dataset_path=str(tmp_path / "rows.jsonl"), **options)


def _only(tmp_path, row, **options):
    return _rows(tmp_path, row, **options)[0]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Q", "answer": "A", "label": True, "prompt": "x", "level": 3},
        {"messages": [USER, BOT], "label": "cats"},
        {"messages": [{"role": "ipython", "content": "x"}, USER, BOT], "system": "S"},
        {"text": "Once"},
        {"caption": "C", "tools": "hammer"},
    ],
)
def test_rows_that_were_read_before_stay_as_they_are(tmp_path, row):
    _, sample = _only(tmp_path, row)
    assert {name: sample[name] for name in row} == row


def test_instructions_stay_questions_for_templates_unless_the_format_is_named(tmp_path):
    row = {"instruction": "Q", "input": "x", "output": "A", "history": []}
    _, plain = _only(tmp_path, row)
    assert plain["question"] == "Q\nx" and "messages" not in plain
    _, named = _only(tmp_path, row, formatting="alpaca")
    assert named["messages"] == [{"role": "user", "content": "Q\nx"}, BOT]
    _, with_past = _only(tmp_path, {**row, "history": [["a", "b"]]})
    assert len(with_past["messages"]) == 4, "a history is not lost without a word"


@pytest.mark.parametrize("column", ["images", "image"])
def test_an_image_is_where_its_placeholder_is(tmp_path, column):
    picture(tmp_path / "cat.png")
    named = {column: ["cat.png"] if column == "images" else "cat.png"}
    told = {"role": "user", "content": "Is <image> a cat?"}
    wanted = [
        {"type": "text", "text": "Is "},
        {"type": "image"},
        {"type": "text", "text": " a cat?"},
    ]
    alpaca = {"instruction": told["content"], "output": "A"}
    for row in ({"messages": [told, BOT]}, alpaca):
        images, sample = _only(tmp_path, {**row, **named})
        assert len(images) == 1 and sample["messages"][0]["content"] == wanted
    _, plain = _only(tmp_path, {"messages": [USER, BOT], **named})
    assert plain["messages"] == [USER, BOT], "the template puts it in front"
    with pytest.raises(DataError, match="2 places for images and 1 names"):
        _only(tmp_path, {"messages": [{**told, "content": "<image> <image>"}, BOT], **named})
    with pytest.raises(DataError, match="the question has <image>"):
        _only(tmp_path, {"question": told["content"], "answer": "A", **named})


def _rows_of_guide(path):
    rows = []
    for block in re.findall(r"```json\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        while block.strip():
            row, end = json.JSONDecoder().raw_decode(block.lstrip())
            rows.append(row)
            block = block.lstrip()[end:]
    return rows


def test_the_rows_of_the_guide_are_taken(tmp_path):
    rows = _rows_of_guide(DOCS / "data_formats.md")
    rows = [{**row, "tools": "[]"} if row.get("tools") == "[...]" else row for row in rows]
    picture(tmp_path / "a.png")
    picture(tmp_path / "cat.png")
    _video(tmp_path / "cat.gif")
    samples = _rows(tmp_path, *rows)
    kinds = [
        next(kind for kind in ("chosen", "label", "messages", "answer", "text") if kind in sample)
        for sample in (samples[place][1] for place in range(len(samples)))
    ]
    assert kinds == ["answer"] * 2 + ["text"] + ["messages"] * 4 + ["chosen"] * 4 + (
        ["label"] * 3 + ["messages"] * 2
    )


def _shades(frames):
    return [frame.convert("RGB").getpixel((0, 0))[0] for frame in frames]


def _video(path, count=10):
    shades = [Image.new("RGB", (8, 6), (20 * place, 0, 0)) for place in range(count)]
    options = {"lossless": True} if path.suffix == ".webp" else {}
    shades[0].save(path, save_all=True, append_images=shades[1:], duration=40, **options)


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_frames_of_an_animation(tmp_path, suffix):
    _video(tmp_path / f"video{suffix}")
    frames = read_frames(
        f"video{suffix}", folders=ImageFolders([tmp_path]), num_frames=4, source="row"
    )
    assert _shades(frames) == [0, 60, 120, 180]


def test_frames_of_a_folder_are_in_the_order_of_their_numbers(tmp_path):
    for place in range(12):
        path = tmp_path / "video" / f"frame{place}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 6), (place, 0, 0)).save(path)
    (tmp_path / "video" / "notes.txt").write_text("no picture")
    folders = ImageFolders([tmp_path])
    frames = read_frames("video", folders=folders, num_frames=3, source="row")
    assert _shades(frames) == [0, 5, 11]
    names = [f"video/frame{place}.png" for place in (2, 4)]
    assert _shades(read_frames(names, folders=folders, num_frames=3, source="row")) == [2, 4]


def test_videos_that_cannot_be_read(tmp_path, monkeypatch):
    folders = ImageFolders([tmp_path])

    def read(name, **options):
        read_frames(name, folders=folders, source="f:1", **{"num_frames": 2, **options})

    (tmp_path / "empty").mkdir()
    (tmp_path / "video.mp4").write_bytes(b"video")
    (tmp_path / "video.gif").write_bytes(b"GIF89a")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(DataError, match="f:1: there is no video none.gif"):
        read("none.gif")
    with pytest.raises(DataError, match="the folder holds none of"):
        read("empty")
    with pytest.raises(DataError, match="video.gif does not decode"):
        read("video.gif")
    with pytest.raises(UserError, match="f:1: the video .*video.mp4.*package av"):
        read("video.mp4")
    with pytest.raises(UserError, match="num_frames is 0"):
        read("empty", num_frames=0)


def test_a_video_of_av_if_it_is_there(tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "video.mp4"), "w") as video:
        stream = video.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in (0, 60, 120, 180, 240):
            picture_of = Image.new("RGB", (64, 48), (shade,) * 3)
            for packet in stream.encode(av.VideoFrame.from_image(picture_of)):
                video.mux(packet)
        for packet in stream.encode():
            video.mux(packet)
    folders = ImageFolders([tmp_path])
    frames = read_frames("video.mp4", folders=folders, num_frames=3, source="row")
    assert [round(shade / 60) for shade in _shades(frames)] == [0, 2, 4]
