"""Compares the tokens in the loss with those that TRL's training templates mark, and prints a page.

For each family of which TRL ships a training template, conversations of 13 kinds are rendered with
the published template by Stageline, and with the `{% generation %}` marks of the training template
by transformers. The page lists whether the learnt text is equal, differs or is refused.

    .venv/bin/python -m benchmarks.chat_masks > benchmarks/chat_masks.md
"""

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import trl
from transformers.utils.chat_template_utils import render_jinja_template

from prompt_fn import chat
from stageline.data.text.chat_template import ChatTemplate
from stageline.errors import UserError
from tests.helpers.tiny_models import tiny_tokenizer

FOLDER = Path(trl.__file__).parent / "chat_templates"
BASE = ("<pad>", "<s>", "</s>")
# the token that the family's tokenizer names as eos_token
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>",
    "gemma": "<eos>",
    "glm4moe": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "muse": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": "<|endoftext|>",
    "qwen": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
}
_SPECIAL = re.compile(
    r"<\|\w+\|>|<｜[^｜<>]+｜>|<\w+_of_\w+>|<\|?(?:turn|channel|image|audio|video)\|?>"
    r"|<\|?(?:tool_call|tool_response|tool)\|?>|\[/?INST\]"
)
# Qwen and GLM add these as tokens that are not special
_ORDINARY = {"<tool_call>", "<tool_response>", "<tool>", "<channel>"}


def say(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call{number:05d}", "function": function}


def result(number: int, text: str, name: str = "weather") -> dict[str, Any]:
    return say("tool", text, tool_call_id=f"call{number:05d}", name=name)


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}
_SYSTEM, _ASKED, _SURE = say("system", "Be brief."), say("user", "Which?"), say("user", "Sure?")
_SEVEN, _YES = say("assistant", "Seven"), say("assistant", "Yes")
_THOUGHT = {"reasoning_content": "Six and one."}
_CALLED = say("assistant", "", tool_calls=[call("weather", 1, city="Bern")])
KINDS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "one turn": ([_ASKED, _SEVEN], []),
    "system": ([_SYSTEM, _ASKED, _SEVEN], []),
    "two turns": ([_ASKED, _SEVEN, _SURE, _YES], []),
    "system, three turns": ([_SYSTEM, *[_ASKED, _SEVEN, _SURE, _YES] * 2][:7], []),
    "thought, last": ([_ASKED, {**_SEVEN, **_THOUGHT}], []),
    "thoughts, all": ([_ASKED, {**_SEVEN, **_THOUGHT}, _SURE, {**_YES, **_THOUGHT}], []),
    "thought in content": ([_ASKED, say("assistant", "<think>\nSix.\n</think>\n\nSeven")], []),
    "parts": ([say("user", [{"type": "text", "text": "Which?"}]),
               say("assistant", [{"type": "text", "text": "Seven"}])], []),
    "tools, no call": ([_ASKED, _SEVEN], [TOOL]),
    "call": ([_ASKED, _CALLED], [TOOL]),
    "call, result": ([_ASKED, _CALLED, result(1, "21"), say("assistant", "21 degrees")], [TOOL]),
    "text and call": ([_ASKED, {**_CALLED, "content": "Let me see."}, result(1, "21"),
                       say("assistant", "21 degrees")], [TOOL]),
    "two calls": ([_ASKED, say("assistant", "", tool_calls=[call("weather", 1, city="Bern"),
                                                            call("weather", 2, city="Rome")]),
                   result(1, "21"), result(2, "28"), say("assistant", "Rome")], [TOOL]),
}  # fmt: skip


def families() -> list[str]:
    """The names of TRL's training templates, without their ending."""
    found = FOLDER.glob("*_training.jinja")
    return sorted(path.name.removesuffix("_training.jinja") for path in found)


def tokenizer_of(family: str) -> Any:
    """A tiny tokenizer with the special tokens that the family's templates write."""
    texts = [template(family, kind) for kind in ("", "_training")]
    end = next((end for start, end in ENDS.items() if family.startswith(start)), "</s>")
    specials = {text for one in texts for text in _SPECIAL.findall(one)} - _ORDINARY
    tokens = [*BASE, *sorted(specials | {end} - set(BASE))]
    return tiny_tokenizer(
        special_tokens=tokens, chat_template=texts[0], eos_token=end, name_or_path=family
    )


def template(family: str, kind: str = "") -> str:
    """The text of a template of TRL: the published one, or that for training."""
    return (FOLDER / f"{family}{kind}.jinja").read_text(encoding="utf-8")


def marked(
    family: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], tokenizer: Any
) -> tuple[str, list[str]]:
    """The text of the training template, and the parts that it marks."""
    rendered: Any = render_jinja_template(
        conversations=[messages],
        tools=tools or None,
        chat_template=template(family, "_training"),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    (text,), (spans,) = rendered
    return text, [text[start:end] for start, end in joined(spans)]


def learnt(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], tokenizer: Any
) -> list[str]:
    """The parts of the text that are in the loss."""
    row = {"messages": messages, "num_images": 0, **({"tools": tools} if tools else {})}
    rendered = chat(row, "", processor=tokenizer)
    return [rendered.text[start:end] for start, end in joined(rendered.target_spans())]


def joined(spans: Any) -> list[tuple[int, int]]:
    """Spans that touch become one; those of no characters go."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        if end > start:
            found.append((start, end))
    return found


class Outcome(NamedTuple):
    """How a conversation compares: letters of `MEANING`, and the texts, or why one is refused."""

    letters: str
    ours: str
    theirs: str


MEANING = {
    "=": "equal",
    "n": "TRL also marks the line break behind the token that ends a turn. The model is never "
    "asked to write it.",
    "h": "TRL also marks the end of the prompt for generation (a line break, a role, `<think>`). "
    "The model is given it and does not write it.",
    "g": "The published template writes more before this answer than its prompt for generation "
    "has. Stageline trains on the rest, because the model has to write it.",
    "d": "The published template drops thoughts, also empty ones, of earlier answers; TRL changed "
    "it. Stageline trains on the text that the published template writes.",
    "e": "The published template ends no turn. Stageline ends the last answer with the end of the "
    "sequence, TRL with the token of the next role. Both end generation.",
    "c": "Stageline also trains on the token at which the model stops for the result of a tool; "
    "TRL leaves it out.",
    "t": "The published template takes no tools, or not in this form. Stageline writes them as "
    "text ([tools](../docs/chat_templates.md#tools)); TRL's template drops the call or fails.",
    "p": "TRL's template takes no content of this form: it fails, leaves the content out or "
    "writes a Python list. Stageline gives it the form that it takes.",
    "x": "TRL's template refuses the conversation.",
    "r": "Stageline refuses the row; the reason is below.",
    "?": "another difference, below",
}


def compare(family: str, kind: str, tokenizer: Any) -> Outcome:
    """Compares what is learnt of one conversation."""
    messages, tools = KINDS[kind]
    try:
        ours = learnt(messages, tools, tokenizer)
    except UserError as error:
        why = str(error).partition("cannot be followed: ")[2].partition(". So it is")[0]
        return Outcome("r", why.split("; ")[0], "")
    try:
        theirs = marked(family, messages, tools, tokenizer)[1]
    except Exception as error:  # templates raise what they like
        letter = "t" if tools and "<tool_call>" in "".join(ours) else "x"
        is_form = not isinstance(messages[0]["content"], str) or "UndefinedError" in repr(error)
        letter = "p" if is_form and letter == "x" else letter
        return Outcome(letter, " · ".join(ours), f"{type(error).__name__}: {error}")
    letters: set[str] = set()
    if len(ours) == len(theirs):
        pairs = zip(ours, theirs, range(len(ours)), strict=True)
        for one, other, number in pairs:
            letters |= differences(one, other, number, family, kind, tokenizer)
    else:
        letters.add("?")
    return Outcome("".join(sorted(letters)) or "=", " · ".join(ours), " · ".join(theirs))


def differences(
    ours: str, theirs: str, number: int, family: str, kind: str, tokenizer: Any
) -> set[str]:
    """The letters for one answer."""
    messages, tools = KINDS[kind]
    end = ChatTemplate.of(tokenizer).end_pattern
    found = set()
    stripped = theirs.rstrip("\n")
    if stripped != theirs and not ours.endswith("\n"):
        found.add("n")
        theirs = stripped
    tails = [list(end.finditer(text)) for text in (ours, theirs)]
    if ours != theirs and tails[0] and theirs.endswith(ours[: tails[0][-1].start()]):
        found.add("c")
        theirs += tails[0][-1][0]
    elif all(tails) and tails[0][-1][0] != tails[1][-1][0]:
        found.add("e")
        ours, theirs = ours[: tails[0][-1].start()], theirs[: tails[1][-1].start()]
    if ours == theirs:
        return found
    places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        prompt = tokenizer.apply_chat_template(
            messages[: places[number]],
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception:  # templates raise what they like
        prompt = ""
    if "<tool_call>" in ours and "<tool_call>" not in template(family):
        return found | {"t"}
    texts = re.sub("</?think>", "", end.sub("", theirs)).strip()
    if not texts or texts.startswith("[{"):
        return found | {"p"}
    if ours.endswith(theirs):
        return found | {"g"}
    before = theirs.removesuffix(ours)
    for length in range(len(before), 0, -1):
        if before != theirs and prompt.endswith(before[:length]):
            found.add("h")
            before = before[length:]
            break
    if not before:
        return found
    return found | {"d" if before.strip().endswith("</think>") else "?"}


def main() -> None:
    """Prints the page."""
    warnings.simplefilter("ignore")
    found = {}
    for family in families():
        tokenizer = tokenizer_of(family)
        found[family] = {kind: compare(family, kind, tokenizer) for kind in KINDS}
    outcomes = [one for row in found.values() for one in row.values()]
    counts = Counter(letter for one in outcomes for letter in one.letters)
    num_equal = counts["="]
    total = len(found) * len(KINDS)
    print("# What is in the loss, next to TRL's training templates\n")
    print(
        f"{len(found)} families of TRL {trl.__version__}, {len(KINDS)} kinds of conversation. "
        "Stageline renders with the published template, TRL with the copy that it made for "
        "training, whose `{% generation %}` marks transformers reads. The table compares the text "
        "of the tokens in the loss.\n"
    )
    print("```bash\n.venv/bin/python -m benchmarks.chat_masks > benchmarks/chat_masks.md\n```\n")
    print(f"{num_equal} of {total} are equal; the letters say what differs in the others.\n")
    print("| letter | conversations | meaning |\n| --- | --- | --- |")
    for letter, meaning in MEANING.items():
        if counts[letter]:
            print(f"| `{letter}` | {counts[letter]} | {meaning} |")
    print("\n| family | " + " | ".join(KINDS) + " |\n| --- |" + " --- |" * len(KINDS))
    for family, row in found.items():
        print(f"| {family} | " + " | ".join(f"`{one.letters}`" for one in row.values()) + " |")
    print("\n## What is refused\n\n| family | conversations | reason |\n| --- | --- | --- |")
    for family, row in found.items():
        reasons: dict[str, list[str]] = {}
        for kind, one in row.items():
            if "r" in one.letters:
                reason = re.sub(r"(answer|message) \d", r"\1 N", one.ours)
                reasons.setdefault(reason, []).append(kind)
        for reason, kinds in reasons.items():
            print(f"| {family} | {'; '.join(kinds)} | `{reason.replace('|', '¦')}` |")
    if counts["?"]:
        print("\n## Other differences\n")
        for family, row in found.items():
            for kind, one in row.items():
                if "?" in one.letters:
                    print(f"- {family}, {kind}\n  - Stageline: `{one.ours!r}`")
                    print(f"  - TRL: `{one.theirs!r}`")


if __name__ == "__main__":
    main()
