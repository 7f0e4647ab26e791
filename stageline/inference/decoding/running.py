"""A request that runs: its text so far, and what its listener was told."""

from typing import TYPE_CHECKING, Literal

from stageline.inference.decoding.request import (
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
    """

    def __init__(self, request: Request, listener: Listener, text: AnswerText) -> None:
        self.request = request
        self.listener = listener
        self.text = text
        self.last_token = 0
        self.is_cancelled = self.is_over = False
        self._num_tokens = 0
        self._logprobs: list[TokenLogprob] = []
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

    def take(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """One more token."""
        self.last_token = token_id
        self._num_tokens += 1
        text = self.text.add(token_id)
        if logprob is not None and len(self.text.token_ids) > len(self._logprobs):
            self._logprobs.append(logprob)
        if self.text.is_stopped:
            self._tell(text)
            self.finish("stop")
        elif self._num_tokens >= self.request.sampling.max_new_tokens:
            self._tell(text)
            self.finish("length")
        elif text:
            self._tell(text)

    def _tell(self, text: str) -> None:
        ids = tuple(self.text.token_ids[self._num_told :])
        if text or ids:
            logprobs = tuple(self._logprobs[self._num_told :])
            self._num_told = len(self.text.token_ids)
            self.listener(Piece(self.key, text, ids, logprobs))

    def finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        """Tells the rest and the end."""
        self._tell(self.text.finish())
        self.is_over = True
        self.listener(
            Finished(
                key=self.key,
                reason=reason,
                prompt_tokens=self.request.prompt["input_ids"].shape[1],
                completion_tokens=self._num_tokens,
                text=self.text.text,
                token_ids=tuple(self.text.token_ids),
                stopped_by=self.text.stopped_by,
                logprobs=tuple(self._logprobs),
            )
        )

    def fail(self, error: Exception) -> None:
        """Tells that there is no answer."""
        self.is_over = True
        self.listener(Failed(self.key, error))
