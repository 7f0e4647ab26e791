"""Requests in progress: the text of an answer so far, rows to be scored, and their listeners.

Nothing that happens to one request ends another: a listener that raises, or a token that can't be
written, ends its own.
"""

import functools
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from torch import Tensor

from stageline.errors import UserError
from stageline.inference.decoding.request import (
    AnswerPiece,
    Cancelled,
    EngineError,
    Failed,
    Finished,
    Listener,
    PassOrder,
    Request,
    Scored,
    ScoreRequest,
    TokenLogprob,
    adapters_of,
    error_of,
    is_alone,
    length_of,
    part_of,
    together,
)
from stageline.inference.decoding.scheduler import Limits

ScoreListener = Callable[[Scored | Failed], None]
_Row = tuple[ScoreRequest, ScoreListener]
MOST_SCORED = 2048  # tokens of a pass over rows to be scored: each may bring its logits

# Decodes an answer token by token, in time linear in its length.
# All that is given out together is, to the character, what the tokenizer makes of all tokens at
# once. Only a window of the last tokens is decoded. What counts is what its text grows by: so the
# window may begin inside a character, or with a token that the tokenizer writes in a way of its
# own.

# a decoder writes this for bytes that are not, or not yet, a character
REPLACEMENT = "\ufffd"
# a longer window is cut to the shorter length, which always contains a whole character
_LONGEST_WINDOW = 24
_SHORT_WINDOW = 8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class GrowingText:
    """The text of tokens that come one by one, without special tokens.

    Spaces before punctuation are not cleaned up, as some tokenizers of word pieces do.

    Attributes:
        last_byte: the byte that the last token stands for, with tokenizers that fall back to bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.last_byte: int | None = None
        self._tokenizer = tokenizer
        self._skipped = _special_ids(tokenizer)
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text

    def add(self, token_id: int) -> str:
        """Take a token; return the text that no later token can change."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        match = _BYTE_TOKEN.fullmatch(token) if isinstance(token, str) else None
        self.last_byte = int(match[1], 16) if match else None
        if self.last_byte is not None:
            # a byte decoder writes a run of bytes as characters only if the whole run is valid
            return ""
        text = self.whole(self._window)
        num_certain = len(text) - text.endswith(REPLACEMENT)
        new = text[self._num_given : num_certain]
        self._num_given = max(self._num_given, num_certain)
        if len(self._window) > _LONGEST_WINDOW:
            num_uncertain = len(text) - self._num_given
            end = self.whole(self._window[-_SHORT_WINDOW:])
            # an empty text hasn't begun: its next token would be written as a first one
            if len(end) > num_uncertain:
                self._window = self._window[-_SHORT_WINDOW:]
                self._num_given = len(end) - num_uncertain
        return new

    def rest(self) -> str:
        """Return the end of the text if no further token follows; may be called again."""
        return self.whole(self._window)[self._num_given :]

    def whole(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that are all there."""
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@functools.lru_cache(maxsize=8)  # some have thousands of special tokens, and requests are many
def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that it leaves out."""
    if getattr(tokenizer, "is_fast", False):
        added = tokenizer.added_tokens_decoder
        return frozenset(token_id for token_id, token in added.items() if token.special)
    return frozenset(tokenizer.all_special_ids)


class AnswerText:
    """Text and tokens of one answer.

    The pieces that `add` and `finish` return make up `text`: the tokenizer's text of
    `token_ids`, up to the stop string if there is one. If several stop strings match, the one that
    is complete first counts, and the longer of two that end at the same character.

    Args:
        grows: `add` returns the text so far; False, without stop strings: `finish` returns all.

    Attributes:
        token_ids: without the stop token; includes the tokens of a stop string.
        is_stopped: a stop token or a stop string came: no token may be added any more.
        stopped_by: it, if so.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Collection[str],
        stop_token_ids: Collection[int],
        *,
        grows: bool = True,
    ) -> None:
        self._grows = grows or bool(stop)
        self.token_ids: list[int] = []
        self.is_stopped = False
        self.stopped_by: str | int | None = None
        added = getattr(tokenizer, "added_tokens_decoder", {})  # its special ones make no text
        special = [one for one, token in added.items() if token.special and token.content in stop]
        self._stop_token_ids = frozenset([*stop_token_ids, *special])
        self._stop = tuple(stop)
        self._stop_ends = {text.encode()[-1] for text in stop}
        self._growing = GrowingText(tokenizer)
        self._pieces: list[str] = []
        self._held = ""  # the beginning of a stop string, perhaps
        self._is_finished = False

    @property
    def text(self) -> str:
        """The text that was returned so far."""
        return "".join(self._pieces)

    def add(self, token_id: int) -> str:
        """Takes a token; returns the text that may be written now."""
        assert not self.is_stopped, "a token came after the answer's end"
        if token_id in self._stop_token_ids:
            self.is_stopped, self.stopped_by = True, token_id
            return ""
        self.token_ids.append(token_id)
        if not self._grows:
            return ""
        piece = self._release(self._growing.add(token_id), is_end=False)
        if not self.is_stopped and self._growing.last_byte in self._stop_ends:
            # the byte's text is not certain yet; but a stop string in it makes it the end
            rest = self._growing.rest()
            if REPLACEMENT not in rest and self._find_stop(self._held + rest):
                piece += self._release(rest, is_end=True)
        return piece

    def finish(self) -> str:
        """Return the rest of the text when no further token follows.

        It may end in a stop string, which becomes certain only now: ask `is_stopped` after it.
        """
        if self._is_finished or isinstance(self.stopped_by, str):
            return ""
        self._is_finished = True
        rest = self._growing.rest() if self._grows else self._growing.whole(self.token_ids)
        return self._release(rest, is_end=True)

    def _release(self, new: str, *, is_end: bool) -> str:
        text = self._held + new
        found = self._find_stop(text)
        if found is not None:
            self.is_stopped, self.stopped_by = True, found[1]
            certain, self._held = text[: found[0]], ""
        else:
            # the end may be the beginning of a stop string
            longest = 0 if is_end else max(map(len, self._stop), default=0) - 1
            counts = range(min(longest, len(text)), 0, -1)
            begun = (n for n in counts if any(stop.startswith(text[-n:]) for stop in self._stop))
            num_certain = len(text) - next(begun, 0)
            certain, self._held = text[:num_certain], text[num_certain:]
        if certain:
            self._pieces.append(certain)
        return certain

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Return the start of the stop string that is complete first, and that string."""
        places = [(text.find(stop), stop) for stop in self._stop]
        found = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
        return min(found)[1:] if found else None


class Running:
    """One request between `submit` and its end.

    Attributes:
        last_token: what its next step reads.
        is_cancelled: it ends when its pass is back.
        is_over: its listener has got the last event.
        num_tokens: of the answer, one that ends it included.
    """

    def __init__(self, request: Request, listener: Listener, text: AnswerText) -> None:
        self.request = request
        self.listener = listener
        self.text = text
        self.last_token = 0
        self.is_cancelled = self.is_over = False
        self.num_tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._stop_logprob: TokenLogprob | None = None
        self._is_deaf = False  # the listener raised
        self._num_told = 0  # tokens that went out with a piece

    @property
    def key(self) -> str:
        return self.request.key

    def row_ids(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.request.prompt["input_ids"][0].tolist() + self.text.token_ids

    def take_from(self, order: PassOrder, place: int) -> None:
        """Take the result of a pass: a token, or an error."""
        error = error_of(order, place)
        try:
            if not self.is_cancelled and error is None:
                logprob = order.logprobs[place] if order.logprobs else None
                self.take(order.tokens[place], logprob, is_last=place in order.over)
            if self.is_cancelled and not self.is_over:
                self.finish("cancelled")
        except Exception as found:
            traceback.print_exc(file=sys.stderr)
            error = EngineError(f"token {self.num_tokens} of the answer can't be written: {found}")
        if error is not None and not self.is_over:
            self.fail(error)

    def take(self, token_id: int, logprob: TokenLogprob | None, *, is_last: bool = False) -> None:
        """Take one more token of the answer.

        Args:
            is_last: the answer's grammar lets nothing follow it.
        """
        self.last_token = token_id
        self.num_tokens += 1
        text = self.text.add(token_id)
        if logprob is not None and len(self.text.token_ids) > len(self._logprobs):
            self._logprobs.append(logprob)
        elif self.text.is_stopped:
            self._stop_logprob = logprob
        if self.text.is_stopped or is_last:
            self._tell(text)
            self.finish("stop")
        elif self.num_tokens >= self.request.sampling.max_new_tokens:
            self._tell(text)
            self.finish("length")
        elif text:
            self._tell(text)

    def _tell(self, text: str) -> None:
        ids = tuple(self.text.token_ids[self._num_told :])
        if text or ids:
            logprobs = tuple(self._logprobs[self._num_told :])
            self._num_told = len(self.text.token_ids)
            self._call(AnswerPiece(self.key, text, ids, logprobs))

    def finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        """Send the listener the rest of the text and the end."""
        self._tell(self.text.finish())
        if reason == "length" and self.text.is_stopped:  # the rest ended in a stop string
            reason = "stop"
        self.is_over = True
        self._call(
            Finished(
                key=self.key,
                reason=reason,
                prompt_tokens=self.request.prompt["input_ids"].shape[1],
                completion_tokens=self.num_tokens,
                text=self.text.text,
                token_ids=tuple(self.text.token_ids),
                stopped_by=self.text.stopped_by,
                logprobs=tuple(self._logprobs),
                stop_logprob=self._stop_logprob,
            )
        )

    def _call(self, event: AnswerPiece | Finished | Failed) -> None:
        if self._is_deaf:
            return
        try:
            self.listener(event)
        except Exception:  # the listener is gone: the answer ends with the next token
            traceback.print_exc(file=sys.stderr)
            self._is_deaf = self.is_cancelled = True

    def fail(self, error: Exception) -> None:
        """Send the listener the error in the place of an answer."""
        self.is_over = True
        self._call(Failed(self.key, error))


def check_row(item: ScoreRequest, limits: Limits) -> None:
    """Refuse a row with too many tokens, or with no token before the first target."""
    length = length_of(item.prompt)
    if length > limits.max_length + 1:
        raise UserError(
            f"The row has {length} tokens; all but the last must fit the model's "
            f"{limits.max_length} positions. Shorten it."
        )
    if not 1 <= item.num_targets < length:
        raise UserError(
            f"{item.num_targets} of the row's {length} tokens should be scored, and a token is "
            f"scored by those before it. Score 1 to {length - 1}."
        )


class ScoreQueue:
    """Scores rows in their order, as many at a time as the tokens of a pass allow.

    Args:
        limits: of one pass, with padding; a row longer than `prefill_tokens` has its own pass.
        pads_right: as stages without a cache read their rows.
    """

    def __init__(self, limits: Limits, *, pads_right: bool = False) -> None:
        self.limits, self.pads_right = limits, pads_right
        self.waiting: deque[_Row] = deque()
        self._on_their_way: deque[list[_Row]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether something waits or is on its way."""
        return bool(self.waiting or self._on_their_way)

    @property
    def is_on_its_way(self) -> bool:
        """Whether the stages have a pass that has not come back."""
        return bool(self._on_their_way)

    def add(self, item: ScoreRequest, listener: ScoreListener) -> None:
        """Queue a row to be scored."""
        self.waiting.append((item, listener))

    def cancel(self, key: str) -> None:
        """Drop a row that still waits; one on its way is reported when its pass is back."""
        left = [row for row in self.waiting if row[0].key == key]
        self.waiting = deque(row for row in self.waiting if row[0].key != key)
        for _, listener in left:
            _tell(listener, Failed(key, Cancelled("the score was cancelled")))

    def fail_all(self, error: Exception) -> None:
        """Tell all listeners that there is no score."""
        rows = [row for rows in [*self._on_their_way, self.waiting] for row in rows]
        self._on_their_way.clear()
        self.waiting.clear()
        for item, listener in rows:
            _tell(listener, Failed(item.key, error))

    def next_order(self) -> tuple[PassOrder, dict[str, Tensor]]:
        """Return the next pass and its inputs."""
        rows: list[_Row] = []
        while self.waiting and self._goes_with(rows, self.waiting[0][0]):
            rows.append(self.waiting.popleft())
        self._on_their_way.append(rows)
        items = [item for item, _ in rows]
        order = PassOrder(
            "score",
            rows=list(range(len(items))),
            adapters=adapters_of(items),
            lengths=[length_of(item.prompt) - 1 for item in items],
            targets=[item.prompt["input_ids"][0, -item.num_targets :].tolist() for item in items],
            num_tops=[item.num_top for item in items],
        )
        # nothing follows the last token: a row may be one longer than the model has positions
        read = [part_of(item.prompt, range(length_of(item.prompt) - 1)) for item in items]
        return order, together(read, pads_right=self.pads_right)

    def _goes_with(self, rows: list[_Row], new: ScoreRequest) -> bool:
        if not rows:
            return True
        if is_alone(rows[0][0].prompt) or is_alone(new.prompt):
            return False
        lengths = [length_of(item.prompt) for item in [*(row[0] for row in rows), new]]
        if len({self.limits.is_long(length - 1) for length in lengths}) > 1:
            return False
        most = min(self.limits.prefill_tokens, MOST_SCORED)
        return max(lengths) * len(lengths) <= most

    def take(self, order: PassOrder) -> None:
        """Report the scores of the oldest pass, which is back."""
        for place, (item, listener) in enumerate(self._on_their_way.popleft()):
            if order.error is not None:
                _tell(listener, Failed(item.key, EngineError(order.error)))
                continue
            values, is_greedy, tops = order.scores[place]
            likeliest = tuple(tuple((int(i), value) for i, value in top) for top in tops)
            _tell(listener, Scored(item.key, tuple(values), is_greedy, likeliest))


def _tell(listener: ScoreListener, event: Scored | Failed) -> None:
    try:
        listener(event)
    except Exception:  # one listener failed; the others still get their scores
        traceback.print_exc(file=sys.stderr)
