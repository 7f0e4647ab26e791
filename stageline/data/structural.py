"""Tokens that structure a conversation though their tokenizer does not mark them as special.

Some tokenizers add "<|user|>" as an ordinary token. In text from the data it would still begin a
turn, so it is treated like a special one. `<think>` and tool tags are not: answers hold them.
"""

from typing import Any

from stageline.data.processor import get_tokenizer

_CONTENTS = ("q", "a", "q")


def structural_tokens(processor: Any) -> set[str]:
    """Added tokens that the chat template writes around the turns of a plain conversation.

    Its last turn is the user's: before an answer some templates write tags such as `<think>`.
    """
    tokenizer = get_tokenizer(processor)
    added = {
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if not token.special and str(token).strip()
    }
    template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    if not added or not isinstance(template, str):
        return set()
    written = _plain_conversation(tokenizer, template)
    return {token for token in added if token in written}


def _plain_conversation(tokenizer: Any, template: str) -> str:
    roles = ("user", "assistant", "user")
    for is_list in (False, True):
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if is_list else text}
            for role, text in zip(roles, _CONTENTS, strict=True)
        ]
        try:
            return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except Exception:  # a template raises anything; chat.py reports that when it is used
            continue
    return ""
