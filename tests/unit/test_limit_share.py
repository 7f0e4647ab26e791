"""A context shared between prompts and answers: the rule's goldens, and what is never cut."""

import functools
import random

import pytest

from dataset import sft
from prompt_fn import auto, chat, fill
from stageline.data.batches.collate import collate_sft
from stageline.data.batches.preflight import preflight
from stageline.data.text import limit
from stageline.data.text.encode import Encoded, encode_rendered
from stageline.data.text.limit import limit_length, share_budget, share_places
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError
from tests.helpers.tiny_models import tiny_tokenizer

# results of LLaMA-Factory's infer_seqlen, (prompt, answer, room) -> (prompt, answer)
GOLDENS = {
    (3000, 2000, 1000): (600, 400),
    (2000, 3000, 1000): (400, 600),
    (1000, 100, 1000): (900, 100),
    (100, 1000, 1000): (100, 900),
    (100, 500, 1000): (100, 500),
    (500, 100, 1000): (500, 100),
    (30, 26, 50): (27, 23),
    (30, 10, 20): (15, 5),  # twice the answer fills the limit: both are cut
    (10, 30, 20): (5, 15),
    (10, 10, 1000): (10, 10),
    (1000, 1, 1): (1, 0),
}


@pytest.mark.parametrize("lengths", GOLDENS)
def test_the_rule(lengths):
    assert share_budget(*lengths) == GOLDENS[lengths]


def _pairs(*lengths, learnt=None):
    """Pairs of prompt and answer, all of them text; ids count from 0."""
    is_target, is_answer = [], []
    for number, (source, target) in enumerate(lengths):
        is_learnt = learnt is None or number in learnt
        is_target += [False] * source + [is_learnt] * target
        is_answer += [False] * source + [True] * target
    size = len(is_target)
    cuttable = [not answer for answer in is_answer]
    return Encoded(
        list(range(size)), is_target, cuttable, is_text=[True] * size, is_answer=is_answer
    )


def _theirs(lengths, budget, *, backwards=False):
    """Places that LLaMA-Factory's loop over pairs keeps, written after its source."""
    starts = [sum(map(sum, lengths[:number])) for number in range(len(lengths))]
    order = list(zip(starts, lengths, strict=True))
    total, kept = 0, []
    for start, (source, target) in reversed(order) if backwards else order:
        if total >= budget:
            break
        num_source, num_target = share_budget(source, target, budget - total)
        kept += range(start, start + num_source)
        kept += range(start + source, start + source + num_target)
        total += num_source + num_target
    return sorted(kept)


@pytest.mark.parametrize("backwards", [False, True])
def test_several_turns_share_as_there(backwards):
    draw = random.Random(1)
    num_compared = 0
    for _ in range(300):
        lengths = [(draw.randint(1, 30), draw.randint(1, 30)) for _ in range(draw.randint(1, 4))]
        budget = draw.randint(2, sum(map(sum, lengths)))
        learnt = {len(lengths) - 1} if backwards else None
        kept = share_places(_pairs(*lengths, learnt=learnt), budget)
        theirs = _theirs(lengths, budget, backwards=backwards)
        ends = [sum(map(sum, lengths[: number + 1])) for number in range(len(lengths))]
        has_bare_prompt = any(
            not any(end - target <= place < end for place in theirs)
            and any(end - target - source <= place < end - target for place in theirs)
            for end, (source, target) in zip(ends, lengths, strict=True)
        )
        # LLaMA-Factory keeps a prompt whose answer got no tokens; Stageline does not
        if has_bare_prompt:
            continue
        assert kept == theirs, (lengths, budget)
        num_compared += 1
    assert num_compared > 200


def test_an_answer_of_which_the_first_token_is_left_has_nothing_to_learn():
    assert share_places(_pairs((0, 5)), 1) is None  # no token comes before it
    assert share_places(_pairs((0, 5)), 2) == [0, 1]


def test_the_last_turn_takes_first_where_it_alone_is_learnt():
    lengths = [(6, 6), (3, 3)]
    assert share_places(_pairs(*lengths), 10) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    kept = share_places(_pairs(*lengths, learnt={1}), 10)
    assert kept == [0, 1, 6, 7, *range(12, 18)]
    # the template's own first token stays when the first turn goes
    with_bos = _pairs((7, 6), (3, 3), learnt={1})
    with_bos.is_text[0] = False
    assert share_places(with_bos, 7) == [0, *range(13, 19)]


TOKENIZER = tiny_tokenizer()


def _chat(*texts, **masks):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return chat({"messages": messages}, "", processor=TOKENIZER, **masks)


def _limited(rendered, length, **options):
    encoded = encode_rendered(rendered, TOKENIZER)
    assert len(encoded) > length
    limited = limit_length(
        encoded, max_token_num=length, overlong="share", name="row", warn=False, **options
    )
    assert len(limited) <= length
    learnt = [i for i, t in zip(limited.input_ids, limited.is_target, strict=True) if t]
    return TOKENIZER.decode(limited.input_ids), TOKENIZER.decode(learnt)


def test_only_text_of_the_data_is_cut_and_a_cut_answer_loses_its_end():
    text, learnt = _limited(_chat("q" * 40, "a" * 4), 40)
    assert text.startswith("<|im_start|>user\nqqq") and learnt == "aaaa<|im_end|>"
    assert "q<|im_end|>\n<|im_start|>assistant\naaaa<|im_end|>" in text
    text, learnt = _limited(_chat("q" * 4, "a" * 60), 40)
    assert "qqqq<|im_end|>\n<|im_start|>assistant\naaa" in text
    assert set(learnt) == {"a"} and len(learnt) < 60, "no end after a cut answer"
    text, learnt = _limited(_chat("q" * 60, "a" * 60), 60)
    assert "q<|im_end|>\n<|im_start|>assistant\na" in text and set(learnt) == {"a"}


def test_answers_of_masked_turns_are_answers_still():
    pieces = list(_chat("one", "two", "three", "four", mask_history=True))
    assert [piece.text for piece in pieces if piece.is_target] == ["four", "<|im_end|>"]
    assert [piece.text for piece in pieces if piece.is_answer] == ["two"]


def _with_image(question, answer):
    image = Piece("<image>" * 10, is_image=True)
    return Rendered(
        (
            Piece("Look: "),
            image,
            Piece(question, is_user=True),
            Piece("\nSay: "),
            Piece(answer, is_user=True, is_target=True),
        ),
        is_chat=True,
    )


def test_images_stay_whole_or_the_sample_goes():
    encoded = encode_rendered(_with_image("q" * 50, "a" * 20), TOKENIZER)
    num_image = sum(encoded.is_image)
    assert num_image >= 30
    kept = share_places(encoded, num_image + 30)
    assert sum(encoded.is_image[place] for place in kept) == num_image
    assert share_places(encoded, num_image) is None
    later = Rendered((*_with_image("q", "a" * 9).pieces, *_with_image("q", "b").pieces), True)
    encoded = encode_rendered(later, TOKENIZER)
    assert share_places(encoded, len(encoded) - num_image) is None, "the second image has no room"


@pytest.mark.filterwarnings("error")
def test_a_sample_with_nothing_to_learn_is_dropped_and_told(monkeypatch):
    monkeypatch.setattr(limit, "_has_warned", set())
    encoded = encode_rendered(_chat("q" * 90, "a"), TOKENIZER)
    with pytest.warns(UserWarning, match="row is dropped: .* nothing to learn would be left"):
        dropped = limit_length(encoded, max_token_num=8, overlong="share", name="row")
    assert dropped.is_target == [False]
    with pytest.warns(UserWarning, match="row is cut to 60 tokens, .* it has lost its end"):
        cut = limit_length(
            encode_rendered(_chat("q", "a" * 90), TOKENIZER),
            max_token_num=60,
            overlong="share",
            name="row",
        )
    assert len(cut) == 60
    limit_length(encoded, max_token_num=8, overlong="share", name="row")  # told once


def test_encodings_made_elsewhere_lose_text_of_the_prompt_alone():
    encoded = Encoded([5] * 10, [False] * 6 + [True] * 4, [False] + [True] * 5 + [False] * 4)
    assert share_places(encoded, 7) == [0, 1, 2, 6, 7, 8, 9]


COMMON = {
    "prompt": "[QUESTION]\n[ANSWER]",
    "prompt_fn": fill,
    "image_token": auto,
    "processor": TOKENIZER,
    "max_token_num": 24,
}
ROWS = [
    (None, {"question": "q" * 50, "answer": "yes", "id": "a"}),
    (None, {"question": "q", "answer": "a" * 50, "id": "b"}),
    (None, {"question": "q", "answer": "yes", "id": "c"}),
]


def test_collate_parts_and_the_look_before_share():
    batch = collate_sft(ROWS, **COMMON, pad_token_id=0, stage=1, overlong="share")
    assert batch["input_ids"].shape == (3, 24)
    assert (batch["labels"][0] == TOKENIZER.eos_token_id).sum() == 1, "the short answer is whole"
    assert (batch["labels"][1] == TOKENIZER.eos_token_id).sum() == 0
    encode = functools.partial(
        sft.encode, **COMMON, pad_token_id=0, stage=1, num_stages=2, overlong="share"
    )
    assert [encode(*row).length for row in ROWS] == batch["attention_mask"].sum(dim=1).tolist()
    report = preflight(ROWS, **COMMON, overlong="share")
    assert report.num_overlong == 2 and report.dropped == []
    assert "2 too long (prompts and answers are cut; 0 dropped" in str(report)


def test_rows_that_would_all_be_dropped_end_the_run():
    options = {**COMMON, "max_token_num": 3, "prompt": "A long template: [QUESTION]\n[ANSWER]"}
    with pytest.raises(DataError, match="all 3 rows that were looked at are too long"):
        preflight(ROWS, **options, overlong="share")
