"""Compares the tokens in the loss with those that TRL's training templates mark, and prints a page.

For each family of which TRL ships a training template, conversations of 13 kinds are rendered with
the published template by Stageline, and with the `{% generation %}` marks of the training template
by transformers. The page lists whether the learnt text is equal, differs or is refused.

    .venv/bin/python -m benchmarks.chat_masks > docs/chat_masks.md
"""

import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import trl
from transformers.utils.chat_template_utils import render_jinja_template

from prompt_fn import chat
from stageline.checking.tiny_models import tiny_tokenizer
from stageline.errors import UserError

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
    return text, [text[start:end] for start, end in spans]


def of_stageline(kind: str, tokenizer: Any) -> str:
    """What is in the loss by the published template, or why the row is refused."""
    messages, tools = KINDS[kind]
    row = {"messages": messages, "num_images": 0, **({"tools": tools} if tools else {})}
    try:
        rendered = chat(row, "", processor=tokenizer)
    except UserError as error:
        return f"refused: {str(error).partition(': ')[2].partition('. A template')[0]}"
    text = rendered.text
    return " · ".join(text[start:end] for start, end in joined(rendered.target_spans()))


def joined(spans: Any) -> list[tuple[int, int]]:
    """Spans that touch become one."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    counts = defaultdict(list)
    for family in families():
        tokenizer = tokenizer_of(family)
        for kind in KINDS:
            ours, theirs = of_stageline(kind, tokenizer), of_trl(family, kind, tokenizer)
            if ours != theirs:
                print(f"{family:20} {kind}\n   S {ours!r}\n   T {theirs!r}")
            counts[ours == theirs].append((family, kind))
    print({k: len(v) for k, v in counts.items()})
