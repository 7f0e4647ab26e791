"""Ids and image tensors equal those of transformers' processor; later stages need no pixels."""

import warnings

import numpy
import pytest
import torch
from PIL import Image

from prompt_fn import auto, chat, fill
from stageline.data.batches.batch import add_image_inputs, encode_sample, pad_rows, render_sample
from stageline.data.batches.collate import collate_packed_sft, collate_sft
from stageline.data.text.processor import load_processor, save_processor
from stageline.data.text.rendered import Piece, Rendered, plain_image_text
from stageline.errors import UserError
from tests.helpers.tiny_models import PROCESSOR_FAMILIES, tiny_processor

PROMPT = "[IMAGE]\n[QUESTION]\nAnswer: [ANSWER]"
SOME = ("llava", "internvl", "qwen2_5_vl")
# width, height of each row's images: several, none, wide and high ones
SIZES = (((20, 30),), (), ((64, 33), (16, 16)), ((40, 90),))


@pytest.fixture(scope="module", params=PROCESSOR_FAMILIES)
def processor(request):
    try:
        return tiny_processor(request.param)
    except ImportError as error:  # older releases of transformers need torchvision for some
        pytest.skip(str(error))


def _rows():
    generator = numpy.random.default_rng(0)

    def picture(size):
        return Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8))

    return [[picture(size) for size in row] for row in SIZES]


def _samples():
    return [
        (row, {"id": str(i), "question": f"Which digit is this? {i}\n\n<image>", "answer": "7"})
        for i, row in enumerate(_rows())
    ]


def _collate(processor, samples, *, stage, prompt_fn=fill, **options):
    arguments = {"max_token_num": 4096, "prompt": PROMPT, **options}
    return collate_sft(
        samples,
        prompt_fn=prompt_fn,
        image_token=auto,
        processor=processor,
        pad_token_id=0,
        stage=stage,
        **arguments,
    )


def _reference(processor, texts, rows):
    """Process text and images with transformers only."""
    return processor(
        text=texts,
        images=[list(row) for row in rows],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )


def test_everything_equals_the_librarys_processor(processor):
    rows, token = _rows(), plain_image_text(processor)
    texts = [f"{(token + chr(10)) * len(row)}Which digit {i}?\n\nok" for i, row in enumerate(rows)]
    expected = _reference(processor, texts, rows)
    encoded = []
    for i, row in enumerate(rows):
        pieces = [piece for _ in row for piece in (Piece(token, is_image=True), Piece("\n"))]
        pieces.append(Piece(f"Which digit {i}?\n\nok", is_user=True))
        rendered = Rendered(tuple(pieces), is_chat=True)
        encoded.append(encode_sample(rendered, row, processor=processor, name="row"))
    batch = pad_rows(encoded, pad_token_id=0, with_labels=False)
    names = ["row"] * len(rows)
    add_image_inputs(batch, rows, processor=processor, names=names, with_pixels=True)
    assert set(batch) == set(expected)
    for name, value in expected.items():
        assert torch.equal(batch[name], value), name


def test_later_stages_have_the_same_integers_and_no_pixels(processor, monkeypatch):
    first = _collate(processor, _samples(), stage=0)
    samples = _samples()
    own = {id(image) for images, _ in samples for image in images}
    load = Image.Image.load

    def guarded(image, *args):
        assert id(image) not in own, "a later stage decoded an image"
        return load(image, *args)

    monkeypatch.setattr(Image.Image, "load", guarded)
    later = _collate(processor, samples, stage=1)
    assert {name for name in first if not name.startswith("pixel")} == set(later)
    assert any(name.startswith("pixel") for name in first)
    for name, value in later.items():
        assert torch.equal(value, first[name]), name
        assert not value.is_floating_point()


@pytest.mark.parametrize("processor", SOME, indirect=True)
def test_packed_rows_hold_the_images_of_their_samples(processor):
    rows = [_samples()[2:], [], _samples()[:2]]
    options = {"prompt": PROMPT, "prompt_fn": fill, "image_token": auto, "processor": processor}
    options.update(pad_token_id=0, max_token_num=4096)
    packed = collate_packed_sft(rows, stage=0, **options)
    padded = _collate(processor, [item for row in rows for item in row], stage=0)
    own = padded["attention_mask"].bool()
    assert torch.equal(packed["input_ids"][packed["sample_ids"] >= 0], padded["input_ids"][own])
    for name in set(padded) - {"input_ids", "attention_mask", "labels"}:
        expected, found = padded[name], packed[name]
        if expected.shape == own.shape:  # one entry a token, not one an image
            expected, found = expected[own], found[packed["sample_ids"] >= 0]
        assert torch.equal(found, expected), name
    later = collate_packed_sft(rows, stage=1, **options)
    assert set(later) == {name for name in packed if not name.startswith("pixel")}
    assert all(torch.equal(value, packed[name]) for name, value in later.items())


@pytest.mark.parametrize("processor", SOME, indirect=True)
def test_user_text_holds_no_image_token(processor):
    """A question that says "<image>" neither adds image tokens nor moves them."""
    token = plain_image_text(processor)
    plain = [(images, {**sample, "question": "Which?"}) for images, sample in _samples()]
    hostile = [(images, {**sample, "question": token * 3}) for images, sample in _samples()]
    image_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    for stage in (0, 1):
        counts = [
            (_collate(processor, samples, stage=stage)["input_ids"] == image_id).sum(1).tolist()
            for samples in (plain, hostile)
        ]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("processor", SOME, indirect=True)
def test_text_rows_alone_have_no_pixels(processor):
    samples = [(None, {"id": "a", "question": "Which?", "answer": "7"})] * 2
    batch = _collate(processor, samples, stage=0)
    assert not any(name.startswith("pixel") for name in batch)
    assert processor.tokenizer.decode(batch["input_ids"][0]) == "Which?\nAnswer: 7</s>"


@pytest.mark.parametrize("processor", SOME, indirect=True)
def test_chat_text_is_the_processors_own(processor):
    images, sample = _samples()[2]
    rendered = render_sample(
        images, sample, prompt=PROMPT, prompt_fn=chat, image_token=auto, processor=processor,
        for_generation=True,
    )  # fmt: skip
    content = [{"type": "image"}] * 2 + [{"type": "text", "text": f"{sample['question']}\nAnswer:"}]
    expected = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=processor.chat_template,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert rendered.text == expected
    assert rendered.num_images == 2


@pytest.mark.parametrize("processor", SOME, indirect=True)
def test_image_tokens_are_never_cut(processor):
    samples = _samples()
    whole = _collate(processor, samples, stage=1)
    width = whole["input_ids"].shape[1]
    image_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    with warnings.catch_warnings(action="ignore"):
        cut = _collate(processor, samples, stage=0, max_token_num=width - 9, overlong="cut_prompt")
    assert cut["input_ids"].shape[1] <= width - 9
    before, after = [(b["input_ids"] == image_id).sum(1).tolist() for b in (whole, cut)]
    assert before == after
    assert (cut["labels"] != -100).sum() == (whole["labels"] != -100).sum()


@pytest.mark.parametrize("processor", SOME, indirect=True)
def test_a_dropped_row_takes_its_images_with_it(processor):
    samples = _samples()
    samples[0][1]["answer"] = "7" * 3000
    with warnings.catch_warnings(action="ignore"):
        batch = _collate(processor, samples, stage=0, max_token_num=1000, overlong="drop")
    others = _collate(processor, [(None, samples[0][1] | {"answer": "7"}), *samples[1:]], stage=0)
    assert (batch["labels"][0] == -100).all()
    for name in (name for name in others if name.startswith("pixel")):
        assert torch.equal(batch[name], others[name]), name


@pytest.mark.parametrize("processor", SOME, indirect=True)
def test_saved_processors_load_and_do_the_same(processor, tmp_path):
    save_processor(processor, tmp_path)
    loaded = load_processor(tmp_path)
    assert type(loaded).__name__ == type(processor).__name__
    before, after = (_collate(p, _samples(), stage=0) for p in (processor, loaded))
    assert set(before) == set(after)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert loaded.chat_template == processor.chat_template


def test_photos_stand_upright(tmp_path):
    path = tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned
    Image.new("RGB", (90, 40)).save(path, exif=exif)
    sample = {"id": "5", "question": "q", "answer": "7"}
    processor = tiny_processor("qwen2_5_vl")
    turned = [([Image.open(path)], sample)]
    upright = [([Image.new("RGB", (40, 90))], sample)]
    for stage in (0, 1):
        assert torch.equal(
            _collate(processor, turned, stage=stage)["image_grid_thw"],
            _collate(processor, upright, stage=stage)["image_grid_thw"],
        )


def test_as_many_places_as_images():
    sample = {"id": "5", "question": "q", "answer": "7"}
    samples = [(_rows()[2], sample)]
    with pytest.raises(UserError, match="sample 5.* 3 places.* 2 images"):
        _collate(tiny_processor("llava"), samples, stage=1, prompt="[IMAGE]" * 3 + "[ANSWER]")
