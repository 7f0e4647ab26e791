"""Plain text for pre-training: every token is trained on, EOS ends a text, rows are full."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from loss_fn import sft
from parse_args import parse_train_args
from prompt_fn import chat, fill, none
from register import engine_register, import_shelf
from stageline.data.batches.batch import pack_rows
from stageline.data.batches.collate_part import CollatePart
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.batches.plain_text import collate_packed_text, collate_text, encode_text
from stageline.data.batches.preflight import preflight
from stageline.data.text import limit
from stageline.errors import DataError, UserError
from tests.helpers.registers import restored_registers
from tests.helpers.tiny_batches import count_targets
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

import_shelf()

TEXTS = ("The cat is left of the dog.", "yes", "Which number is written here? 7")


def samples(texts=TEXTS):
    return [
        (None, {"id": str(i), "source": f"t.jsonl:{i}", "text": t}) for i, t in enumerate(texts)
    ]


def common(tokenizer, **changes):
    return {
        "prompt": "[TEXT]",
        "prompt_fn": fill,
        "image_token": none,
        "processor": tokenizer,
        "pad_token_id": tokenizer.pad_token_id,
        "max_token_num": 48,
        "stage": 0,
        **changes,
    }


@pytest.mark.parametrize(
    "make",
    [tiny_tokenizer, tiny_metaspace_tokenizer],
    ids=["without bos", "metaspace with bos"],
)
def test_a_row_is_the_tokenizers_own_and_eos_and_all_of_it_is_learnt(make):
    tokenizer = make()
    batch = collate_text(samples(), **common(tokenizer))
    for row, text in enumerate(TEXTS):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert batch["input_ids"][row, : len(ids)].tolist() == ids
        assert batch["labels"][row, : len(ids)].tolist() == ids
        assert (batch["labels"][row, len(ids) :] == -100).all()
        assert batch["attention_mask"][row].sum() == len(ids)


def test_eos_is_learnt_where_it_is_the_padding_token_too():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    batch = collate_text(samples(), **common(tokenizer))
    is_eos = batch["labels"] == tokenizer.eos_token_id
    assert is_eos.sum(dim=1).tolist() == [1, 1, 1]
    assert torch.equal(batch["labels"] != -100, batch["attention_mask"].bool())


def test_text_never_becomes_a_special_token():
    tokenizer = tiny_tokenizer()
    (row,) = collate_text(samples(["a </s> b <|im_end|> c"]), **common(tokenizer))["input_ids"]
    special = set(tokenizer.all_special_ids) | {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert special & set(row.tolist()) == {tokenizer.eos_token_id}
    assert row.tolist().count(tokenizer.eos_token_id) == 1 and row[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(row[:-1]) == "a </s> b <|im_end|> c"


def test_loss_is_that_of_the_library_on_each_text():
    tokenizer = tiny_tokenizer(adds_bos=True)
    torch.manual_seed(0)
    config = tiny_config("llama", vocab_size=len(tokenizer))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    batch = collate_text(samples(), **common(tokenizer))
    count = count_targets([batch])
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = sft(logits, batch, num_targets=torch.tensor(float(count)))
    total = number = 0
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        total += model(ids, labels=ids).loss * (ids.shape[1] - 1)
        number += ids.shape[1] - 1
    assert number == count
    # transformers converts logits to float32
    assert loss.item() == pytest.approx((total / number).item(), rel=1e-6)


def test_too_long_is_refused_cut_or_dropped(monkeypatch):
    monkeypatch.setattr(limit, "_has_warned", set())
    tokenizer = tiny_tokenizer(adds_bos=True)
    texts = samples(["yes", "no " * 30])
    short = functools.partial(common, tokenizer, max_token_num=8)
    with pytest.raises(DataError, match=r"t\.jsonl:1.*--collate-fn.overlong cut "):
        collate_text(texts, **short())
    with pytest.warns(UserWarning, match=r"t\.jsonl:1.*keeps its first 8 tokens"):
        batch = collate_text(texts, **short(overlong="cut"))
    ids = tokenizer("no " * 30)["input_ids"]
    assert batch["input_ids"][1].tolist() == batch["labels"][1].tolist() == ids[:8]
    report = preflight(
        texts,
        **{name: short()[name] for name in ("prompt", "prompt_fn", "image_token", "processor")},
        max_token_num=8,
        overlong="cut",
    )
    assert report.num_overlong == 1 and "their ends are cut" in str(report)
    with pytest.warns(UserWarning, match="is dropped"):
        (dropped,) = encode_text(*texts[1], **short(overlong="drop")).rows
    assert dropped.num_targets == 0 and len(dropped) == 1


def test_images_and_rows_without_text_are_refused():
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match="has 1 images"):
        collate_text([([object()], samples()[0][1])], **common(tokenizer))
    with pytest.raises(DataError, match="'text', which is missing"):
        collate_text([(None, {"id": "1", "answer": "7"})], **common(tokenizer))
    with pytest.raises(DataError, match="none of its 0 tokens"):
        collate_text(samples([""]), **common(tokenizer))


def test_packed_rows_are_filled_by_best_fit():
    tokenizer = tiny_tokenizer()
    texts = samples(["no" * count for count in (9, 6, 5, 3, 3, 2, 1, 1)])
    options = common(tokenizer, max_token_num=20)
    lengths = [encode_text(*text, **options).length for text in texts]
    part = CollatePart(collate_text, encode=encode_text, pack=collate_packed_text).bind(**options)
    loader = MicroBatchLoader(
        texts, collate=part, batch_size=8, micro_batch_size=1, packing=20, shuffle=False
    )
    step = next(iter(loader))
    fewest = -(-sum(lengths) // 20)
    assert len(step) == fewest
    assert sum(int((batch["sample_ids"] >= 0).sum()) for batch in step) == sum(lengths)
    # each text is trained on except for its first token
    assert count_targets(step) == sum(lengths) - len(lengths)
    wanted = pack_rows(
        [encode_text(*texts[0], **options).rows], pad_token_id=tokenizer.pad_token_id
    )
    packed = collate_packed_text([[texts[0]]], **options)
    assert all(torch.equal(packed[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("collate", "wanted"),
    [
        ("pt", ["text", "fill", "none", "sft"]),
        ("dpo", ["chat", "chat", "auto", "dpo"]),
    ],
)
def test_no_template_has_to_be_chosen(collate, wanted):
    words = ["--train-model", "causal_lm", "--dataset", "jsonl", "--collate-fn", collate]
    with restored_registers():
        engine_register.register("pipeline", len, replace=True)
        parts = parse_train_args(words).parts
        keys = {name: parts[name].key for name in ("prompt", "prompt_fn", "image_token", "loss_fn")}
        assert list(keys.values()) == wanted
        again = parse_train_args([*words, "--prompt", "vqa", "--prompt-fn", "fill"]).parts
        assert again["prompt"].key == "vqa" and again["prompt_fn"].key == "fill"


@pytest.mark.parametrize("prompt", ["[IMAGE][QUESTION][ANSWER]", "[IMAGE]\n[CAPTION]"])
def test_text_under_the_template_of_other_rows_is_text(prompt):
    tokenizer = tiny_tokenizer()
    wanted = collate_text(samples(), **common(tokenizer))
    made = collate_text(samples(), **common(tokenizer, prompt=prompt))
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    # a row that has the template's fields is written by it, and one without text refused
    full = [(None, {"id": "0", "question": "A? ", "answer": "b", "text": "other"})]
    if "QUESTION" in prompt:
        batch = collate_text(full, **common(tokenizer, prompt=prompt))
        shown = tokenizer.decode(batch["input_ids"][0])
        assert shown.startswith("A? b") and "other" not in shown
    with pytest.raises(DataError, match="QUESTION|CAPTION"):
        collate_text([(None, {"id": "0"})], **common(tokenizer, prompt=prompt))


def test_text_has_no_turns():
    with pytest.raises(UserError, match="nothing before the answer.*fill"):
        collate_text(samples(), **common(tiny_tokenizer(), prompt_fn=chat, prompt="[TEXT]"))
    rows = [(None, {"id": "0", "messages": [{"role": "user", "content": "A?"},
                                            {"role": "assistant", "content": "b"}]})]  # fmt: skip
    tokenizer = tiny_tokenizer()
    batch = collate_text(rows, **common(tokenizer, prompt_fn=chat, prompt="[TEXT]"))
    assert "A?" in tokenizer.decode(batch["input_ids"][0]) and (batch["labels"][0] != -100).all()
