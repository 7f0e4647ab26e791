"""Templates become pieces: text of the template, text of the data, text that is trained on."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from prompt_fn import auto, fill, image
from stageline.data.text.processor import num_token_ids
from stageline.data.text.template import parse_template
from stageline.errors import DataError, UserError

SAMPLE = {"id": "s1", "question": "Which [ANSWER]?", "answer": "7 [QUESTION]", "num_images": 1}


def test_placeholders_in_the_data_stay_text():
    rendered = fill(SAMPLE, "[IMAGE]\n[QUESTION]\n[ANSWER]")
    assert rendered.text == "\nWhich [ANSWER]?\n7 [QUESTION]"
    targets = [rendered.text[start:end] for start, end in rendered.target_spans()]
    assert targets == ["7 [QUESTION]"]
    assert [piece.text for piece in rendered if piece.is_user] == [
        "Which [ANSWER]?",
        "7 [QUESTION]",
    ]


def test_for_generation_ends_before_the_answer_and_its_space():
    prompt = "[QUESTION]\nAnswer: [ANSWER]."
    assert fill(SAMPLE, prompt, for_generation=True).text == "Which [ANSWER]?\nAnswer:"
    trained = fill(SAMPLE, prompt)
    # the space joins the answer, as in the tokens; the full stop before EOS is trained on, too
    targets = [trained.text[start:end] for start, end in trained.target_spans()]
    assert "".join(targets) == " 7 [QUESTION]."


@pytest.mark.parametrize(
    ("prompt", "num_images", "expected"),
    [
        ("[IMAGE]\n[QUESTION] [ANSWER]", 3, "<image><image><image>\nq a"),
        ("[IMAGE]\n[QUESTION] [ANSWER]", 0, "q a"),
        ("[IMAGE] and [IMAGE]\n[QUESTION] [ANSWER]", 2, "<image> and <image>\nq a"),
        ("[QUESTION] [ANSWER]", 0, "q a"),
        ("[[IMAGE]] [[INST]] [QUESTION] [ANSWER]", 0, "[IMAGE] [INST] q a"),
    ],
)
def test_image_places(prompt, num_images, expected):
    sample = {"question": "q", "answer": "a", "num_images": num_images}
    rendered = image(fill(sample, prompt), [object()] * num_images, processor=None)
    assert rendered.text == expected
    assert rendered.num_images == num_images


def test_what_is_learnt_without_an_answer():
    parts = parse_template("[IMAGE]\n[CAPTION]")
    assert [part.slot for part in parts if part.is_target] == ["CAPTION"]
    with_both = parse_template("[CAPTION] true? [ANSWER]")
    assert [part.slot for part in with_both if part.is_target] == ["ANSWER"]
    for prompt in ("[QUESTION]", "nothing", "[CAPTION] [QUESTION]", "[ANSWER] [ANSWER]"):
        with pytest.raises(UserError, match="ANSWER"):
            parse_template(prompt)


def test_a_field_that_is_missing_is_named():
    with pytest.raises(DataError, match=r"file.jsonl:3.*\[COLOUR\].*'colour'.*is missing"):
        fill({"source": "file.jsonl:3", "answer": "a"}, "[COLOUR] [ANSWER]")


def test_images_without_an_image_token_are_refused():
    from tests.helpers.tiny_models import tiny_tokenizer

    rendered = fill({"question": "q", "answer": "a", "num_images": 1}, "[IMAGE][QUESTION][ANSWER]")
    with pytest.raises(UserError, match="no image token"):
        auto(rendered, [object()], processor=tiny_tokenizer())


def test_ids_of_a_vocabulary_with_gaps_are_counted_to_the_last():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 5, "b": 9}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert len(tokenizer) == 3 and num_token_ids(tokenizer) == 10
