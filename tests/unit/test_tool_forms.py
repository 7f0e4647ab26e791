"""Rows with tools for templates that require ids, and for those without tools."""

import copy
import re
from pathlib import Path

import pytest

from prompt_fn import chat
from tests.helpers.chat_samples import WEATHER, answer_of, call, row, say
from tests.helpers.chat_templates import MISTRAL, format_tokenizer
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

NINE = re.compile('"(?:id|call_id)": "([A-Za-z0-9]{9})"')
# the template checks the ids of results, too, as that of Mistral v0.3 does
STRICT = MISTRAL.replace(
    "[TOOL_RESULTS] ",
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}[TOOL_RESULTS] ",
)


def two_calls(*ids):
    """Return two calls of one answer, whose results come in the other order where ids tell so."""
    first, second = call(city="Bern")["tool_calls"] + call(city="Köln")["tool_calls"]
    messages = [say("user", "Both?"), say("assistant", "", tool_calls=[first, second])]
    results = [say("tool", "21"), say("tool", "9")]
    for one, result, given in zip((first, second), results, ids or (None, None), strict=True):
        one.pop("id")
        if given:
            one["id"] = result["tool_call_id"] = given
    messages += [*(results[::-1] if ids else results), say("assistant", "21 and 9")]
    return {"messages": messages, "tools": [WEATHER]}


@pytest.fixture(scope="module")
def strict():
    return tiny_metaspace_tokenizer(chat_template=STRICT)


@pytest.mark.parametrize("ids", [(), ("call_ä<s>", "x")])
def test_ids_are_made_and_agree(strict, ids):
    sample = two_calls(*ids)
    before = copy.deepcopy(sample)
    text = chat(sample, "", processor=strict).text
    first, second, *results = NINE.findall(text)
    assert first != second and results == ([second, first] if ids else [first, second])
    assert chat(before, "", processor=tiny_metaspace_tokenizer(chat_template=STRICT)).text == text
    assert sample == before
    # transformers writes the same text with those ids
    for made, old in zip(sample["messages"][1]["tool_calls"], (first, second), strict=True):
        made["id"] = old
    for message, old in zip(sample["messages"][2:4], results, strict=True):
        message["tool_call_id"] = old
    assert text == strict.apply_chat_template(
        sample["messages"], tools=sample["tools"], tokenize=False
    )
    prompt = chat(before, "", processor=strict, for_generation=True).text
    assert text.startswith(prompt)


def test_ids_of_nine_letters_stay_and_templates_that_want_none_see_none(strict):
    ids = ("abcdefghi", "ABCDEF123")
    assert NINE.findall(chat(two_calls(*ids), "", processor=strict).text) == [*ids, *ids[::-1]]
    lax = tiny_metaspace_tokenizer(
        chat_template=MISTRAL.replace("call.id is not defined or call.id | length != 9", "false")
        .replace("call.id", "(call.id or 'none')")
        .replace("m.tool_call_id", "(m.tool_call_id or 'none')")
    )
    assert chat(two_calls(), "", processor=lax).text.count('"none"') == 4


# -- templates that know no tools ----------------------------------------------------------------


def qwen_2_5():
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()


def conversations():
    system = say("system", "Be brief.")
    start = [system, say("user", "Weather in Köln?")]
    more = [answer_of('{"degrees": 21}'), say("assistant", "21 degrees"), say("user", "And?")]
    yield [*start, call(city='K "ö" ln', days=3), *more, say("assistant", "Still 21")]
    yield [*start, call("Let me see", city="Köln"), *more, say("assistant", "Still 21")]
    sample = two_calls()
    yield [system, *sample["messages"]]


@pytest.mark.parametrize("number", [0, 2])
def test_what_is_written_is_what_qwen_2_5_was_published_with(number):
    """ChatML without tools, against the published template, which knows them."""
    messages = list(conversations())[number]
    sample = {"messages": messages, "tools": [WEATHER]}
    plain = format_tokenizer("chatml")
    with pytest.warns(UserWarning, match="knows no tools, so they are written into the system"):
        rendered = chat(sample, "", processor=named(plain, f"first {number}"))
    official = plain.apply_chat_template(
        messages, tools=[WEATHER], chat_template=qwen_2_5(), tokenize=False
    )
    assert rendered.text == official
    learnt = "".join(piece.text for piece in rendered if piece.is_target)
    answers = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", official, re.DOTALL)
    assert learnt == "".join(answers)
    prompt = chat(sample, "", processor=plain, for_generation=True).text
    assert official.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")


def named(tokenizer, name):
    """Warnings come once a name."""
    tokenizer.name_or_path = name
    return tokenizer


@pytest.mark.filterwarnings("ignore:the chat template of")
def test_results_are_the_users_where_roles_take_turns():
    text = chat(row("tools"), "", processor=format_tokenizer("llama2")).text
    assert text.startswith("<s>[INST] <<SYS>>\n# Tools\n\n")
    assert '[INST] <tool_response>\n{"degrees": 21}\n</tool_response> [/INST] 21 degrees' in text


@pytest.mark.filterwarnings("ignore:the chat template of")
def test_tools_are_before_the_question_where_there_is_no_system_message():
    none = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text = chat(row("tools"), "", processor=tiny_tokenizer(chat_template=none)).text
    assert text.startswith("<|im_start|>user\n# Tools\n\n")
    assert "</tool_call>\n\nWeather in Köln?<|im_end|>" in text


@pytest.mark.filterwarnings("ignore:the chat template of")
def test_calls_without_tools_and_with_words_of_the_template():
    sample = {"messages": row("special tools")["messages"]}
    tokenizer = format_tokenizer("chatml")
    rendered = chat(sample, "", processor=tokenizer)
    assert rendered.text.startswith("<|im_start|>user\nWeather?<|im_end|>\n")
    assert '<tool_call>\n{"name": "get_weather"' in rendered.text and "# Tools" not in rendered.text
    marks = [piece.text for piece in rendered if "<|im_end|>" in piece.text and not piece.is_user]
    assert len(marks) == 4  # one a turn: the data's own stay text
