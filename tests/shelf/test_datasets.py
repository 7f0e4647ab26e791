"""Each dataset part on small files in the format of the public set; each collate part on them."""

import hashlib

import pytest

from register import (
    collate_fn_register,
    dataset_register,
    image_token_register,
    import_shelf,
    metric_register,
    prompt_fn_register,
    prompt_register,
)
from stageline.checking.tiny_models import tiny_processor, tiny_tokenizer
from stageline.errors import DataError, UserError
from tests.helpers.tiny_datasets import (
    make_groups,
    make_jsonl,
    make_rotate,
    make_spatial_mm,
    make_vsr,
    make_whats_up,
    picture,
    write_json,
    write_lines,
)

import_shelf("prompt", "prompt_fn", "dataset", "metric")


# key -> makes the files, metric, template
PUBLIC = {
    "digits": (lambda folder: None, "exact_match", "digits"),
    "scenes": (lambda folder: None, "rotate_qa", "vqa"),
    "vsr": (make_vsr, "vsr", "vsr"),
    "spatial_mm": (make_spatial_mm, "spatial_mm", "vqa"),
    "whats_up": (make_whats_up, "whats_up", "vqa"),
    "rotate_qa": (make_rotate, "rotate_qa", "vqa"),
    "rotate_caption": (make_rotate, "contains", "caption"),
    "jsonl": (make_jsonl, "exact_match", "vqa"),
    "groups": (make_groups, "exact_match", "vqa"),
}


def _dataset(key, folder, **options):
    PUBLIC[key][0](folder)
    return dataset_register[key](dataset_path=str(folder), **options)


def test_every_dataset_is_tested():
    # `sets` has whatever the user's files hold: tests/unit/test_sets*.py; `corpus` has tokens:
    # tests/unit/test_corpus_rows.py
    assert set(dataset_register) == {*PUBLIC, "sets", "corpus"}


@pytest.mark.parametrize("key", PUBLIC)
def test_rows_are_pictures_and_samples(key, tmp_path):
    for split in ("train", "test"):
        dataset = _dataset(key, tmp_path, split=split)
        assert len(dataset) > 0
        ids = set()
        for row in range(min(len(dataset), 40)):
            images, sample = dataset[row]
            assert all(image.size for image in images)
            assert isinstance(sample["question"], str) and isinstance(sample["answer"], str)
            assert isinstance(dataset.describe(row), str)
            ids.add(sample["id"])
        assert len(ids) == min(len(dataset), 40), "ids are unique"


@pytest.mark.parametrize("key", PUBLIC)
def test_train_and_test_share_nothing(key, tmp_path):
    sides = []
    for split in ("train", "test"):
        dataset = _dataset(key, tmp_path, split=split)
        sides.append({dataset[row][1]["id"] for row in range(len(dataset))})
    if key != "jsonl":  # there the files say what is what
        assert not sides[0] & sides[1]
    again = _dataset(key, tmp_path, split="test")
    assert sides[1] == {again[row][1]["id"] for row in range(len(again))}


@pytest.mark.parametrize("key", PUBLIC)
def test_the_right_answer_is_right(key, tmp_path):
    _, metric, _ = PUBLIC[key]
    dataset = _dataset(key, tmp_path, split="train")
    samples = [dataset[row][1] for row in range(min(len(dataset), 40))]
    predictions = [{"prediction": sample["answer"]} for sample in samples]
    result = metric_register[metric](predictions, samples)
    assert result["score"] == 1.0
    grouped = sorted(i for rows in result["groups"].values() for i in rows)
    assert grouped == list(range(len(samples)))


@pytest.mark.parametrize("key", PUBLIC)
@pytest.mark.parametrize("prompt_fn", ["fill", "chat"])
def test_every_dataset_makes_a_micro_batch(key, prompt_fn, tmp_path):
    dataset = _dataset(key, tmp_path, split="train")
    processor = tiny_processor("internvl")
    batch = collate_fn_register["sft"](
        [dataset[0], dataset[1]],
        prompt=prompt_register[PUBLIC[key][2]],
        prompt_fn=prompt_fn_register[prompt_fn],
        image_token=image_token_register["auto"],
        processor=processor,
        pad_token_id=0,
        max_token_num=500,
        stage=0,
        num_stages=2,
    )
    assert batch["labels"].shape == batch["input_ids"].shape
    for row, labels in enumerate(batch["labels"]):
        learnt = processor.tokenizer.decode(labels[labels != -100], skip_special_tokens=True)
        assert learnt.strip() == dataset[row][1]["answer"]


@pytest.mark.parametrize("key", sorted(prompt_register))
def test_every_template_can_be_filled(key):
    sample = {
        "id": "1", "question": "q", "answer": "a", "caption": "c", "text": "t",
        "choices": ["x", "y"], "num_images": 0,
    }  # fmt: skip
    rendered = prompt_fn_register["fill"](sample, prompt_register[key], processor=None)
    assert rendered.target_spans()


@pytest.mark.parametrize("key", sorted(image_token_register))
def test_every_image_token_leaves_text_alone(key):
    sample = {"id": "1", "question": "q", "answer": "a", "num_images": 0}
    rendered = prompt_fn_register["fill"](sample, "[IMAGE]\n[QUESTION] [ANSWER]")
    placed = image_token_register[key](rendered, None, processor=tiny_tokenizer())
    assert placed.text == "q a"


@pytest.mark.parametrize(
    ("key", "family"), [("internvl", "internvl"), ("image", "llava"),
                        ("qwen_vl", "qwen2_5_vl"), ("gemma3", "gemma3_vl")]
)  # fmt: skip
def test_explicit_image_tokens_are_what_auto_finds(key, family):
    sample = {"id": "1", "question": "q", "answer": "a", "num_images": 2}
    rendered = prompt_fn_register["fill"](sample, "[IMAGE]\n[QUESTION] [ANSWER]")
    images, processor = [object()] * 2, tiny_processor(family)
    explicit = image_token_register[key](rendered, images, processor=processor)
    assert explicit == image_token_register["auto"](rendered, images, processor=processor)


def test_digits_are_split_for_good():
    train = dataset_register["digits"](dataset_path=None, split="train")
    test = dataset_register["digits"](dataset_path=None, split="test", image_size=48)
    assert (len(train), len(test)) == (1437, 360)
    answers = [test[row][1]["answer"] for row in range(len(test))]
    counts = [answers.count(str(digit)) for digit in range(10)]
    assert counts == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36], "stratified"
    images, sample = test[0]
    assert images[0].size == (48, 48) and images[0].mode == "RGB"
    assert sample == test[0][1], "the wording does not change"
    assert len({train[row][1]["question"] for row in range(40)}) > 1
    # a change of these would make figures of earlier runs incomparable
    first_ids = [test[row][1]["id"] for row in range(5)]
    assert first_ids == ["digits-10", "digits-18", "digits-33", "digits-35", "digits-36"]
    digest = hashlib.sha256(str(test.rows.tolist()).encode()).hexdigest()
    assert digest.startswith("758276e976d70883")


def test_digits_look_like_their_source():
    from sklearn.datasets import load_digits

    train = dataset_register["digits"](dataset_path=None, split="train", image_size=8)
    source = load_digits()
    for row in (0, 700, 1436):
        images, sample = train[row]
        number = int(sample["id"].split("-")[1])
        assert int(sample["answer"]) == source.target[number]
        pixels = list(images[0].convert("L").tobytes())
        expected = [round(value * 255 / 16) for value in source.images[number].ravel()]
        assert pixels == expected


def test_vsr_splits_and_words(tmp_path):
    dataset = _dataset("vsr", tmp_path, split="test", split_type="zeroshot", answers="yes_no")
    sample = dataset[1][1]
    assert sample["caption"] == "The dog is left of the zeroshot test cat."
    assert (sample["answer"], sample["label"], sample["group"]) == ("yes", 1, "left of")
    assert dataset[0][1]["answer"] == "no"
    assert sample["source"].endswith("zeroshot/test.jsonl:2")
    assert sample["groups"] == {"relation": "left of", "category": "projective"}
    assert len(_dataset("vsr", tmp_path, split="dev")) == 4


def test_spatial_mm_keeps_pictures_together_and_can_hold_out_all(tmp_path):
    whole = _dataset("spatial_mm", tmp_path, split="test", test_size=1.0)
    assert len(whole) == 10
    sample = whole[1][1]
    assert sample["choices"] == ["left", "top left"] and sample["answer_index"] == 1
    assert sample["group"] == "one_obj: in the picture"
    assert sample["groups"] == {
        "subset": "one_obj", "perspective": "in the picture", "task": "place",
        "relation": "top left",
    }  # fmt: skip
    assert whole[0][1]["group"] == "one_obj: camera"
    hop = _dataset("spatial_mm", tmp_path, split="test", subset="multihop", test_size=1.0)
    assert hop[0][1]["answer"] == "pink" and "choices" not in hop[0][1]


def test_whats_up_does_not_give_the_answer_away(tmp_path):
    dataset = _dataset("whats_up", tmp_path, split="test", test_size=1.0)
    samples = [dataset[row][1] for row in range(len(dataset))]
    assert len({sample["answer_index"] for sample in samples}) > 1, "not always the first"
    assert all(s["choices"][s["answer_index"]] == s["caption"] for s in samples)
    assert {sample["group"] for sample in samples} == {"left", "right", "on", "under"}
    coco = _dataset("whats_up", tmp_path, split="test", subset="coco_one", test_size=1.0)
    assert coco[0][0][0].size == (20, 30)


def test_whats_up_keeps_pairs_of_objects_together(tmp_path):
    sides = []
    for split in ("train", "test"):
        dataset = _dataset("whats_up", tmp_path, split=split, test_size=4)
        sides.append({dataset[row][1]["caption"].split()[1] for row in range(len(dataset))})
    assert sides[0] | sides[1] == {"mug", "book", "cap"} and not sides[0] & sides[1]


def test_rotated_pictures(tmp_path):
    dataset = _dataset("rotate_qa", tmp_path, split="train", rotate_images=True)
    for row in range(len(dataset)):
        images, sample = dataset[row]
        upright = sample["rotation"] in (0, 180)
        assert images[0].size == ((20, 30) if upright else (30, 20))


def test_jsonl_files_fields_and_splits(tmp_path):
    rows = [{"prompt": f"p{i}", "reply": i, "kind": "xy"[i % 2]} for i in range(50)]
    file = tmp_path / "rows.jsonl"
    write_lines(file, rows)
    fields = {"question": "prompt", "answer": "reply"}
    part = dataset_register["jsonl"]
    options = {"dataset_path": str(file), "fields": fields, "group": "kind"}
    train, test = (part(split=split, **options) for split in ("train", "test"))
    assert (len(train), len(test)) == (45, 5)
    assert test[0][0] is None
    assert test[0][1]["question"].startswith("p") and test[0][1]["group"] in "xy"
    assert len(part(split="test", test_size=1, **options)) == 1
    assert len(part(split="test", test_size=1.0, **options)) == 50
    other = part(split="test", test_path=str(file), **options)
    assert len(other) == len(part(split="train", test_path=str(file), **options)) == 50
    # a row more does not move the others
    kept = {train[i][1]["id"] for i in range(45)}
    write_lines(file, [*rows, rows[0]])
    longer = part(split="train", test_size=5, **options)
    assert len(kept & {longer[i][1]["id"] for i in range(46)}) >= 44


def test_jsonl_instructions_and_messages(tmp_path):
    file = tmp_path / "rows.json"
    message = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    write_json(
        file,
        [
            {"instruction": "Add", "input": "1 2", "output": "3"},
            {"instruction": "Say hi", "input": "", "output": "hi"},
            {"messages": [{"role": "user", "content": message},
                          {"role": "assistant", "content": "a cup"}]},
        ],
    )  # fmt: skip
    picture(tmp_path / "a.png")
    dataset = dataset_register["jsonl"](dataset_path=str(file), split="test", test_size=1.0)
    assert [dataset[i][1].get("question") for i in range(3)] == ["Add\n1 2", "Say hi", None]
    assert dataset[0][1]["answer"] == "3"
    images, sample = dataset[2]
    assert images[0].size == (20, 30)
    processor = tiny_processor("llava")
    rendered = prompt_fn_register["chat"]({**sample, "num_images": 1}, "", processor=processor)
    assert rendered.num_images == 1 and "<image>\nwhat?" in rendered.text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"question": "q", "answer": ', "no JSON"),
        (b'{"question": "\xff", "answer": "a"}', "not UTF-8"),
        (b'["q", "a"]', "JSON object was expected"),
        (b'{"question": "q"}', "'answer' is missing"),
        (b'{"question": "q", "answer": "a", "image": 5}', "file name"),
        (b'{"question": "q", "answer": "a", "videos": ["a.gif"]}', "videos, which its text has no"),
        (b'{"question": "q", "answer": "a", "video": "a.gif"}', "has video, which"),
        (b'{"messages": [{"role": "user"}], "instruction": "q", "output": "a"}', "several formats"),
    ],
)
def test_bad_line_17_is_named(tmp_path, line, reason):
    file = tmp_path / "file.jsonl"
    good = b'{"question": "q", "answer": "a"}\n'
    file.write_bytes(good * 15 + b"\n" + line + b"\n" + good)
    with pytest.raises(DataError, match=rf"file\.jsonl:17:(\d+:)? .*{reason}") as caught:
        dataset_register["jsonl"](dataset_path=str(file))
    assert caught.value.exit_code == 3


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        dataset_register["jsonl"](dataset_path=str(tmp_path / "nothing.jsonl"))
    with pytest.raises(UserError, match="dataset vsr was expected"):
        dataset_register["vsr"](dataset_path=None)
    with pytest.raises(UserError, match=r"random/train.jsonl.*lies in"):
        dataset_register["vsr"](dataset_path=str(tmp_path))
    file = tmp_path / "rows.jsonl"
    write_lines(file, [{"question": "q", "answer": "a", "image": "gone.png"}] * 20)
    dataset = dataset_register["jsonl"](dataset_path=str(file))
    with pytest.raises(DataError, match=r"rows.jsonl:\d+.*no image gone.png"):
        dataset[0]
    (tmp_path / "gone.png").write_text("no picture")
    with pytest.raises(DataError, match=r"rows.jsonl:\d+.*gone.png does not decode"):
        dataset[0]
