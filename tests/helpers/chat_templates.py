"""Chat templates of the formats that models use, written here for tests.

They write what the formats require, with the special tokens of each; they are not copies of the
templates that the models come with.
"""

from typing import Any, NamedTuple

from tests.helpers.tiny_models import CHATML, tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

# [INST] in the user's turn, the system message inside the first one; no prompt for generation
LLAMA2 = (
    "{% set system = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0].content | trim + '\n<</SYS>>\n\n' %}"
    "{% set turns = messages[1:] %}{% endif %}"
    "{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant have to take turns') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ system if loop.first else '' }}"
    "{{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
# headers of roles; one tool call a message, as JSON; what a tool says is of the role ipython
LLAMA3 = (
    "{{ bos_token }}"
    "{% macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}"
    "{% set rest = messages %}{% set system = '' %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set rest = messages[1:] %}{% endif %}"
    "{% if system or tools %}{{ head('system') }}{% if tools %}Environment: ipython\n{% endif %}"
    "{{ system }}<|eot_id|>{% endif %}"
    "{% for m in rest %}"
    "{% if m.role == 'user' and loop.first and tools %}{{ head('user') }}Functions:\n\n"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}"
    "{{ m.content | trim }}<|eot_id|>"
    "{% elif m.tool_calls %}{% set call = m.tool_calls[0].function %}{{ head('assistant') }}"
    '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}'
    "{{ '}' }}<|eot_id|>"
    "{% elif m.role == 'tool' %}{{ head('ipython') }}{{ m.content | tojson }}<|eot_id|>"
    "{% else %}{{ head(m.role) }}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
)
# ChatML with <tool_call>, <tool_response> and <think>; thoughts before the last question go
QWEN = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n<tools>"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n' }}</tools>"
    "<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% set text = m.content if m.content is string else '' %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1] %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ text.lstrip('\n') }}"
    "{% else %}{{ text }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "{% if not loop.first or text %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}' }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ text }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# the assistant is called model; the system message begins the first user turn
GEMMA = (
    "{{ bos_token }}{% set system = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim + '\n\n' %}"
    "{% set turns = messages[1:] %}{% endif %}"
    "{% for m in turns %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ system if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# tools stand before the last question, calls are a list, ids have nine letters
MISTRAL = (
    "{% set system = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% endif %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in turns %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{{ bos_token }}"
    "{% for m in turns %}"
    "{% if m.role == 'user' %}"
    "{% if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ system if loop.index0 == ns.last else '' }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('ids of tool calls have 9 letters') }}{% endif %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ ', \"id\": \"' + call.id + '\"}' }}"
    "{{ ', ' if not loop.last else '' }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS] {{ '{\"content\": ' }}{{ m.content | tojson }}"
    "{{ ', \"call_id\": \"' + m.tool_call_id + '\"}' }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('there is no role ' + m.role) }}{% endif %}{% endfor %}"
)
# channels for thoughts, calls and answers; the last answer ends otherwise than the ones before,
# and what a tool says repeats the name that was called
CHANNELS = (
    "{% set ns = namespace(name='') %}"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and (loop.last or m.tool_calls) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>{% set ns.name = call.name %}"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# says itself what the assistant writes
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# asks for generation with another header than answers have
UNSTABLE = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>model\\n'")

BASE = ("<pad>", "<s>", "</s>")
_CHATML = (*BASE, "<|im_start|>", "<|im_end|>")
_MISTRAL = (
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip


class Format(NamedTuple):
    """A chat format: its template, its special tokens, and tokens that are not special."""

    template: str
    special_tokens: tuple[str, ...]
    other_tokens: tuple[str, ...] = ()
    is_metaspace: bool = False


FORMATS = {
    "chatml": Format(CHATML, _CHATML),
    "llama2": Format(LLAMA2, BASE, is_metaspace=True),
    "llama3": Format(
        LLAMA3, (*BASE, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "qwen": Format(
        QWEN,
        _CHATML,
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
         "</tool_response>"),
    ),
    "gemma": Format(GEMMA, (*BASE, "<start_of_turn>", "<end_of_turn>"), is_metaspace=True),
    "mistral": Format(MISTRAL, (*BASE, *_MISTRAL), is_metaspace=True),
    "channels": Format(
        CHANNELS,
        (*BASE, "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    ),
    "marked": Format(MARKED, _CHATML),
    "unstable": Format(UNSTABLE, _CHATML),
}  # fmt: skip


def format_tokenizer(name: str) -> Any:
    """Return a tiny tokenizer of a chat format, with its template and its special tokens."""
    chosen = FORMATS[name]
    make = tiny_metaspace_tokenizer if chosen.is_metaspace else tiny_tokenizer
    tokenizer = make(
        special_tokens=chosen.special_tokens, chat_template=chosen.template, name_or_path=name
    )
    tokenizer.add_tokens(list(chosen.other_tokens))
    return tokenizer
