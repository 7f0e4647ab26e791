"""Log-probabilities of an answer in OpenAI's two shapes; single tokens as text and as bytes."""

import functools
from collections.abc import Sequence
from typing import Any

from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.answer import GrowingText
from stageline.inference.decoding.request import Scored, TokenLogprob

LEAST = -9999.0  # JSON has no infinity; OpenAI writes this
_UNKNOWN = "\ufffd"


class TokenTexts:
    """Texts of tokens of one processor."""

    def __init__(self, processor: Any) -> None:
        self.tokenizer = get_tokenizer(processor)
        self._of = functools.lru_cache(maxsize=65536)(self._read)

    def text(self, token_id: int) -> str:
        """A token as text; unfinished characters are replaced."""
        return self._of(token_id)[0]

    def chat(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """As chats have them."""
        return [
            {
                **self._entry(one.token_id, one.logprob),
                "top_logprobs": [self._entry(*pair) for pair in one.top],
            }
            for one in logprobs
        ]

    def plain(
        self, logprobs: Sequence[TokenLogprob], *, offset: int, num_top: int
    ) -> dict[str, Any]:
        """As completions have them.

        Args:
            offset: characters of the text before the first of them.
            num_top: 0: no likeliest tokens were asked for.
        """
        texts = [self.text(one.token_id) for one in logprobs]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [self._tops(one) for one in logprobs] if num_top else None,
            "text_offset": offsets,
        }

    def prompt(
        self, ids: Sequence[int], scored: Scored | None, *, text: str, num_top: int
    ) -> dict[str, Any]:
        """As completions have those of a prompt, of whose first token nothing is known.

        Args:
            scored: of all tokens but the first; None: there is but one.
            text: in which special tokens take no room.
        """
        growing, length, offsets = GrowingText(self.tokenizer), 0, []
        for token_id in ids:
            offsets.append(min(length, len(text)))
            length += len(growing.add(token_id))
        values = scored.logprobs if scored else ()
        tops = scored.tops if scored and num_top else ((),) * len(values)
        rest = [
            TokenLogprob(token_id, value, top)
            for token_id, value, top in zip(ids[1:], values, tops, strict=True)
        ]
        return {
            "tokens": [self.text(token_id) for token_id in ids],
            "token_logprobs": [None, *(_finite(one.logprob) for one in rest)],
            "top_logprobs": [None, *map(self._tops, rest)] if num_top else None,
            "text_offset": offsets,
        }

    def _tops(self, one: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the one that is there; of equal texts the likelier counts."""
        found: dict[str, float] = {}
        for token_id, value in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self.text(token_id), _finite(value))
        return found

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, content = self._of(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": content}

    def _read(self, token_id: int) -> tuple[str, list[int] | None]:
        text = self.tokenizer.decode([token_id])
        if _UNKNOWN not in text:
            return text, list(text.encode())
        letters = self.tokenizer.convert_ids_to_tokens(token_id) or ""
        content = [_byte_of_letter().get(letter) for letter in letters]
        known = [byte for byte in content if byte is not None]
        return text, known if len(known) == len(content) else None


def _finite(value: float) -> float:
    return max(float(value), LEAST)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """What byte-level tokenizers write for each byte: itself, or a letter from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
