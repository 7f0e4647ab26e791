"""Tokens of a conversation that are trained on: masks, weights, generation marks; and the cost."""

import functools

import pytest
from PIL import Image

from prompt_fn import auto, chat
from stageline.data.batches.batch import encode_sample, render_sample
from stageline.data.rows.conversations import WEIGHTS
from stageline.data.text import chat as rendering
from stageline.data.text.chat_template import ChatTemplate
from stageline.data.text.encode import encode_rendered
from stageline.errors import DataError, UserError
from tests.helpers.chat_templates import MARKED, format_tokenizer
from tests.helpers.tiny_models import tiny_processor, tiny_tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which?"},
    {"role": "assistant", "content": "Seven"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]
ROW = {"messages": TURNS}


@pytest.fixture(scope="module")
def tokenizer():
    return format_tokenizer("chatml")


def learnt(rendered):
    return "".join(piece.text for piece in rendered if piece.is_target)


def test_history_may_be_masked(tokenizer):
    assert learnt(chat(ROW, "", processor=tokenizer)) == "Seven<|im_end|>Yes<|im_end|>"
    assert learnt(chat(ROW, "", processor=tokenizer, mask_history=True)) == "Yes<|im_end|>"
    # mask_history keeps the last turn that is trained on, which is not the last turn here
    turns = [*TURNS[:-1], {**TURNS[-1], "weight": 0}]
    rendered = chat({"messages": turns}, "", processor=tokenizer, mask_history=True)
    assert learnt(rendered) == "Seven<|im_end|>"
    turns = [{**turn, "weight": None} for turn in TURNS]  # Arrow fills missing columns with None
    assert chat({"messages": turns}, "", processor=tokenizer) == chat(ROW, "", processor=tokenizer)


def test_the_prompt_may_be_learnt(tokenizer):
    rendered = chat(ROW, "", processor=tokenizer, train_on_prompt=True)
    assert learnt(rendered) == rendered.text == tokenizer.apply_chat_template(TURNS, tokenize=False)
    rendered = chat(ROW, "", processor=tokenizer, train_on_prompt=True, mask_system=True)
    assert learnt(rendered) == rendered.text[rendered.text.index("Which?") :]


@pytest.mark.parametrize("name", ["llama2", "qwen"])
def test_an_answer_is_found_in_other_formats(name):
    rendered = chat(ROW, "", processor=format_tokenizer(name), mask_history=True)
    last = {"llama2": " Yes </s>", "qwen": "<think>\n\n</think>\n\nYes<|im_end|>"}[name]
    assert learnt(rendered) == last


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask_history": True, "train_on_prompt": True}, "excludes --prompt-fn.train_on_prompt"),
        ({"mask_system": True}, "requires --prompt-fn.train_on_prompt"),
    ],
)
def test_masks_that_contradict(tokenizer, options, words):
    with pytest.raises(UserError, match=words):
        chat(ROW, "", processor=tokenizer, **options)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_images_are_never_learnt(family):
    processor = tiny_processor(family)
    images = [Image.new("RGB", (16, 16))]
    turns = [TURNS[1], {**TURNS[2], "content": [{"type": "image"}, {"type": "text", "text": "7"}]}]
    prompt_fn = functools.partial(chat, train_on_prompt=True)
    rendered = render_sample(images, {"messages": turns}, prompt="", prompt_fn=prompt_fn,
                             image_token=auto, processor=processor)  # fmt: skip
    assert rendered.num_images == 1
    assert all(piece.is_target != piece.is_image for piece in rendered)
    encoded = encode_sample(rendered, images, processor=processor, name="row")
    place = encoded.input_ids.index(processor.image_token_id)
    assert not encoded.is_target[place] and encoded.is_target[-1]


def test_an_end_is_added_after_all_text_too():
    template = "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }} {% endfor %}"
    tokenizer = tiny_tokenizer(chat_template=template)
    rendered = chat(ROW, "", processor=tokenizer, train_on_prompt=True)
    assert learnt(rendered) == rendered.text
    assert rendered.text.endswith("USER: Sure? ASSISTANT: Yes</s>")


# -- templates with {% generation %} ---------------------------------------------------------


@pytest.mark.parametrize("with_newline", [False, True])
def test_marks_of_a_template_decide(with_newline):
    template = MARKED
    if with_newline:
        template = MARKED.replace("<|im_end|>{% endgen", "<|im_end|>{{ ' ' }}{% endgen")
    tokenizer = tiny_tokenizer(chat_template=template)
    encoded = encode_rendered(chat(ROW, "", processor=tokenizer), tokenizer)
    official = tokenizer.apply_chat_template(
        TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.input_ids == official["input_ids"]
    assert encoded.is_target == [bool(flag) for flag in official["assistant_masks"]]
    assert any(encoded.is_target)
    rendered = chat(ROW, "", processor=tokenizer, mask_history=True)
    assert learnt(rendered) == "Yes<|im_end|>" + " " * with_newline


def test_marks_without_the_end_are_told():
    template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    tokenizer = tiny_tokenizer(chat_template=template)
    with pytest.warns(UserWarning, match="does not learn to stop"):
        rendered = chat(ROW, "", processor=tokenizer)
    assert learnt(rendered) == "SevenYes"


def test_marks_that_leave_out_an_answer():
    template = MARKED.replace("m.role == 'assistant' %}", "m.content == 'never' %}")
    with pytest.raises(UserError, match="marks leave out answer 2"):
        chat(ROW, "", processor=tiny_tokenizer(chat_template=template))


# -- what it costs -----------------------------------------------------------------------------


def test_a_structure_is_found_out_once():
    tokenizer = format_tokenizer("qwen")
    counts = []
    for question in ("Which?", "And this?", "这是什么?"):
        before = ChatTemplate.of(tokenizer).num_renders
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": question}]
        rendered = chat({"messages": turns}, "", processor=tokenizer)
        assert learnt(rendered) == f"<think>\n\n</think>\n\n{question}<|im_end|>"
        counts.append(ChatTemplate.of(tokenizer).num_renders - before)
    assert counts == [3, 1, 1]


def test_what_was_found_out_is_given_up_when_the_template_writes_something_else():
    tokenizer = format_tokenizer("chatml")
    chat(ROW, "", processor=tokenizer)
    template = ChatTemplate.of(tokenizer)
    (key,) = template.layouts
    kept = template.layouts[key]
    segments = (kept.segments[0].__class__("Yesterday"), *kept.segments)
    template.layouts[key] = kept.__class__(segments)
    assert learnt(chat(ROW, "", processor=tokenizer)) == "Seven<|im_end|>Yes<|im_end|>"


def test_few_structures_are_kept(monkeypatch):
    monkeypatch.setattr(rendering, "_MOST_LAYOUTS", 2)
    tokenizer = format_tokenizer("chatml")
    for count in (1, 2, 3):
        turns = [TURNS[1], TURNS[2]] * count
        chat({"messages": turns}, "", processor=tokenizer)
    assert len(ChatTemplate.of(tokenizer).layouts) <= 2


def test_texts_decide_where_a_template_looks_at_them():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}"
        "{% else %}nothing{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tiny_tokenizer(chat_template=template)
    for question in ("Which?", "", " ", "Which?"):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "7"}]
        rendered = chat({"messages": turns}, "", processor=tokenizer)
        assert f"user\n{question or 'nothing'}<|im_end|>" in rendered.text
        assert learnt(rendered) == "7<|im_end|>"


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_mask_may_stand_in_messages_or_in_a_list(tokenizer, name):
    first, last = {**TURNS[2], name: 0}, {**TURNS[4], name: True}
    rendered = chat({"messages": [*TURNS[:2], first, TURNS[3], last]}, "", processor=tokenizer)
    assert learnt(rendered) == "Yes<|im_end|>"
    assert chat({**ROW, name: [0, None, False, 0, 1]}, "", processor=tokenizer) == rendered


# -- rows that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [1]}, "`tools` is"),
        ({"tools": "none"}, "`tools` is 'none'"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "user has tool_ca"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "the tool call"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "reasoning"),
        ({"tools": r'[{"name": "\ud800"}]'}, "`tools` is"),  # JSON in a text of JSON
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 7}]}, "tool_call_id 7"),
        ({"messages": [{**TURNS[2], "mask": 0}]}, "the mask 0.*a weight or loss_mask"),
        ({"mask": "User"}, "the row has the mask 'User'"),
        ({"loss_mask": [1]}, "'loss_mask' has 1 values for 5 messages"),
        (
            {"messages": [{**TURNS[1], "training": True}, TURNS[2]]},
            "training True and is no answer",
        ),
        ({"messages": [{**TURNS[2], "weight": 1, "train": 0}]}, "weight 1 and train 0"),
        # an unknown field is refused with any value
        *(
            ({"messages": [{**TURNS[2], "masked": value}]}, "the fields masked")
            for value in (0, [])
        ),
    ],
)
def test_rows_that_are_refused(tokenizer, fields, words):
    row = {"source": "rows.jsonl:3", **ROW, **fields}
    with pytest.raises(DataError, match=rf"rows.jsonl:3: .*{words}"):
        render_sample(None, row, prompt="", prompt_fn=chat, image_token=lambda r, i, processor: r,
                      processor=tokenizer)  # fmt: skip
