"""The collate parts dpo and kto: pairs side by side, prompts alike, cut and dropped alike."""

import functools

import pytest
import torch
from PIL import Image

import dataset as parts
from prompt_fn import auto, chat, fill
from stageline.data.batches.batch import count_samples
from stageline.data.batches.preference import WithOthers
from stageline.data.batches.preflight import CheckedCollate, preflight
from stageline.data.batches.step_maker import StepMaker
from stageline.errors import DataError
from tests.helpers.collating import collate_options
from tests.helpers.tiny_models import tiny_processor, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
COMMON = collate_options(TOKENIZER, prompt="[QUESTION] [ANSWER]", prompt_fn=chat)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def say(role, content):
    return {"role": role, "content": content}


def pair(index=0, chosen="yes", rejected="no no no"):
    history = [say("user", f"{index}?"), say("assistant", "hm"), say("user", "which number " * 3)]
    chosen, rejected = ([say("assistant", text)] for text in (chosen, rejected))
    return {"id": str(index), "messages": history, "chosen": chosen, "rejected": rejected}


def answer(index=0, text="yes", *, label=True):
    history = [say("user", f"{index}?"), say("assistant", "hm"), say("user", "which?")]
    return {"id": str(index), "messages": [*history, say("assistant", text)], "label": label}


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def learnt(batch, row):
    labels = batch["labels"][row]
    return labels[labels != -100].tolist()


def prompt_of(batch, row):
    return batch["input_ids"][row][: int((batch["labels"][row] != -100).nonzero()[0])].tolist()


def test_pairs_lie_side_by_side_and_only_their_answers_are_learnt():
    batch = parts.dpo([(None, pair(3)), (None, pair(4, "7", "it is"))], **COMMON)
    texts = ("yes", "no no no", "7", "it is")
    assert [learnt(batch, row) for row in range(4)] == [[*ids_of(text), END] for text in texts]
    assert prompt_of(batch, 0) == prompt_of(batch, 1) != prompt_of(batch, 2)
    assert prompt_of(batch, 2) == prompt_of(batch, 3)
    assert batch["loss_pairs"].tolist() == [0, 0, 1, 1]
    assert batch["loss_is_chosen"].tolist() == [True, False] * 2
    assert count_samples(batch) == 2 and "loss_reference" not in batch
    length = parts.dpo.encode(None, pair(3), **COMMON).length
    assert length == int(batch["attention_mask"][:2].sum(1).max())


@pytest.mark.parametrize("prompt_fn", [fill, chat])
def test_question_rows_take_plain_answers(prompt_fn):
    row = {"question": "what?", "chosen": "yes", "rejected": [say("assistant", "no")]}
    batch = parts.dpo([(None, row)], **COMMON | {"prompt_fn": prompt_fn})
    texts = [TOKENIZER.decode(learnt(batch, row)) for row in range(2)]
    assert [text.strip().removesuffix("</s>").removesuffix("<|im_end|>") for text in texts] == [
        "yes",
        "no",
    ]


def test_both_rows_lose_the_same_of_their_prompt():
    surplus = 3
    whole = parts.dpo([(None, pair())], **COMMON)
    limit = int(whole["attention_mask"].sum(1).max()) - surplus
    options = COMMON | {"max_token_num": limit, "overlong": "cut_prompt"}
    cut = parts.dpo([(None, pair())], **options)
    assert [learnt(cut, row) for row in range(2)] == [learnt(whole, row) for row in range(2)]
    assert prompt_of(cut, 0) == prompt_of(cut, 1)
    assert len(prompt_of(cut, 0)) == len(prompt_of(whole, 0)) - surplus
    dropped = parts.dpo(
        [(None, pair()), (None, pair(1, "1", "2"))], **options | {"overlong": "drop"}
    )
    assert (dropped["labels"][:2] == -100).all() and learnt(dropped, 2) and learnt(dropped, 3)
    assert count_samples(dropped) == 1
    with pytest.raises(DataError, match=f"do not fit --max-token-num {limit}"):
        parts.dpo([(None, pair())], **COMMON | {"max_token_num": limit})


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"chosen": None}, "'chosen' is missing"),
        ({"rejected": [say("user", "no")]}, "'rejected' is"),
        ({"rejected": []}, "'rejected' is"),
    ],
)
def test_a_pair_that_is_none_is_named(change, wanted):
    with pytest.raises(DataError, match=wanted) as caught:
        parts.dpo([(None, pair(5) | change)], **COMMON)
    assert "sample 5" in str(caught.value)


def test_rows_may_bring_the_reference():
    rows = [(None, pair(i) | {"ref_chosen_logps": -i, "ref_rejected_logps": -9}) for i in (1, 2)]
    assert parts.dpo(rows, **COMMON)["loss_reference"].tolist() == [-1, -9, -2, -9]


def test_images_are_in_both_rows():
    processor = tiny_processor("qwen2_vl")
    images = [Image.new("RGB", (32, 32), (200, 30, 30))]
    row = {"question": "what?", "chosen": "yes", "rejected": "no"}
    options = COMMON | {"processor": processor, "prompt": "[IMAGE]\n[QUESTION]\n[ANSWER]"}
    options |= {"prompt_fn": fill, "image_token": auto, "max_token_num": 500}
    batch = parts.dpo([(images, row)], **options)
    first, second = batch["pixel_values"].chunk(2)
    assert torch.equal(first, second) and len(batch["image_grid_thw"]) == 2
    sample = {"question": "what?", "answer": "yes", "label": True}
    borrowed = (None, {"question": "and?", "answer": "no", "label": False})
    batch = parts.kto([(images, sample | {"other_row": borrowed})], **options)
    assert len(batch["image_grid_thw"]) == 1 and "loss_kl_pixel_values" not in batch
    assert (batch["loss_kl_mm_token_type_ids"] > 0).sum() == (batch["mm_token_type_ids"] > 0).sum()


class Rows(list):
    def __getitem__(self, row):
        return None, super().__getitem__(row)


def test_mixed_rows_have_the_prompt_and_the_answer_of_the_row_before():
    rows = Rows([answer(0), answer(1, "no it is not", label=False), answer(2, "7")])
    dataset = WithOthers(rows)
    batch = parts.kto([dataset[row] for row in range(3)], **COMMON)
    assert batch["loss_is_wanted"].tolist() == [True, False, True]
    texts = ("yes", "no it is not", "7")
    assert [learnt(batch, row) for row in range(3)] == [[*ids_of(text), END] for text in texts]
    mixed = {n.removeprefix("loss_kl_"): v for n, v in batch.items() if "_kl_" in n}
    for row in range(3):
        assert learnt(mixed, row) == [*ids_of(texts[row - 1]), END]
        assert prompt_of(mixed, row) == prompt_of(batch, row)
    limit = int(batch["attention_mask"].sum(1).max())
    short = parts.kto([dataset[2]], **COMMON | {"max_token_num": limit - 4})
    assert short["loss_kl_input_ids"].shape[1] == limit - 4  # cut at its end
    with pytest.raises(DataError, match="has 1 row"):
        WithOthers(Rows([answer()]))


def test_what_is_no_label_is_named():
    with pytest.raises(DataError, match=r"sample 2: 'label' is 'yes'"):
        parts.kto([(None, answer(2) | {"label": "yes"})], **COMMON)


def test_the_loader_knows_rows_of_samples():
    """Rows that fill an evaluation up lose the labels of both rows; numbers are the samples'."""
    rows = Rows([pair(index) for index in range(3)])

    def collate(samples):
        return parts.dpo(samples, **COMMON)

    maker = StepMaker(rows, collate=collate, micro_batch_size=2, is_sorted=False)
    first, last = maker.make(0, [[0, 1, 2, None]])
    assert first["loss_rows"].tolist() == [0, 0, 1, 1]
    assert last["loss_rows"].tolist() == [2, 2, -1, -1]
    assert (last["labels"][2:] == -100).all() and learnt(last, 1)

    def spoilt(samples):
        batch = collate(samples)
        batch["input_ids"][3, 0] = len(TOKENIZER) + 5
        return batch

    with pytest.raises(DataError, match="sample 1: the token id at place 0"):
        CheckedCollate(spoilt, len(TOKENIZER))([rows[0], rows[1]])


def test_the_look_before_a_run_sees_both_answers():
    names = ("prompt", "prompt_fn", "image_token", "processor")
    texts = {name: COMMON[name] for name in names}
    rows = Rows([pair(0), pair(1, rejected="no " * 50)])

    def encode(max_token_num):
        return functools.partial(parts.dpo.encode, **COMMON | {"max_token_num": max_token_num})

    report = preflight(rows, **texts, max_token_num=400, encode=encode(400))
    batch = parts.dpo([rows[0], rows[1]], **COMMON | {"max_token_num": 400})
    assert report.longest == int(batch["attention_mask"].sum(1).max())
    assert report.num_targets == int((batch["labels"] != -100).sum())
    assert report.num_tokens == int(batch["attention_mask"].sum())
    # a mean over pairs exceeded "at most"
    mean = batch["attention_mask"].sum(1).double().mean().item()
    assert f"{mean:.0f} tokens on average, {report.longest} at most" in str(report)
    with pytest.raises(DataError, match="sample 1"):
        preflight(rows, **texts, max_token_num=80, encode=encode(80))
