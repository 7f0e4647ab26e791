"""Marked words of an answer, and the tokens they become, on tricky texts."""

import pytest
from PIL import Image

from dataset import contrastive, sft
from prompt_fn import auto, chat, fill
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.template import MarkedWords
from stageline.errors import DataError, UserError
from tests.helpers.collating import collate_options
from tests.helpers.tiny_models import tiny_processor, tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

TOKENIZERS = {
    "byte level": tiny_tokenizer,
    "whole words": lambda: tiny_tokenizer(["say left leftover up"] * 9),
    "metaspace": lambda **options: tiny_metaspace_tokenizer(
        ["the left side, upper left front right 3 o'clock thirteen 123456789 ' - ! ? . , LNCO"],
        **options,
    ),
}


def found(words, text):
    return [text[start:end] for start, end in MarkedWords(words).spans(text)]


@pytest.mark.parametrize(
    ("words", "text", "wanted"),
    [
        ("directions", "copyright, leftover, bright, upset, northern, aleft, left_1", []),
        ("directions", "the upper left corner", ["upper left"]),
        ("directions", "upper-left, front-left, left-hand", ["upper-left", "front-left", "left"]),
        ("directions", "upper, left", ["upper", "left"]),
        ("directions", "north-east northeast south", ["north-east", "northeast", "south"]),
        ("directions", "up\n left", ["up", "left"]),
        ("clock", "at 3 o'clock", ["3 o'clock"]),
        ("clock", "at 13 o'clock, 0 o'clock, 12:3 o'clock, 1.5 o'clock, 3rd o'clock", []),
        ("clock", "12 o'clock; 1 o'clock; 07 o'clock", ["12 o'clock", "1 o'clock", "07 o'clock"]),
        ("clock", "three o\u2019clock, Twelve O'Clock, 3 oclock", [
            "three o\u2019clock", "Twelve O'Clock", "3 oclock"]),
        (["\u5de6"], "\u5728\u5de6\u8fb9\uff0c\u5de6", ["\u5de6", "\u5de6"]),
        (["\u5de6", "\u5de6\u4e0a"], "\u5de6\u4e0a\u5de6", ["\u5de6\u4e0a", "\u5de6"]),
        (["left", "left of"], "left of it, left off", ["left of", "left"]),
        (["a.b"], "axb a.b", ["a.b"]),
        (["gauche", "\u00e0 droite"], "GAUCHE, \u00c0 droite, \u00e0 droite\u00e9", [
            "GAUCHE", "\u00c0 droite"]),
        (["clock", "cup"], "cup at 3 o'clock", ["cup", "3 o'clock"]),
        ("none", "left at 3 o'clock", []),
    ],
)  # fmt: skip
def test_whole_words_the_longest_first(words, text, wanted):
    assert found(words, text) == wanted


@pytest.mark.parametrize("word", ["", "--"])
def test_a_word_without_a_letter_is_refused(word):
    with pytest.raises(UserError, match="marked has the word"):
        MarkedWords(["left", word])


def test_all_twelve_positions_in_words_and_digits():
    words = "one two three four five six seven eight nine ten eleven twelve".split()
    for number, word in enumerate(words, start=1):
        for name in (str(number), word):
            assert found("clock", f"at {name} o'clock.") == [f"{name} o'clock"]


def test_only_what_is_learnt_is_marked_and_text_stays():
    pieces = (
        Piece("left? upper "),
        Piece("left ri", is_user=True, is_target=True),
        Piece("ght", is_user=True, is_target=True),
        Piece("right", is_user=True),
        Piece("", is_user=True, is_target=True),
    )
    rendered = Rendered(pieces)
    marked = MarkedWords("directions").mark(rendered)
    assert marked.text == rendered.text
    assert [piece.text for piece in marked if piece.is_marked] == ["left", "ri", "ght"]
    assert [p.text for p in marked if p.is_target and not p.is_marked] == [" ", ""]
    assert MarkedWords("none").mark(rendered) is rendered


def collate(samples, *, part=contrastive, tokenizer="byte level", **options):
    samples = [(None, sample) for sample in samples]
    return part(samples, **collate_options(TOKENIZERS[tokenizer](), **options))


def group(*answers, name="g", question="Is it left or right?"):
    roles = ["anchor", "positive", *["negative"] * (len(answers) - 2)]
    return [
        {"id": f"{name}-{i}", "question": question, "answer": answer, "contrast_group": name,
         "role": role}
        for i, (answer, role) in enumerate(zip(answers, roles, strict=True))
    ]  # fmt: skip


G, H = group("a", "b", "c", name="g"), group("d", "e", "f", name="h")


def marked_text(batch, tokenizer):
    """Return the text of the marked tokens of each row, and that of its labels."""
    return [
        tokenizer.decode(labels[marks]).strip()
        for labels, marks in zip(batch["labels"], batch["loss_marks"], strict=True)
    ]


@pytest.mark.parametrize("prompt_fn", [fill, chat])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_tokens_are_marked_where_they_cover_a_word_of_the_answer(tokenizer, prompt_fn):
    answers = ("the left side", "upper left", "leftover copyright", "at 3 o'clock", "13 o'clock")
    batch = collate(
        group(*answers),
        tokenizer=tokenizer,
        prompt_fn=prompt_fn,
        prompt="[QUESTION] left right [ANSWER]",
        marked=["directions", "clock"],
    )
    assert marked_text(batch, TOKENIZERS[tokenizer]()) == [
        "left", "upper left", "", "3 o'clock", ""
    ]  # fmt: skip
    assert (batch["labels"][batch["loss_marks"]] != -100).all()
    assert batch["loss_marks"].shape == batch["labels"].shape
    assert batch["loss_groups"].tolist() == [0] * 5


def test_a_token_that_is_more_than_the_word_is_marked():
    """The space before a word is in its token, and another word's token may hold it as a part."""
    tokenizer = TOKENIZERS["whole words"]()
    batch = collate(group("say left leftover", "up", "up"), tokenizer="whole words")
    marked = batch["labels"][0][batch["loss_marks"][0]].tolist()
    assert tokenizer.convert_ids_to_tokens(marked) == ["\u0120left"]


def test_every_byte_of_a_chinese_word_is_marked():
    batch = collate(group("\u5728\u5de6\u8fb9", "\u5de6", "\u53f3"), marked=["\u5de6"])
    assert batch["loss_marks"].sum(dim=1).tolist() == [3, 3, 0]
    assert marked_text(batch, TOKENIZERS["byte level"]()) == ["\u5de6", "\u5de6", ""]


def test_it_is_sft_otherwise():
    samples = group("left", "left!", "right?? right") + group("a", "b", "c", name="h")
    ours = collate(samples, pad_to_multiple_of=8)
    theirs = collate(samples, part=sft, pad_to_multiple_of=8)
    for name, value in theirs.items():
        assert (ours[name] == value).all(), name
    assert set(ours) - set(theirs) == {"loss_marks", "loss_groups"}
    assert ours["loss_groups"].tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:sample g-1")
def test_cut_and_dropped_samples_keep_their_marks_in_place():
    samples = group("left", "upper left", "right")
    samples[1]["question"] = "where " * 40
    for overlong, wanted in (("cut_prompt", "upper left"), ("drop", "")):
        batch = collate(samples, max_token_num=60, overlong=overlong)
        texts = marked_text(batch, TOKENIZERS["byte level"]())
        assert texts == ["left", wanted, "right"]


@pytest.mark.parametrize(
    ("samples", "wanted"),
    [
        (G[1:], "g-1: group not whole.*in the place of the anchor \\(sample 1\\) of a new group"),
        (G + H[:2], "h-1: group not whole.*1 more behind it"),
        ([G[0], G[1], H[2]], "h-2: group not whole.*the negative \\(sample 3 of 3\\) of 'g'"),
        (G + [H[0], H[1], G[2]], "g-2: group not whole.*of 'h'"),
        ([{"id": "x", "question": "q", "answer": "a"}] * 3, "x: group not whole.*role None"),
    ],
)
def test_groups_that_are_not_whole(samples, wanted):
    with pytest.raises(DataError, match=wanted):
        collate(samples)


@pytest.mark.parametrize("family", ["internvl", "qwen2_5_vl"])
def test_marks_lie_behind_image_tokens(family):
    processor = tiny_processor(family)
    images = [Image.new("RGB", (32, 32))]
    samples = [(images, sample) for sample in group("the left one", "right", "leftover")]
    texts = {"prompt": "[IMAGE]\n[QUESTION]\n[ANSWER]", "image_token": auto}
    batch = contrastive(samples, **collate_options(processor, max_token_num=500, **texts))
    assert marked_text(batch, processor.tokenizer) == ["left", "right", ""]
    assert batch["pixel_values"].numel()
