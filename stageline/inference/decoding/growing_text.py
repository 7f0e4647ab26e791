"""Decodes an answer token by token, in time linear in its length.

All that is given out together is, to the character, what the tokenizer makes of all tokens at
once. Only a window of the last tokens is decoded. What counts is what its text grows by: so the
window may begin inside a character, or with a token that the tokenizer writes in a way of its own.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

# what a decoder writes for bytes that are not, or not yet, a character
REPLACEMENT = "\ufffd"
# a longer window is cut to the shorter length, in which a character lies whole
_LONGEST_WINDOW = 24
_SHORT_WINDOW = 8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# a tail that the clean-up of spaces may still join with what comes, as in " n" + "'t" or " ' "
_OPEN_SPACES = re.compile(r" [ '.?!,nvr]*\Z")


class GrowingText:
    """The text of tokens that come one by one; special tokens are left out of it.

    Attributes:
        last_byte: the byte that the last token stands for, with tokenizers that fall back to bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.last_byte: int | None = None
        self._tokenizer = tokenizer
        self._skipped, self._cleans_up = _habits(tokenizer)
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text
        self._open_spaces = ""

    def add(self, token_id: int) -> str:
        """The text that is certain now: no later token can change it."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        self.last_byte = _byte_of(self._tokenizer, token_id)
        if self.last_byte is not None:
            # such a decoder writes a run of bytes as characters only if the whole run is right
            return ""
        text = self._decode(self._window)
        num_certain = len(text) - text.endswith(REPLACEMENT)
        new = text[self._num_given : num_certain]
        self._num_given = max(self._num_given, num_certain)
        if len(self._window) > _LONGEST_WINDOW:
            self._shorten(text)
        return self._clean(new, is_end=False)

    def rest(self) -> str:
        """What the text ends with if no token comes any more; may be asked again."""
        new = self._decode(self._window)[self._num_given :]
        spaces = self._open_spaces
        rest = self._clean(new, is_end=True)
        self._open_spaces = spaces
        return rest

    def _shorten(self, text: str) -> None:
        num_uncertain = len(text) - self._num_given
        end = self._decode(self._window[-_SHORT_WINDOW:])
        # an empty text hasn't begun: its next token would be written as a first one
        if len(end) > num_uncertain:
            self._window = self._window[-_SHORT_WINDOW:]
            self._num_given = len(end) - num_uncertain

    def _clean(self, new: str, *, is_end: bool) -> str:
        """The clean-up that some tokenizers do on the whole text: " ." to "." and the like."""
        if not self._cleans_up:
            return new
        text = self._open_spaces + new
        tail = None if is_end else _OPEN_SPACES.search(text)
        certain = text[: tail.start()] if tail else text
        self._open_spaces = text[len(certain) :]
        return self._tokenizer.clean_up_tokenization(certain)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _byte_of(tokenizer: Any, token_id: int) -> int | None:
    token = tokenizer.convert_ids_to_tokens(token_id)
    match = _BYTE_TOKEN.fullmatch(token) if isinstance(token, str) else None
    return int(match[1], 16) if match else None


@functools.lru_cache(maxsize=8)  # some have thousands of special tokens, and requests are many
def _habits(tokenizer: Any) -> tuple[frozenset[int], bool]:
    """The ids that it leaves out, and whether it cleans up spaces."""
    if getattr(tokenizer, "is_fast", False):
        added = tokenizer.added_tokens_decoder
        skipped = frozenset(token_id for token_id, token in added.items() if token.special)
    else:
        skipped = frozenset(tokenizer.all_special_ids)
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return skipped, False
    # some set it and don't do it, byte-level BPE since transformers 5
    probe = tokenizer.encode("a . b ? c ! d , e 's", add_special_tokens=False)
    plain, cleaned = (
        tokenizer.decode(probe, skip_special_tokens=True, **options)
        for options in ({"clean_up_tokenization_spaces": False}, {})
    )
    return skipped, plain != cleaned
