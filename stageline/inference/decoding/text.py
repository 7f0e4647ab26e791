"""The text of an answer while its tokens come: what may be written now, and where it stops."""

from collections.abc import Collection
from typing import Any

from stageline.inference.decoding.growing_text import REPLACEMENT, GrowingText


class AnswerText:
    """Text and tokens of one answer.

    What `add` and `finish` return makes, put together, `text`: what the tokenizer makes of
    `token_ids`, up to the stop string if there is one. Of several stop strings that one counts
    which is complete first, of two complete at the same character the longer one.

    Attributes:
        token_ids: without the stop token; those that a stop string lies in are among them.
        is_stopped: a stop token or a stop string came: no token may be added any more.
        stopped_by: it, if so.
    """

    def __init__(
        self, tokenizer: Any, stop: Collection[str], stop_token_ids: Collection[int]
    ) -> None:
        self.token_ids: list[int] = []
        self.is_stopped = False
        self.stopped_by: str | int | None = None
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop = tuple(stop)
        self._stop_ends = {text.encode()[-1] for text in stop}
        self._growing = GrowingText(tokenizer)
        self._pieces: list[str] = []
        self._held = ""  # the beginning of a stop string, perhaps
        self._is_finished = False

    @property
    def text(self) -> str:
        """What was returned so far."""
        return "".join(self._pieces)

    def add(self, token_id: int) -> str:
        """Takes a token; returns the text that may be written now."""
        assert not self.is_stopped, "a token came after the answer's end"
        if token_id in self._stop_token_ids:
            self.is_stopped, self.stopped_by = True, token_id
            return ""
        self.token_ids.append(token_id)
        piece = self._release(self._growing.add(token_id), is_end=False)
        if not self.is_stopped and self._growing.last_byte in self._stop_ends:
            # the byte's text is not certain yet; but a stop string in it makes it the end
            rest = self._growing.rest()
            if REPLACEMENT not in rest and self._find_stop(self._held + rest):
                piece += self._release(rest, is_end=True)
        return piece

    def finish(self) -> str:
        """The rest of the text, once no token comes any more.

        It may end in a stop string, which becomes certain only now: ask `is_stopped` after it.
        """
        if self._is_finished or isinstance(self.stopped_by, str):
            return ""
        self._is_finished = True
        return self._release(self._growing.rest(), is_end=True)

    def _release(self, new: str, *, is_end: bool) -> str:
        text = self._held + new
        found = self._find_stop(text)
        if found is not None:
            self.is_stopped, self.stopped_by = True, found[1]
            certain, self._held = text[: found[0]], ""
        else:
            num_held = 0 if is_end else self._num_begun(text)
            certain, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        if certain:
            self._pieces.append(certain)
        return certain

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Where the stop string begins that is complete first, and which it is."""
        places = [(text.find(stop), stop) for stop in self._stop]
        found = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
        return min(found)[1:] if found else None

    def _num_begun(self, text: str) -> int:
        """How many characters of the end may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=0) - 1
        for count in range(min(longest, len(text)), 0, -1):
            end = text[-count:]
            if any(stop.startswith(end) for stop in self._stop):
                return count
        return 0
