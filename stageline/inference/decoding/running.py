"""A request that runs: its text so far, and what its listener was told.

Nothing that happens to one request ends another: a listener that raises, or a token that can't be
written, ends its own.
"""

import sys
import traceback
from typing import TYPE_CHECKING, Literal

from stageline.inference.decoding.order import Order, error_of, logprob_of_json
from stageline.inference.decoding.request import (
    EngineError,
    Failed,
    Finished,
    Listener,
    Piece,
    Request,
    TokenLogprob,
)
from stageline.inference.decoding.text import AnswerText

if TYPE_CHECKING:
    from stageline.inference.decoding.engine import DecodingEngine


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

    @classmethod
    def of(cls, request: Request, listener: Listener, *, engine: "DecodingEngine") -> "Running":
        sampling = request.sampling
        own = sampling.stop_token_ids
        stop_ids = engine.stop_ids if own is None else own
        return cls(request, listener, AnswerText(engine.tokenizer, sampling.stop, stop_ids))

    @property
    def key(self) -> str:
        return self.request.key

    def row_ids(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.request.prompt["input_ids"][0].tolist() + self.text.token_ids

    def take_from(self, order: Order, place: int) -> None:
        """What a pass has brought: a token, or an error."""
        error = error_of(order, place)
        try:
            if not self.is_cancelled and error is None:
                logprob = logprob_of_json(order.logprobs[place]) if order.logprobs else None
                self.take(order.tokens[place], logprob, is_last=place in order.over)
            if self.is_cancelled and not self.is_over:
                self.finish("cancelled")
        except Exception as found:
            traceback.print_exc(file=sys.stderr)
            error = EngineError(f"token {self.num_tokens} of the answer can't be written: {found}")
        if error is not None and not self.is_over:
            self.fail(error)

    def take(self, token_id: int, logprob: TokenLogprob | None, *, is_last: bool = False) -> None:
        """One more token.

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
            self._call(Piece(self.key, text, ids, logprobs))

    def finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        """Tells the rest and the end."""
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

    def _call(self, event: Piece | Finished | Failed) -> None:
        if self._is_deaf:
            return
        try:
            self.listener(event)
        except Exception:  # nobody listens any more: the answer ends with the next token
            traceback.print_exc(file=sys.stderr)
            self._is_deaf = self.is_cancelled = True

    def fail(self, error: Exception) -> None:
        """Tells that there is no answer."""
        self.is_over = True
        self._call(Failed(self.key, error))
