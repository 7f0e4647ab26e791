"""Tool calls in the text of answers: each format, whole and cut anywhere, and what is none."""

import json

import pytest

from stageline.serving.tool_calls import FoundCall, ToolReader

NAMES = ("add", "get_weather")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü </x>"}}\n</tool_call>'
ADD = ("add", {"a": 1, "b": "ü </x>"})
ANSWERS = {
    "plain": ("Hello <b>you</b>, 1 < 2.", "Hello <b>you</b>, 1 < 2.", []),
    "hermes": (HERMES, "", [ADD]),
    "text before": (f"Well.\n{HERMES}", "Well.\n", [ADD]),
    "two": (f"\n{HERMES}\n{HERMES}\n", "", [ADD, ADD]),
    "text behind": (f"{HERMES}\nDone.", "\nDone.", [ADD]),
    "not closed": (HERMES.removesuffix("</tool_call>"), "", [ADD]),
    "mistral": ('[{"name": "add", "arguments": {}}, {"name": "add", "arguments": {"a": 2}}]', "",
                [("add", {}), ("add", {"a": 2})]),
    "mistral with its word": ('[TOOL_CALLS] [{"name": "add", "arguments": {}}]', "", [("add", {})]),
    "llama": ('{"name": "get_weather", "parameters": {"city": "X"}}', "",
              [("get_weather", {"city": "X"})]),
    "llama two": ('{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}', "",
                  [("add", {}), ("add", {"a": 1})]),
    "arguments as text": ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", {"a": 1})]),
    "another tool": ('{"name": "rm", "arguments": {}}', '{"name": "rm", "arguments": {}}', []),
    "other JSON": ('{"answer": 42}', '{"answer": 42}', []),
    "bad call": ("<tool_call>oh</tool_call> no", "<tool_call>oh</tool_call> no", []),
    "call with no object": ('{"name": "add", "arguments": [1]}',) * 2 + ([],),
    "half a surrogate pair": ('{"name": "add", "arguments": {"a": "\\ud800"}}',) * 2 + ([],),
}  # fmt: skip


def read(pieces: list[str], **options) -> tuple[str, list]:
    reader = ToolReader(NAMES, **options)
    told = [item for piece in pieces for item in reader.add(piece)] + reader.finish()
    calls = [item for item in told if isinstance(item, FoundCall)]
    assert len({call.id for call in calls}) == len(calls) == reader.num_calls
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    text = "".join(item for item in told if isinstance(item, str))
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_found_however_the_text_is_cut(name):
    answer, text, calls = ANSWERS[name]
    assert read([answer]) == (text, calls)
    assert read(list(answer)) == (text, calls)
    for place in range(0, len(answer), 1 + len(answer) // 50):
        assert read([answer[:place], answer[place:]]) == (text, calls)


def test_text_is_told_as_soon_as_it_is_sure():
    reader = ToolReader(NAMES)
    assert reader.add("Well") == ["Well"]
    assert reader.add(" <tool") == [" "]
    assert reader.add("box>") == ["<toolbox>"]
    assert reader.add(HERMES[:-5]) == []
    [call] = reader.add(HERMES[-5:])
    assert (call.name, json.loads(call.arguments)) == ADD


def test_only_the_first_call_where_that_was_asked():
    assert read([HERMES + HERMES], is_single=True) == ("", [ADD])
    assert read([f"[{HERMES[12:-13]}, {HERMES[12:-13]}]"], is_single=True) == ("", [ADD])


def test_marked_calls_alone_where_json_may_be_the_answer():
    bare = '{"name": "add", "arguments": {}}'
    assert read([bare]) == ("", [("add", {})])
    for text in (bare, f"[{bare}]", '{"a": 1}'):
        assert read([text], is_marked=True) == (text, []) == read(list(text), is_marked=True)
    for name in ("hermes", "text before", "two", "not closed", "bad call"):
        answer, text, calls = ANSWERS[name]
        assert read(list(answer), is_marked=True) == (text, calls)
