"""Small files in the formats of the public datasets, for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image


def picture(path: Path, size: tuple[int, int] = (20, 30)) -> None:
    """Saves a plain picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 10, 10)).save(path)


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    """Writes JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, rows: Sequence[Any]) -> None:
    """Writes a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows), encoding="utf-8")


def make_vsr(folder: Path) -> None:
    """VSR: both splits, 4 rows each; labels 0, 1, 0, 1."""
    for split_type in ("random", "zeroshot"):
        for split in ("train", "dev", "test"):
            rows = [
                {
                    "image": f"{i:012}.jpg",
                    "image_link": f"http://images.cocodataset.org/train2017/{i:012}.jpg",
                    "caption": f"The dog is {relation} the {split_type} {split} cat.",
                    "label": i % 2,
                    "relation": relation,
                    "annotator_id": 4,
                    "vote_true_validator_id": "[19, 2]",
                    "vote_false_validator_id": "[]",
                }
                for i, relation in enumerate(("on", "left of", "behind", "on"))
            ]
            write_lines(folder / "data/splits" / split_type / f"{split}.jsonl", rows)
    for i in range(4):
        picture(folder / "trainval2017" / f"{i:012}.jpg")


def make_spatial_mm(folder: Path) -> None:
    """Spatial-MM: 5 rows with one object, 5 with two, one multihop row."""
    for number in ("one", "two"):
        rows = [
            {
                "image_name": f"{number}{i}.jpg",
                "question": f"Where is the {i} from the {who}'s perspective?\nA. left\nB. top left",
                "answer": ("A. left", "B. top left")[i % 2],
                "object1": "cat",
                "object2": "",
            }
            for i, who in enumerate(("camera", "woman", "camera", "man", "camera"))
        ]
        write_json(folder / f"spatial_mm_{number}_obj.json", rows)
        for i in range(5):
            picture(folder / "Spatial_MM_Obj" / f"{number}{i}.jpg")
    hop = {"image_name": "one0.jpg", "question": "What colour is it?", "answer": "pink", "hop": 2}
    write_json(folder / "multihop_reasoning_309.json", [hop])


def make_whats_up(folder: Path) -> None:
    """What'sUp: subset a with 3 pairs of objects, and one COCO row."""
    words = ("left_of", "right_of", "on", "under")
    rows = []
    for thing in ("mug", "book", "cap"):
        captions = [f"A {thing} {word.replace('_', ' ')} a table" for word in words]
        for i, word in enumerate(words):
            image = f"data/controlled_images/{thing}_{word}_table.jpeg"
            options = [captions[i], *captions[:i], *captions[i + 1 :]]
            rows.append({"image_path": image, "caption_options": options})
            picture(folder / "controlled_images" / f"{thing}_{word}_table.jpeg")
    write_json(folder / "controlled_images_dataset.json", rows)
    coco = [[139, "A photo of a cat on the left", "A photo of a cat on the right"]]
    write_json(folder / "coco_qa_one_obj.json", coco)
    picture(folder / "val2017/000000000139.jpg")


def make_rotate(folder: Path) -> None:
    """Rotated pictures: 15 rows of questions, clock positions and angles."""
    rows = [
        {
            "image": f"{i % 5}.png",
            "rotation": 90 * (i % 4),
            "question": "Where is the cup?",
            "answer": ("left", "3 o'clock", 90)[i % 3],
            "caption": "A cup on a table, turned.",
            "task": ("direction", "clock", "angle")[i % 3],
        }
        for i in range(15)
    ]
    write_json(folder / "rotate_qa.json", rows)
    write_lines(folder / "rotate_caption.jsonl", rows)
    for i in range(5):
        picture(folder / "images" / f"{i}.png")


def make_jsonl(folder: Path) -> None:
    """A folder of JSON lines: 20 rows to train, 4 held out."""
    rows = [
        {"question": f"q{i}", "answer": f"a{i}", "image": "a.png", "id": f"row{i}"}
        for i in range(20)
    ]
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "test.jsonl", rows[:4])
    picture(folder / "a.png")


def group_row(index: int, *, num_negatives: int = 2) -> dict[str, Any]:
    """Return one group of `--dataset groups`: anchor and positive say the same direction."""
    words = ("left", "right", "front", "behind")
    right, wrong = words[index % 4], [words[(index + 1 + i) % 4] for i in range(num_negatives)]
    return {
        "id": f"group{index}",
        "anchor": {"question": f"Where is {index}?", "answer": f"it is {right}"},
        "positive": {"question": f"Place of {index}?", "answer": f"{right}!"},
        "negatives": [
            {"question": f"Not {index}?" + "?" * (index % 5), "answer": f"not {word}"}
            for word in wrong
        ],
    }


def make_groups(folder: Path) -> None:
    """A folder of groups with one shared picture each: 12 to train, 2 held out."""
    rows = [{**group_row(i), "image": "a.png", "group": "spatial"} for i in range(14)]
    write_lines(folder / "train.jsonl", rows[:12])
    write_lines(folder / "test.jsonl", rows[12:])
    picture(folder / "a.png")


def write_preferences(folder: Path) -> None:
    """30 pairs of answers in dpo.jsonl, and 30 answers that are wanted or not in kto.jsonl."""
    pairs = [
        {"question": f"{i}?", "chosen": "!" * (1 + i % 5), "rejected": "no " * (1 + i % 3)}
        for i in range(30)
    ]
    write_lines(folder / "dpo.jsonl", pairs)
    rated = []
    for i, pair in enumerate(pairs):
        said = {"user": pair["question"], "assistant": pair["chosen"]}
        messages = [{"role": role, "content": text} for role, text in said.items()]
        rated.append({"messages": messages, "label": i % 3 > 0})
    write_lines(folder / "kto.jsonl", rated)
