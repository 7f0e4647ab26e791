"""What all routes share: the model's name, threads for prompts, from a request to its events."""

import asyncio
import contextlib
import functools
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from transformers.convert_slow_tokenizer import bytes_to_unicode

from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.answer import GrowingText
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.request import (
    AnswerPiece,
    Cancelled,
    Failed,
    Finished,
    Request,
    Sampling,
    Scored,
    ScoreRequest,
    TokenLogprob,
)
from stageline.serving.errors import ApiError, ClientGone, bad_request, of_engine
from stageline.serving.prompts import Prompt, PromptMaker
from stageline.serving.request_queue import Metrics, RequestQueue, Reservation
from stageline.serving.settings import ServerSettings

SECONDS_TO_SAY_GOODBYE = 5.0
LEAST = -9999.0  # JSON has no infinity; OpenAI writes this
_NUM_THREADS = 2
_UNKNOWN = "\ufffd"
# what byte-level tokenizers write for each byte
_BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not wait for more
]


class ResponseStream:
    """Where an answer is written: whole, or as events.

    Attributes:
        is_started: a status was sent, so there can be no other.
        is_stream: errors can be events.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.is_started = False
        self.is_stream = False

    async def whole(self, body: dict[str, Any]) -> None:
        """Send the answer in one."""
        self.is_started = True
        await JSONResponse(body)(self._scope, self._receive, self._send)

    async def event(self, body: dict[str, Any]) -> None:
        """Send an event of a stream."""
        # ASCII: some clients end lines at signs that only Unicode takes for line ends
        await self._write(json.dumps(body, separators=(",", ":")))

    async def end_stream(self) -> None:
        """Send what ends a stream."""
        await self._write("[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: str) -> None:
        if not self.is_started:
            self.is_started = self.is_stream = True
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await self._send(start)
        body = f"data: {data}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


class LiveResponse(Response):
    """Runs some work that writes the answer, whole or event by event.

    Who goes away ends the work, also while it waits in a queue. What takes too long ends, too. An
    error before the first byte has its own status; after that it is an event.

    Args:
        work: writes the answer.
        seconds: for all of it.
    """

    def __init__(
        self, work: Callable[[ResponseStream], Awaitable[None]], *, seconds: float
    ) -> None:
        super().__init__()
        self.work = work
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; an ApiError is raised only where nothing was sent yet."""
        out = ResponseStream(scope, receive, send)
        try:
            async with asyncio.timeout(self.seconds):
                await while_listening(receive, self.work(out))
            return
        except TimeoutError:
            error = ApiError(
                504,
                f"The answer was not done within {self.seconds:g} s, which is the server's limit. "
                "Ask for less.",
                code="timeout",
                headers={"x-should-retry": "false"},  # it would take as long again
            )
        except ApiError as caught:
            error = caught
        if not out.is_started:
            raise error
        with contextlib.suppress(TimeoutError):  # nobody reads
            async with asyncio.timeout(SECONDS_TO_SAY_GOODBYE):
                if out.is_stream:
                    await out.event(error.body)
                    await out.end_stream()
                    return
        raise ClientGone


async def while_listening(receive: Receive, work: Awaitable[None]) -> None:
    """Do some work unless the client goes away.

    Raises:
        ClientGone: it has; the work was cancelled.
    """

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    task.result()


class Service:
    """The server without HTTP.

    Args:
        prompts: makes prompts of what clients send.
    """

    def __init__(
        self, engine: DecodingEngine, prompts: PromptMaker, settings: ServerSettings
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self.settings = settings
        self.metrics = Metrics(engine.stats)
        self.queue = RequestQueue(engine, max_queue=settings.max_queue, metrics=self.metrics)
        self.texts = TokenTexts(engine.processor)
        self.created = int(time.time())
        # the base and those with an adapter, by its number
        self.model_names = (settings.model_name, *settings.adapters)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompts")

    @property
    def tokens(self) -> dict[str, Any]:
        """The number of token ids, and those that end an answer."""
        return {"num_ids": self.prompts.num_ids, "stop_ids": self.engine.stop_ids}

    def respond(self, write: Callable[..., Awaitable[None]], asked: Any) -> LiveResponse:
        """Return the response that `write(service, asked, stream)` writes to a request."""
        self.queue.check_open()
        if asked.model is not None:  # only some need one
            self.check_model(asked.model)
        work = functools.partial(write, self, asked)
        return LiveResponse(work, seconds=self.settings.request_seconds)

    async def in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that takes long away from the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def check_model(self, name: str) -> int:
        """Return the number of a model's adapter, or raise an ApiError: it is not served."""
        if name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; {served} is.",
                param="model",
                code="model_not_found",
            )
        return self.model_names.index(name)

    def fitted(
        self, prompt: Prompt, sampling: Sampling, asked: int | None, *, default: int, field: str
    ) -> Sampling:
        """Return the sampling with as many tokens as asked for, or the default if there is room.

        Args:
            asked: None: nothing was.
            field: what the request calls it.

        Raises:
            ApiError: both numbers, where prompt and answer are too long together.
        """
        limit, most = self.settings.max_tokens_limit, self.engine.max_length
        wanted = default if asked is None else asked
        if sampling.min_new_tokens > wanted:
            raise bad_request(
                f"min_tokens is {sampling.min_new_tokens}, more than the answer may have "
                f"({wanted}); raise {field}, too.",
                param="min_tokens",
            )
        if asked is not None and asked > limit:
            raise bad_request(f"{field} is {asked}; at most {limit} is taken.", param=field)
        num_prompt_tokens = int(prompt["input_ids"].shape[1])
        room = limit if most is None else most - num_prompt_tokens
        if most is not None and room < (asked or 1):
            asked_text = f" and {asked} tokens of answer were asked for" if asked else ""
            raise bad_request(
                f"The prompt has {num_prompt_tokens} tokens{asked_text}; the model has {most} "
                "positions for both. Shorten the prompt, or ask for less.",
                param="messages" if asked is None else field,
                code="context_length_exceeded",
            )
        return replace(sampling, max_new_tokens=asked or min(default, limit, room))


def copies(prompt: Prompt, sampling: Sampling, count: int, *, number: int = 0) -> list[Request]:
    """Return requests for some answers to one prompt, each with a seed of its own.

    The first answer to the first prompt has the request's seed. A hash keeps neighbouring seeds
    from sharing answers, as sums would.

    Args:
        number: of the prompt in its request.
    """
    made = []
    for place in range(count):
        seed = sampling.seed
        if number or place:
            text = f"{seed} {number} {place}".encode()
            digest = hashlib.blake2b(text, digest_size=8).digest()
            seed = int.from_bytes(digest, "little") % 2**63
        made.append(Request("answer", prompt, replace(sampling, seed=seed)))
    return made


async def good_events(
    place: Reservation, requests: Sequence[Request | ScoreRequest]
) -> AsyncIterator[tuple[int, AnswerPiece | Finished | Scored]]:
    """Yield the events of a place; raise an ApiError where an answer failed or was cancelled."""
    async for number, event in place.events(requests):
        if isinstance(event, Failed):
            raise of_engine(event.error)
        if isinstance(event, Finished) and event.reason == "cancelled":
            raise of_engine(Cancelled())
        yield number, event


class TokenTexts:
    """Texts of tokens of one processor."""

    def __init__(self, processor: Any) -> None:
        self.tokenizer = get_tokenizer(processor)
        self._of = functools.lru_cache(maxsize=65536)(self._read)

    def text(self, token_id: int) -> str:
        """Return a token as text; unfinished characters are replaced."""
        return self._of(token_id)[0]

    def chat(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Return log-probabilities as chats have them."""

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            text, content = self._of(token_id)
            return {"token": text, "logprob": _finite(logprob), "bytes": content}

        return [
            {
                **entry(one.token_id, one.logprob),
                "top_logprobs": [entry(*pair) for pair in one.top],
            }
            for one in logprobs
        ]

    def plain(
        self, logprobs: Sequence[TokenLogprob], *, offset: int, num_top: int
    ) -> dict[str, Any]:
        """Return log-probabilities as completions have them.

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
        """Return those of a prompt; nothing is known of its first token.

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

    def _read(self, token_id: int) -> tuple[str, list[int] | None]:
        text = self.tokenizer.decode([token_id])
        if _UNKNOWN not in text:
            return text, list(text.encode())
        letters = self.tokenizer.convert_ids_to_tokens(token_id) or ""
        known = [_BYTE_OF_LETTER[letter] for letter in letters if letter in _BYTE_OF_LETTER]
        return text, known if len(known) == len(letters) else None


def _finite(value: float) -> float:
    return max(float(value), LEAST)
