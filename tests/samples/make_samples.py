"""Draws the small files of this folder: shapes of the public formats, none of their data.

python tests/samples/make_samples.py
"""

import itertools
import json
from pathlib import Path

from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
SIDE = 32
# preposition -> centre of the thing; the reference stands in the middle
PLACES = {
    "left of": (6, 16), "right of": (26, 16), "above": (16, 6), "below": (16, 26),
    "on": (16, 9), "under": (16, 24), "in front of": (18, 20), "behind": (14, 12),
}  # fmt: skip
COLOURS = {
    "cup": (200, 40, 40), "hat": (40, 90, 200), "book": (30, 150, 70), "lamp": (220, 170, 20),
}  # fmt: skip


def draw(thing, place, path, *, rotation=0):
    """A grey table in the middle and a coloured thing beside it."""
    image = Image.new("RGB", (SIDE, SIDE), (235, 235, 235))
    pen = ImageDraw.Draw(image)
    (x, y), table = PLACES[place], (12, 13, 20, 19)
    box = (x - 4, y - 4, x + 4, y + 4)
    if place == "behind":  # the table hides a part of it
        pen.ellipse(box, fill=COLOURS[thing])
    pen.rectangle(table, fill=(120, 120, 120))
    if place != "behind":
        pen.ellipse(box, fill=COLOURS[thing])
    path.parent.mkdir(parents=True, exist_ok=True)
    image.rotate(-rotation).save(path, quality=60)


def write(path, rows):
    """A JSON list, or JSON lines; a row a line in both."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    text = (
        "[\n" + ",\n".join(lines) + "\n]\n" if path.suffix == ".json" else "\n".join(lines) + "\n"
    )
    path.write_text(text, encoding="utf-8")


def vsr():
    """Statements that are true or false, by relation."""
    folder, numbers = HERE / "vsr", itertools.count(1)
    places = ("left of", "right of", "above", "below")
    images = {}
    for thing, place in itertools.product(("cup", "hat"), places):
        images[thing, place] = f"{next(numbers):012}.jpg"
        draw(thing, place, folder / "images" / images[thing, place])
    opposite = dict(zip(places, ("right of", "left of", "below", "above"), strict=True))
    rows = []
    for label, (thing, place) in itertools.product((1, 0), images):
        said = place if label else opposite[place]
        rows.append(
            {
                "image": images[thing, place],
                "image_link": f"http://localhost/none/{images[thing, place]}",
                "caption": f"The {thing} is {said} the table.",
                "label": label,
                "relation": said,
                "annotator_id": 1,
                "vote_true_validator_id": [2, 3] if label else [],
                "vote_false_validator_id": [] if label else [2, 3],
            }
        )
    write(folder / "splits/random/train.jsonl", rows[::2])
    write(folder / "splits/random/dev.jsonl", rows[1::4])
    write(folder / "splits/random/test.jsonl", rows[1::2])


def spatial_mm():
    """Questions with options, from two perspectives, and one with words."""
    folder = HERE / "spatial_mm"
    things, places = list(COLOURS), ("left of", "right of", "above", "below")
    words = {"left of": "left", "right of": "right", "above": "top", "below": "bottom"}
    for number, name in ((0, "one"), (1, "two")):
        rows = []
        for i, thing in enumerate(things * 2):
            place = places[(i + i // 4 + number) % 4]
            image = f"{name}{i:02}.jpg"
            draw(thing, place, folder / "Spatial_MM_Obj" / image)
            who = "camera's" if i % 3 else "woman's"
            options = ["left", "right", "top", "bottom"]
            options = options[i % 4 :] + options[: i % 4]
            lines = "".join(f"\n{'ABCD'[k]}. {text}" for k, text in enumerate(options))
            right = options.index(words[place])
            question = f"Where is the {thing} from the {who} perspective?{lines}"
            if i == 5:
                question = f"Is the {thing} touching the table?\nA. yes\nB. no"
                options, right = ["yes", "no"], 1
            rows.append(
                {
                    "image_name": image,
                    "question": question,
                    "answer": f"{'ABCD'[right]}. {options[right]}",
                    "object1": thing,
                    "object2": "table" if number else "",
                }
            )
        write(folder / f"spatial_mm_{name}_obj.json", rows)
    hops = [
        {"image_name": f"one{i:02}.jpg", "question": "What colour is it?", "answer": word}
        for i, word in enumerate(("red", "blue", "green", "yellow"))
    ]
    write(folder / "multihop_reasoning_309.json", hops)


def whats_up():
    """Captions that differ in a preposition; the first is right."""
    folder = HERE / "whats_up"
    sets = {
        "a": ("controlled_images", "jpeg", ("left of", "right of", "on", "under")),
        "b": ("controlled_clevr", "jpg", ("left of", "right of", "in front of", "behind")),
    }
    for name, (below, end, places) in sets.items():
        rows = []
        for thing in ("cup", "hat", "book"):
            captions = [f"A {thing} {_to_the(place)} a table" for place in places]
            for i, place in enumerate(places):
                file = place.replace("in front of", "in-front_of").replace(" ", "_")
                image = f"{thing}_{file}_table.{end}"
                draw(thing, place, folder / below / image)
                options = [captions[i], *captions[:i], *captions[i + 1 :]]
                rows.append({"image_path": f"data/{below}/{image}", "caption_options": options})
        kind = "images" if name == "a" else "clevr"
        write(folder / f"controlled_{kind}_dataset.json", rows)
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    coco = []
    for i, (thing, place) in enumerate(itertools.product(("lamp", "book"), opposite)):
        draw(thing, place, folder / "val2017" / f"{i + 1:012}.jpg")
        pair = [
            f"A photo of a {thing} {_to_the(word)} a table" for word in (place, opposite[place])
        ]
        coco.append([i + 1, *pair])
    write(folder / "coco_qa_two_obj.json", coco)


def _to_the(place):
    return f"to the {place}" if place in ("left of", "right of") else place


def rotate():
    """Questions about rotated pictures, and captions of them."""
    places = {"left of": ("left", 9), "right of": ("right", 3), "above": ("above", 12)}
    turned = {  # degrees clockwise -> where a direction has gone
        0: {"left": "left", "right": "right", "above": "above"},
        90: {"left": "above", "right": "below", "above": "right"},
        180: {"left": "right", "right": "left", "above": "below"},
    }
    hours = {"left": 9, "right": 3, "above": 12, "below": 6}
    questions, captions = [], []
    for i, (rotation, place) in enumerate(itertools.product(turned, places)):
        thing, image = list(COLOURS)[i % 4], f"{i:02}.png"
        for name in ("rotate_qa", "rotate_caption"):
            draw(thing, place, HERE / name / "images" / image, rotation=rotation)
        seen = turned[rotation][places[place][0]]
        common = {"image": image, "rotation": rotation}
        where = f"Where does the {thing} of picture {i} appear, seen from the table?"
        questions += [
            {**common, "task": "direction", "question": where, "answer": seen},
            {
                **common, "task": "clock", "answer": f"{hours[seen]} o'clock",
                "question": f"At which clock position is the {thing} of picture {i}?",
            },
            {
                **common, "task": "angle", "answer": rotation,
                "question": f"By how many degrees clockwise is picture {i} rotated?",
            },
            {
                **common, "task": "direction", "answer": seen,
                "question": f"Is the {thing} of picture {i} left, right, above or below?",
                "options": ["left", "right", "above", "below"],
            },
        ]  # fmt: skip
        caption = f"A {thing} {place} a table, rotated by {rotation} degrees."
        captions.append({**common, "caption": caption})
    write(HERE / "rotate_qa/rotate_qa.json", questions)
    write(HERE / "rotate_caption/rotate_caption.jsonl", captions)


if __name__ == "__main__":
    for make in (vsr, spatial_mm, whats_up, rotate):
        make()
