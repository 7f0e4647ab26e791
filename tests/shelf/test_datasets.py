"""Each dataset part on small files in the format of the public set; each collate part on them."""

import functools
import hashlib

import pytest

from register import (
    dataset_register,
    image_token_register,
    import_shelf,
    metric_register,
    prompt_fn_register,
    prompt_register,
)
from stageline.errors import DataError, UserError
from tests.helpers.dataset_checks import (
    check_micro_batch,
    check_right_answers,
    check_rows,
    check_splits,
)
from tests.helpers.tiny_datasets import make_groups, make_jsonl, picture, write_json, write_lines
from tests.helpers.tiny_models import tiny_processor, tiny_tokenizer

import_shelf("prompt", "prompt_fn", "dataset", "metric")


# key -> makes the files, metric, template
PUBLIC = {
    "digits": (lambda folder: None, "exact_match", "digits"),
    "jsonl": (make_jsonl, "exact_match", "vqa"),
    "groups": (make_groups, "exact_match", "vqa"),
}


def _maker(key, folder):
    PUBLIC[key][0](folder)
    return functools.partial(dataset_register[key], dataset_path=str(folder))


def test_every_dataset_is_tested():
    # `sets` has whatever the user's files hold: tests/unit/test_sets*.py; `corpus` has tokens:
    # tests/unit/test_corpus_rows.py
    assert set(dataset_register) == {*PUBLIC, "sets", "corpus"}


@pytest.mark.parametrize("key", PUBLIC)
def test_rows_are_pictures_and_samples(key, tmp_path):
    check_rows(_maker(key, tmp_path))


@pytest.mark.parametrize("key", PUBLIC)
def test_train_and_test_share_nothing(key, tmp_path):
    check_splits(_maker(key, tmp_path), by_files=key == "jsonl")


@pytest.mark.parametrize("key", PUBLIC)
def test_the_right_answer_is_right(key, tmp_path):
    check_right_answers(_maker(key, tmp_path), metric_register[PUBLIC[key][1]])


@pytest.mark.parametrize("key", PUBLIC)
@pytest.mark.parametrize("prompt_fn", ["fill", "chat"])
def test_every_dataset_makes_a_micro_batch(key, prompt_fn, tmp_path):
    prompt = prompt_register[PUBLIC[key][2]]
    check_micro_batch(_maker(key, tmp_path), prompt=prompt, prompt_fn=prompt_fn)


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
            {"messages": [{"role": "user", "content": message},
                          {"role": "assistant", "content": "a cup"}]},
        ],
    )  # fmt: skip
    picture(tmp_path / "a.png")
    dataset = dataset_register["jsonl"](dataset_path=str(file), split="test", test_size=1.0)
    assert (dataset[0][1]["question"], dataset[0][1]["answer"]) == ("Add\n1 2", "3")
    images, sample = dataset[1]
    assert images[0].size == (20, 30)
    processor = tiny_processor("llava")
    rendered = prompt_fn_register["chat"]({**sample, "num_images": 1}, "", processor=processor)
    assert rendered.num_images == 1 and "<image>\nwhat?" in rendered.text


def test_bad_line_17_is_named(tmp_path):
    file = tmp_path / "file.jsonl"
    good = b'{"question": "q", "answer": "a"}\n'
    bad = b'{"question": "q", "answer": "a", "videos": ["a.gif"]}\n'
    file.write_bytes(good * 15 + b"\n" + bad + good)
    with pytest.raises(DataError, match=r"file\.jsonl:17: .*videos, for which its text has no"):
        dataset_register["jsonl"](dataset_path=str(file))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        dataset_register["jsonl"](dataset_path=str(tmp_path / "nothing.jsonl"))
