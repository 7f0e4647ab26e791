"""Chat formats: ids are those of transformers; exactly the assistant's characters are trained on.

The expected pieces of text, trained on or not, are written here for each format. The code under
test has no part in it.
"""

import json
import re

import pytest

from benchmarks import chat_masks
from prompt_fn import chat
from stageline.data.text.encode import TextEncoder, encode_rendered
from stageline.errors import UserError
from tests.helpers.chat_samples import (  # fmt: skip
    SAMPLES,
    TOOLS,
    WEATHER,
    answer_of,
    call,
    row,
    say,
)
from tests.helpers.chat_templates import FORMATS, QWEN, format_tokenizer
from tests.helpers.tiny_models import tiny_tokenizer


def dumps(value, **options):
    return json.dumps(value, ensure_ascii=False, **options)


def split_system(messages):
    has_system = messages[0]["role"] == "system"
    return (messages[0]["content"] if has_system else ""), messages[has_system:]


def chatml(messages, tools):
    for m in messages:
        is_learnt = m["role"] == "assistant"
        yield f"<|im_start|>{m['role']}\n", False
        yield m["content"].strip() + "<|im_end|>", is_learnt
        yield "\n", False


def llama3(messages, tools):
    system, messages = split_system(messages)
    yield "<s>", False
    if system or tools:
        yield "<|start_header_id|>system<|end_header_id|>\n\n", False
        yield ("Environment: ipython\n" if tools else "") + system + "<|eot_id|>", False
    for number, m in enumerate(messages):
        role = {"tool": "ipython"}.get(m["role"], m["role"])
        yield f"<|start_header_id|>{role}<|end_header_id|>\n\n", False
        text = m["content"].strip()
        if role == "ipython":
            text = dumps(m["content"])
        elif tools and number == 0:
            text = "Functions:\n\n" + dumps(tools[0], indent=4) + "\n\n" + text
        elif m.get("tool_calls"):
            function = m["tool_calls"][0]["function"]
            text = dumps({"name": function["name"], "parameters": function["arguments"]})
        yield text + "<|eot_id|>", role == "assistant"


def qwen(messages, tools):
    system, rest = split_system(messages)
    if tools:
        shown = f"{system}\n\n" if system else ""
        yield f"<|im_start|>system\n{shown}# Tools\n<tools>\n{dumps(tools[0])}\n</tools>", False
        yield "<|im_end|>\n", False
    elif system:
        yield f"<|im_start|>system\n{system}<|im_end|>\n", False
    for number, m in enumerate(rest):
        if m["role"] == "tool":
            text = f"<tool_response>\n{m['content']}\n</tool_response>"
            yield f"<|im_start|>user\n{text}<|im_end|>\n", False
        elif m["role"] == "user":
            yield f"<|im_start|>user\n{m['content']}<|im_end|>\n", False
        else:
            yield "<|im_start|>assistant\n", False
            text = m["content"]
            thought = m.get("reasoning_content", "")
            is_last = number == len(rest) - 1
            if is_last or (thought and all(other["role"] != "user" for other in rest[number:])):
                # thoughts after the last question, of the last answer be they empty
                text = f"<think>\n{thought}\n</think>\n\n" + text.lstrip("\n")
            if m.get("tool_calls"):
                text += f"<tool_call>\n{dumps(m['tool_calls'][0]['function'])}\n</tool_call>"
            yield text + "<|im_end|>", True
            yield "\n", False


def mistral(messages, tools):
    system, messages = split_system(messages)
    last = max(number for number, m in enumerate(messages) if m["role"] == "user")
    yield "<s>", False
    for number, m in enumerate(messages):
        if m["role"] == "user":
            if number == last and tools:
                yield f"[AVAILABLE_TOOLS] {dumps(tools)}[/AVAILABLE_TOOLS]", False
            lead = f"{system}\n\n" if system and number == last else ""
            yield f"[INST] {lead}{m['content']}[/INST]", False
        elif m["role"] == "tool":
            result = dumps({"content": m["content"], "call_id": m["tool_call_id"]})
            yield f"[TOOL_RESULTS] {result}[/TOOL_RESULTS]", False
        elif m.get("tool_calls"):
            calls = [c["function"] | {"id": c["id"]} for c in m["tool_calls"]]
            yield f"[TOOL_CALLS] {dumps(calls)}</s>", True
        else:
            yield f" {m['content'].strip()}</s>", True


def channels(messages, tools):
    if tools:
        yield f"<|start|>developer<|message|>{dumps(tools)}<|end|>", False
    for number, m in enumerate(messages):
        is_last = number == len(messages) - 1
        if m["role"] == "tool":
            yield "<|start|>functions.get_weather to=assistant", False
            yield f"<|message|>{dumps(m['content'])}<|end|>", False
            continue
        if m["role"] != "assistant":
            yield f"<|start|>{m['role']}<|message|>{m['content']}<|end|>", False
            continue
        yield "<|start|>assistant", False
        if m.get("tool_calls"):
            arguments = dumps(m["tool_calls"][0]["function"]["arguments"])
            yield " to=functions.get_weather<|channel|>commentary json", True
            yield f"<|message|>{arguments}<|call|>", True
            continue
        if is_last and m.get("reasoning_content"):
            thought = m["reasoning_content"]
            yield f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant", True
        yield f"<|channel|>final<|message|>{m['content']}", True
        yield "<|return|>" if is_last else "<|end|>", True


EXPECTED = {
    "chatml": chatml, "llama3": llama3, "qwen": qwen,
    "mistral": mistral, "channels": channels,
}  # fmt: skip
CAN = {"tools": ("llama3", "qwen", "mistral", "channels"), "reasoning": ("qwen", "channels")}
CAN["special tools"] = CAN["tools"]
CAN["reasoning tools"] = ("qwen",)
CASES = [
    (name, sample)
    for name in EXPECTED
    for sample in SAMPLES
    if name in CAN.get(sample, tuple(EXPECTED))
]


@pytest.fixture(scope="module")
def tokenizers():
    return {name: format_tokenizer(name) for name in FORMATS}


def by_character(pieces):
    return [(letter, is_learnt) for text, is_learnt in pieces for letter in text]


@pytest.mark.parametrize(("name", "sample"), CASES)
def test_learnt_are_exactly_the_assistants_characters(tokenizers, name, sample):
    tokenizer = tokenizers[name]
    rendered = chat(row(sample), "", processor=tokenizer)
    expected = by_character(EXPECTED[name](SAMPLES[sample], TOOLS.get(sample)))
    assert rendered.text == "".join(letter for letter, _ in expected)
    assert by_character((piece.text, piece.is_target) for piece in rendered) == expected
    prompt = chat(row(sample), "", processor=tokenizer, for_generation=True).text
    official = tokenizer.apply_chat_template(
        row(sample)["messages"][:-1],
        tools=row(sample).get("tools"),
        tokenize=False,
        add_generation_prompt=True,
    )
    assert prompt == official, "generation begins where the last answer does"
    ends = [start for start, _, piece in rendered.spans() if piece.is_target]
    assert rendered.text.startswith(prompt) and len(prompt) in ends
    # ids are those of transformers, and data make no special token
    encoded = encode_rendered(rendered, tokenizer)
    options = {"tools": TOOLS.get(sample), "tokenize": True, "return_dict": False}
    if not sample.startswith("special"):
        ids = tokenizer.apply_chat_template(SAMPLES[sample], **options)
        assert encoded.input_ids == ids
        return
    # the same with harmless words has the special tokens that the template writes
    words = json.loads(json.dumps(SAMPLES[sample]).replace("<", "(").replace("[/", "(/"))
    words = json.loads(json.dumps(words).replace("[INST", "(").replace("[TOOL_CALLS", "("))
    tools = json.loads(json.dumps(TOOLS.get(sample)).replace("<", "(").replace("[INST", "("))
    harmless = tokenizer.apply_chat_template(words, **{**options, "tools": tools})
    reserved = TextEncoder.of(tokenizer).reserved_ids - {tokenizer.unk_token_id}
    assert [i for i in encoded.input_ids if i in reserved] == [i for i in harmless if i in reserved]


# -- templates that models come with -----------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["cohere2", "diffusion_gemma", "gemma3", "llama3", "phi3_5"],
)
def test_learnt_is_what_trl_marks(name):
    """Ends of two special tokens, and end marks of their own, are trained on as a whole."""
    tokenizer = chat_masks.tokenizer_of(name)
    messages = [message for message in SAMPLES["multi"] if message["role"] != "system"]
    texts, of_trl = chat_masks.marked(name, messages, [], tokenizer)
    published = learnt_of(chat({"messages": messages}, "", processor=tokenizer))
    tokenizer.chat_template = chat_masks.template(name, "_training")
    assert learnt_of(chat({"messages": messages}, "", processor=tokenizer)) == "".join(of_trl)
    # TRL marks the line break after a turn too
    assert published == re.sub(r"(\|>|_turn>|<turn\|>)\n(?!<)", r"\1", "".join(of_trl))
    assert published.count("Seven") == 1


@pytest.mark.parametrize("name", ["gptoss", "qwen3"])
def test_each_difference_from_trl_has_a_reason(name):
    """The page of all families is benchmarks/chat_masks.md."""
    tokenizer = chat_masks.tokenizer_of(name)
    found = {chat_masks.compare(name, kind, tokenizer).letters for kind in chat_masks.KINDS}
    assert "?" not in "".join(found) and found != {"r"}


def test_turns_that_end_by_the_next_role():
    tokenizer = chat_masks.tokenizer_of("glm4moe")
    messages, tools = chat_masks.KINDS["call, result"]
    messages = [*messages, say("user", "Sure?"), say("assistant", "Yes")]
    given = {"messages": messages, "tools": tools}
    learnt = learnt_of(chat(given, "", processor=tokenizer)).split("<think></think>\n")
    assert learnt[1].endswith("</tool_call><|observation|>\n")
    assert learnt[2:] == ["21 degrees<|user|>\n", "Yes<|endoftext|>"]


def test_answers_without_an_end_are_told():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = tiny_tokenizer(chat_template=template, name_or_path="no ends")
    with pytest.warns(UserWarning, match="no token ends"):
        assert learnt_of(chat(row("multi"), "", processor=tokenizer)).endswith("Eight</s>")


# -- templates that cannot be trained on ----------------------------------------------------------


def test_a_template_that_asks_otherwise_than_it_answers(tokenizers):
    with pytest.raises(UserError, match="template of unstable .*im_start.>model.*never asked for"):
        chat(row("single"), "", processor=tokenizers["unstable"])
    assert chat(row("single"), "", processor=tokenizers["unstable"], for_generation=True).text


def test_what_a_template_does_not_write_is_refused(tokenizers):
    with pytest.raises(UserError, match="does not write the reasoning_content"):
        chat(row("reasoning"), "", processor=tokenizers["chatml"])


def test_a_developer_that_a_template_does_not_know(tokenizers):
    turns = [say("developer", "Be brief."), *SAMPLES["single"]]
    assert (
        "developer\nBe brief." in chat({"messages": turns}, "", processor=tokenizers["chatml"]).text
    )
    with pytest.raises(UserError, match="leaves out or changes message 0, of developer"):
        chat({"messages": turns}, "", processor=tokenizers["qwen"])


# -- thinking ------------------------------------------------------------------------------------


def learnt_of(rendered):
    return "".join(piece.text for piece in rendered if piece.is_target)


def test_an_empty_thought_is_learnt_unless_generation_begins_with_it(tokenizers):
    tokenizer, given = tokenizers["qwen"], row("single")
    assert learnt_of(chat(given, "", processor=tokenizer)) == (
        "<think>\n\n</think>\n\nSeven.<|im_end|>"
    )
    off = {"enable_thinking": False}
    assert learnt_of(chat(given, "", processor=tokenizer, template_options=off)) == (
        "Seven.<|im_end|>"
    )


def test_a_thought_where_generation_has_an_empty_one(tokenizers):
    off = {"enable_thinking": False}
    with pytest.raises(UserError, match="before answer 3 it writes .*enable_thinking"):
        chat(row("reasoning"), "", processor=tokenizers["qwen"], template_options=off)


def test_a_thought_in_the_content_is_one_too(tokenizers):
    turns = [
        say("user", "q"), say("assistant", "<think>\nold\n</think>\n\nok"),
        say("user", "more"), say("assistant", "<think>\nnew\n</think>\n\nfine"),
    ]  # fmt: skip
    rendered = chat({"messages": turns}, "", processor=tokenizers["qwen"])
    assert learnt_of(rendered) == "ok<|im_end|><think>\nnew\n</think>\n\nfine<|im_end|>"


# -- what calls may look like --------------------------------------------------------------------


def test_arguments_as_text_are_the_object(tokenizers):
    given = json.loads(json.dumps(row("tools")))
    function = given["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    given["tools"] = json.dumps(given["tools"])
    given["messages"][1]["content"] = None
    rendered = chat(given, "", processor=tokenizers["qwen"])
    assert rendered == chat(row("tools"), "", processor=tokenizers["qwen"])


def test_a_template_that_wants_arguments_as_text(tokenizers):
    template = QWEN.replace("call.function.arguments | tojson", "call.function.arguments + ''")
    tokenizer = tiny_tokenizer(chat_template=template)
    rendered = chat(row("tools"), "", processor=tokenizer)
    assert rendered.text == chat(row("tools"), "", processor=tokenizers["qwen"]).text


def test_content_beside_a_call_that_a_template_drops(tokenizers):
    given = {"messages": [say("user", "q"), call("Let me see", city="x"), answer_of("3")],
             "tools": [WEATHER]}  # fmt: skip
    assert "Let me see" in learnt_of(chat(given, "", processor=tokenizers["qwen"]))
    with pytest.warns(UserWarning, match="leaves out the content of messages with tool calls"):
        rendered = chat(given, "", processor=tokenizers["llama3"])
    assert learnt_of(rendered).startswith('{"name": "get_weather"')


CONTENTS = (
    "Which digit?",
    "  7 \n",
    "这是 7",
    "a <think>b</think> c",
    "<|im_end|>\n<|im_start|>x",
    "no",
)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"unstable"}))  # which is refused
def test_further_rows_of_the_same_roles_are_rendered_as_the_first(name):
    """Compare a tokenizer that has seen such rows with a fresh one and with transformers."""
    used = format_tokenizer(name)
    for number in range(len(CONTENTS) * 2):
        texts = [CONTENTS[(number + turn) % len(CONTENTS)] for turn in range(4)]
        sample = {
            "messages": [say(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
        }
        fresh = format_tokenizer(name)
        again, first = (chat(sample, "", processor=tokenizer) for tokenizer in (used, fresh))
        assert again.text == first.text
        assert encode_rendered(again, used) == encode_rendered(first, fresh)
        end = fresh.eos_token or ""
        library = fresh.apply_chat_template(sample["messages"], tokenize=False)
        assert again.text.removesuffix(end).rstrip() == library.removesuffix(end).rstrip()
