"""Scenes: answers against positions measured in the picture, balance, groups, splits, options."""

import collections
import json
import math

import numpy
import pytest

from dataset import group_numbers
from examples.spatial.draw_scenes import export_scenes
from examples.spatial.scene_questions import ANSWERS, TASKS
from examples.spatial.scenes import COLORS, DARK, PALE, Scenes
from examples.spatial.spatial_sets import RotateQA
from stageline.data.rows.readers import data_fingerprint
from stageline.errors import UserError

SIZE = 192  # large pictures, so that places can be measured in them


def pixels(image):
    return numpy.asarray(image).astype(int)


def middle_of(image, *colors):
    """Mean (x, y) of all pixels near one of the colours, and their number."""
    near = [(abs(pixels(image) - color) < 5).all(axis=2) for color in colors]
    rows, columns = numpy.nonzero(numpy.any(near, axis=0))
    return (columns.mean(), rows.mean()), len(rows)


def measured_heading(image):
    """Return the car's heading, from its middle to the windscreen, in degrees from the top."""
    (front_x, front_y), _ = middle_of(image, PALE)
    (x, y), _ = middle_of(image, DARK)
    return math.degrees(math.atan2(front_x - x, y - front_y)) % 360


# an independent way to say what is where: dot products with the front and the right hand
def seen_from(heading, dx, dy):
    front = (math.sin(math.radians(heading)), -math.cos(math.radians(heading)))
    right = (-front[1], front[0])
    ahead = dx * front[0] + dy * front[1]
    aside = dx * right[0] + dy * right[1]
    return ahead, aside


def answer_by_measuring(task, stated, heading, dx, dy):
    ahead, aside = seen_from(heading, dx, dy)
    if abs(ahead) > abs(aside):
        direction = "front" if ahead > 0 else "back"
    else:
        direction = "right" if aside > 0 else "left"
    if task == "direction":
        return direction
    if task == "statement":
        return "yes" if direction == stated else "no"
    if task == "picture":
        return "right" if dx > 0 else "left"
    if task == "clock":
        hours = [(math.sin(math.pi * h / 6), math.cos(math.pi * h / 6)) for h in range(12)]
        best = max(range(12), key=lambda h: hours[h][0] * aside + hours[h][1] * ahead)
        return f"{best or 12} o'clock"
    up_down = {1: "upper", -1: "lower", 0: ""}[sign(math.cos(math.radians(heading)))]
    side = {1: "right", -1: "left", 0: ""}[sign(math.sin(math.radians(heading)))]
    if up_down and side:
        return f"{up_down} {side}"
    return side or {"upper": "up", "lower": "down"}[up_down]


def sign(value):
    return 0 if abs(value) < 0.38 else 1 if value > 0 else -1


def things_apart(question):
    """Scenes in which the asked colour occurs once, so that a picture can be measured."""
    colors = [thing.color for thing in question.scene.things]
    return colors.count(colors[question.asked]) == 1


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_what_is_measured_in_the_picture(task):
    scenes = Scenes(tasks=[task], references=["car"], negatives=1, image_size=SIZE, num_train=16)
    measured = 0
    for index in range(len(scenes)):
        question = scenes.question(index)
        if not things_apart(question):
            continue
        (image,), sample = scenes[index]
        heading = measured_heading(image)
        turned = abs((heading - sample["rotation"] + 180) % 360 - 180)
        assert turned < 4, "the windscreen is where the car faces"
        car, _ = middle_of(image, DARK, PALE)
        thing, count = middle_of(image, COLORS[question.scene.things[question.asked].color])
        assert count > 50
        dx, dy = thing[0] - car[0], thing[1] - car[1]
        wanted = answer_by_measuring(task, question.stated, heading, dx, dy)
        assert sample["answer"] == wanted, scenes.describe(index)
        measured += 1
    assert measured > 20


@pytest.mark.parametrize("task", TASKS)
def test_all_answers_are_equally_frequent(task):
    scenes = Scenes(tasks=[task], num_train=1200, num_things=2)
    counts = collections.Counter(scenes.question(i).answer for i in range(len(scenes)))
    assert set(counts) == set(ANSWERS[task])
    mean = len(scenes) / len(counts)
    # five standard deviations of a fair draw
    assert all(abs(count - mean) < 5 * math.sqrt(mean) for count in counts.values())


def test_a_sample_follows_from_seed_split_and_index_alone():
    forward, backward = (Scenes(negatives=2, num_train=6) for _ in range(2))
    rows = range(len(forward))
    first = [(forward[i][0][0].tobytes(), forward[i][1]) for i in rows]
    again = [(backward[i][0][0].tobytes(), backward[i][1]) for i in reversed(rows)]
    assert first == again[::-1]
    assert not hasattr(forward[0][0][0], "filename")
    other = Scenes(negatives=2, num_train=6, seed=1)
    assert all(other[i][0][0].tobytes() != first[i][0] for i in rows)
    # figures of earlier studies compare only as long as this does
    assert [Scenes().question(i).answer for i in range(5)] == PINNED


PINNED = ["right", "2 o'clock", "yes", "right", "left"]


def test_splits_share_no_scene_and_no_picture():
    options = {"num_things": 1, "num_shapes": 1, "num_colors": 2, "num_train": 400, "num_test": 200}
    sides = [Scenes(split=split, **options) for split in ("train", "validation", "test")]
    distances, pictures = [], []
    for scenes in sides:
        questions = [scenes.question(i) for i in range(len(scenes))]
        distances.append({thing.distance for q in questions for thing in q.scene.things})
        pictures.append({scenes[i][0][0].tobytes() for i in range(len(scenes))})
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert not distances[first] & distances[second]
        assert not pictures[first] & pictures[second]


@pytest.mark.parametrize("negatives", [None, 2])
def test_held_out_combinations_are_never_trained(negatives):
    def combinations(scenes, question):
        step = question.scene.heading * 8 // 360
        return [(thing.shape, thing.color, step) for thing in question.scene.things]

    train = Scenes(num_train=900, negatives=negatives)
    seen = {name for i in range(len(train)) for name in combinations(train, train.question(i))}
    test = Scenes(split="test", num_test=200, negatives=negatives)
    kinds = collections.Counter()
    for index in range(len(test)):
        question = test.question(index)
        is_new = test[index][1]["group"].endswith(", new")
        assert (combinations(test, question)[question.asked] not in seen) == is_new
        kinds[is_new] += 1
    assert kinds[True] == kinds[False]
    parts = [set(values) for values in zip(*seen, strict=True)]
    assert [len(part) for part in parts] == [4, 6, 8], "each alone was trained"


@pytest.mark.parametrize(
    ("things", "headings", "negatives"), [(1, 4, 1), (2, 8, 2), (3, 12, 5), (5, 4, 3)]
)
def test_groups_are_whole_and_differ_in_what_they_should(things, headings, negatives):
    scenes = Scenes(
        negatives=negatives, num_things=things, headings=headings, num_train=40, oblique=0.5
    )
    size = scenes.group_size
    assert size == 2 + negatives and len(scenes) == 40 * size
    for start in range(0, len(scenes), size):
        rows = [scenes[index] for index in range(start, start + size)]
        samples = [sample for _, sample in rows]
        assert group_numbers(samples) == [0] * size
        assert [sample["role"] for sample in samples[:3]] == ["anchor", "positive", "negative"]
        anchor, positive, *others = samples
        assert (positive["question"], positive["answer"]) == (anchor["question"], anchor["answer"])
        assert all(sample["answer"] != anchor["answer"] for sample in others)
        assert len({sample["groups"]["task"] for sample in samples}) == 1
        pictures = [pixels(images[0]) for images, _ in rows]
        assert abs(pictures[1] - pictures[0]).max() > 60, "another picture"
        for sample, picture in zip(others, pictures[2:], strict=True):
            is_other_picture = abs(picture - pictures[0]).max() > 60
            assert is_other_picture != (sample["question"] != anchor["question"]), "one change"
    assert len({scenes[i][1]["contrast_group"] for i in range(len(scenes))}) == 40


@pytest.mark.parametrize("task", TASKS)
def test_a_mirrored_pair_is_one_scene_seen_from_both_sides(task):
    """Pixels are mirrored but for the rounding of edges; answers are measured in them."""
    scenes = Scenes(
        mirrored=True, tasks=[task], references=["car"], num_things=1, num_train=12, image_size=SIZE
    )
    assert scenes.group_size == 2 and len(scenes) == 24
    for start in range(0, 24, 2):
        (plain,), first = scenes[start]
        (mirrored,), second = scenes[start + 1]
        assert abs(pixels(plain)[:, ::-1] - pixels(mirrored)).mean() < 2, "the same, mirrored"
        assert abs(pixels(plain) - pixels(mirrored)).mean() > 2, "and not the same"
        assert first["contrast_group"] == second["contrast_group"] == first["cluster"]
        assert first["question"] == second["question"] and first["answer"] != second["answer"]
        for index, image in ((start, plain), (start + 1, mirrored)):
            question = scenes.question(index)
            (x, y), _ = middle_of(image, COLORS[question.scene.things[0].color])
            (near_x, near_y), _ = middle_of(image, DARK, PALE)
            heading = measured_heading(image)
            found = answer_by_measuring(task, question.stated, heading, x - near_x, y - near_y)
            assert found == question.answer
    assert len({scenes[i][1]["contrast_group"] for i in range(24)}) == 12


def test_an_exported_folder_is_read_as_rotate_qa(tmp_path):
    for split in ("train", "test"):
        export_scenes(Scenes(split=split, num_train=10, num_test=10), tmp_path, split=split)
    scenes = Scenes(split="test", num_test=10)
    rows = RotateQA(dataset_path=str(tmp_path), split="test")
    assert len(rows) == 10
    for index in range(10):
        (image,), sample = scenes[index]
        (stored,), read = rows[index]
        assert stored.convert("RGB").tobytes() == image.tobytes()
        for name in ("question", "answer", "task", "rotation"):
            assert read[name] == sample[name]
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").open()]
    assert [row["scene_task"] for row in rows] == [*TASKS, *TASKS]


def test_the_fingerprint_follows_what_is_drawn():
    same = data_fingerprint(Scenes())
    assert same == data_fingerprint(Scenes(num_test=3))
    changes = [{"seed": 1}, {"split": "test"}, {"negatives": 2}, {"image_size": 32},
               {"num_train": 7}, {"tasks": ["clock"]}, {"oblique": 0.1},
               {"mirrored": True}]  # fmt: skip
    prints = {data_fingerprint(Scenes(**change)) for change in changes}
    assert len(prints | {same}) == len(changes) + 1


@pytest.mark.parametrize(
    "options",
    [{"num_things": 6}, {"headings": 7}, {"tasks": ["north"]}, {"references": ["dog"]},
     {"split": "dev"}, {"oblique": 2}, {"num_things": 3, "num_shapes": 1, "num_colors": 2},
     {"negatives": 2, "mirrored": True}],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(options):
    with pytest.raises(UserError, match=f"--dataset.{next(iter(options))} .*Choose") as caught:
        Scenes(**options)
    assert caught.value.exit_code == 2
