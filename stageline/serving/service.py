"""What all routes share: the model's name, threads for prompts, from a request to its events."""

import asyncio
import functools
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
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
from stageline.serving.gate import (
    BodyReader,
    Model,
    check_content_type,
    drain,
    parse,
)
from stageline.serving.prompts import Prompt, PromptMaker
from stageline.serving.request_queue import ADAPTER, Metrics, RequestQueue, Reservation
from stageline.serving.settings import ServerSettings

SECONDS_TO_SAY_GOODBYE = 5.0
LEAST = -9999.0  # JSON has no infinity; OpenAI writes this
_UNKNOWN = "\ufffd"
# what byte-level tokenizers write for each byte
_BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not wait for more
]


class Out:
    """Where an answer goes.

    Attributes:
        is_started: a status was sent, so there can be no other.
        is_stream: errors can be events.
        forget: frees the body of the request.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, forget: Callable[[], None]
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.is_started = False
        self.is_stream = False
        self.forget = forget

    async def whole(self, body: dict[str, Any]) -> None:
        """Sends the answer in one."""
        self.is_started = True
        await JSONResponse(body)(self._scope, self._receive, self._send)

    async def event(self, body: dict[str, Any]) -> None:
        """Sends an event of a stream."""
        # ASCII: some clients end lines at signs that only Unicode takes for line ends
        await self._write(f"data: {json.dumps(body, separators=(',', ':'))}\n\n")

    async def end_stream(self) -> None:
        """Sends what ends a stream."""
        await self._write("data: [DONE]\n\n")
        await self.close()

    async def fail(self, error: ApiError) -> None:
        """Says in a stream that no more comes."""
        await self.event(error.body())
        await self.end_stream()

    async def close(self) -> None:
        """Nothing more is sent."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, text: str) -> None:
        if not self.is_started:
            self.is_started = self.is_stream = True
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})


class LiveResponse(Response):
    """Runs some work that writes the answer, whole or event by event.

    Who goes away ends the work, also while it waits in a queue. What takes too long ends, too. An
    error before the first byte has its own status; after that it is an event.

    Args:
        work: writes into an `Out`.
        seconds: for all of it.
        forget: frees the body of the request; called in any case.
    """

    def __init__(
        self,
        work: Callable[[Out], Awaitable[None]],
        *,
        seconds: float,
        forget: Callable[[], None],
    ) -> None:
        super().__init__()
        self.work = work
        self.seconds = seconds
        self.forget = forget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer; an ApiError is raised only where nothing was sent yet."""
        out = Out(scope, receive, send, self.forget)
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
        finally:
            self.forget()
        if not out.is_started:
            raise error
        if not out.is_stream:  # it was sent, and not read
            raise ClientGone
        try:
            async with asyncio.timeout(SECONDS_TO_SAY_GOODBYE):
                await out.fail(error)
        except TimeoutError:
            raise ClientGone from None


async def while_listening(receive: Receive, work: Awaitable[None]) -> None:
    """Does some work unless the client goes away.

    Raises:
        ClientGone: it has; the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    task.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_NUM_THREADS = 2
_LETTERS = 24
# of the fields of a request, while it is answered
_NEEDED = frozenset(["n", "stream", "stream_options", "logprobs", "parallel_tool_calls"])


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
        self.bodies = BodyReader(settings.max_body_bytes, seconds=settings.read_seconds)
        self.texts = TokenTexts(engine.processor)
        self.created = int(time.time())
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompts")

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold pictures."""
        return self.settings.max_images > 0 and self.prompts.takes_images

    @property
    def tokens(self) -> dict[str, Any]:
        """What requests may name: the number of token ids, and those that end an answer."""
        return {"num_ids": self.prompts.num_ids, "stop_ids": self.engine.stop_ids}

    async def respond(
        self,
        request: Any,
        model: type[Model],
        answer: Callable[[Model, Out], Any],
    ) -> LiveResponse:
        """Reads a request and answers it by `answer`, which writes what follows from the body."""
        try:
            self.queue.check_open()
            check_content_type(request)
        except ApiError:
            await drain(request)
            raise
        body = await self.bodies(request)

        async def work(out: Out) -> None:
            asked = parse(body.content, model)
            if (name := getattr(asked, "model", "")) is not None:  # only some need one
                ADAPTER.set(self.check_model(name))
            await answer(asked, out)

        seconds = self.settings.request_seconds
        return LiveResponse(work, seconds=seconds, forget=body.free)

    async def in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that takes long away from the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    @property
    def model_names(self) -> tuple[str, ...]:
        """The base and those with an adapter, by its number."""
        return (self.settings.model_name, *self.settings.adapters)

    def check_model(self, name: str) -> int:
        """The number of a model's adapter, or an ApiError: it is not served."""
        if name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; {served} is.",
                param="model",
                code="model_not_found",
            )
        return self.model_names.index(name)

    def head(self, kind: str, prefix: str) -> dict[str, Any]:
        """What all answers begin with."""
        return {
            "id": f"{prefix}-{secrets.token_hex(_LETTERS // 2)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model_names[ADAPTER.get()],
            "system_fingerprint": None,
        }

    def fitted(
        self, prompt: Prompt, sampling: Sampling, asked: int | None, *, default: int, field: str
    ) -> Sampling:
        """The sampling with as many tokens as were asked for, or the default where there is room.

        Args:
            asked: None: nothing was.
            field: what the request calls it.

        Raises:
            ApiError: both numbers, where prompt and answer are too long together.
        """
        limit, most = self.settings.max_tokens_limit, self.engine.max_length
        if sampling.min_new_tokens > (default if asked is None else asked):
            raise bad_request(
                f"min_tokens is {sampling.min_new_tokens}, more than the answer may have "
                f"({default if asked is None else asked}); raise {field}, too.",
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


def forget_large(asked: BaseModel, out: Out) -> None:
    """Lets go of what came with a request, once its prompts are made: answers take a while."""
    for name in type(asked).model_fields:
        if name not in _NEEDED:
            setattr(asked, name, None)
    out.forget()


def copies(prompt: Prompt, sampling: Sampling, count: int, *, number: int = 0) -> list[Request]:
    """Requests for some answers to one prompt, each with a seed of its own.

    Args:
        number: of the prompt in its request.
    """
    seeds = (answer_seed(sampling.seed, number, place) for place in range(count))
    return [Request("answer", prompt, replace(sampling, seed=seed)) for seed in seeds]


def answer_seed(seed: int, prompt: int, place: int) -> int:
    """The seed of answer `place` to prompt `prompt` of a request; that of the first is the seed.

    A hash keeps neighbouring seeds from sharing answers, as sums would.
    """
    if not (prompt or place):
        return seed
    digest = hashlib.blake2b(f"{seed} {prompt} {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63


async def good_events(
    place: Reservation, requests: Sequence[Request | ScoreRequest]
) -> AsyncIterator[tuple[int, AnswerPiece | Finished | Scored]]:
    """The events of a place; an ApiError where an answer failed or was cancelled."""
    async for number, event in place.events(requests):
        if isinstance(event, Failed):
            raise of_engine(event.error)
        if isinstance(event, Finished) and event.reason == "cancelled":
            raise of_engine(Cancelled())
        yield number, event


class UsageCount:
    """Tokens of one request; a prompt counts once, however many answers it gets.

    Attributes:
        prompts: number of the prompt -> its tokens.
    """

    def __init__(self) -> None:
        self.prompts: dict[int, int] = {}
        self.completion = 0

    def add(self, prompt: int, event: Finished) -> None:
        """An answer to prompt number `prompt` is done."""
        self.prompts[prompt] = event.prompt_tokens
        self.completion += event.completion_tokens

    def as_object(self) -> dict[str, int]:
        """As OpenAI has it."""
        prompt = sum(self.prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
        }


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
        known = [_BYTE_OF_LETTER[letter] for letter in letters if letter in _BYTE_OF_LETTER]
        return text, known if len(known) == len(letters) else None


def _finite(value: float) -> float:
    return max(float(value), LEAST)
