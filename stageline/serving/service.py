"""Service behind all routes: the model's name, threads for prompts, events of a request."""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from transformers.convert_slow_tokenizer import bytes_to_unicode

from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.answer import GrowingText
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.request import Request, Sampling, Scored, TokenLogprob
from stageline.serving.api_models import ChatRequest, CompletionRequest
from stageline.serving.errors import ApiError, ClientGone, bad_request
from stageline.serving.prompts import Prompt, PromptMaker
from stageline.serving.request_queue import Metrics, RequestQueue
from stageline.serving.settings import ServerSettings

_SEEDS = 2**63
SECONDS_TO_SAY_GOODBYE = 5.0
LEAST = -9999.0  # JSON has no infinity; OpenAI writes this
# byte-level tokenizers write such a letter for each byte
_BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not wait for more
]


class ResponseStream(Response):
    """An answer that some work writes, whole or event by event.

    Who goes away ends the work, also while it waits in a queue. What takes too long ends, too. An
    error before the first byte has its own status; after that it is an event.
    """

    def __init__(
        self, work: Callable[["ResponseStream"], Awaitable[None]], *, seconds: float
    ) -> None:
        super().__init__()
        self.work = work
        self.seconds = seconds
        self._is_started = False  # a status was sent, so there can be no other
        self._is_stream = False

    async def whole(self, body: dict[str, Any]) -> None:
        """Send the answer in one."""
        self._is_started = True
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
        if not self._is_started:
            self._is_started = self._is_stream = True
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await self._send(start)
        body = f"data: {data}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; an ApiError is raised only where nothing was sent yet."""
        self._scope, self._receive, self._send = scope, receive, send
        try:
            async with asyncio.timeout(self.seconds):
                await while_listening(receive, self.work(self))
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
        if not self._is_started:
            raise error
        with contextlib.suppress(TimeoutError):  # the client may not read
            async with asyncio.timeout(SECONDS_TO_SAY_GOODBYE):
                if self._is_stream:
                    await self.event(error.body)
                    await self.end_stream()
                    return
        raise ClientGone


async def while_listening(receive: Receive, work: Awaitable[None]) -> None:
    """Do some work; cancel it and raise ClientGone if the client goes away."""

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
    """The server without HTTP."""

    def __init__(
        self, engine: DecodingEngine, prompts: PromptMaker, settings: ServerSettings
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self.settings = settings
        self.metrics = Metrics(engine.stats)
        self.queue = RequestQueue(engine, max_queue=settings.max_queue, metrics=self.metrics)
        self.texts = TokenTexts(engine.processor)
        # the base and those with an adapter, by its number
        self.model_names = (settings.model_name, *settings.adapters)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="prompts")

    def respond(self, write: Callable[..., Awaitable[None]], asked: Any) -> ResponseStream:
        """Return the response that `write(service, asked, stream)` writes to a request."""
        self.queue.check_open()
        if asked.model is not None:  # only some need one
            self.check_model(asked.model)
        work = functools.partial(write, self, asked)
        return ResponseStream(work, seconds=self.settings.request_timeout)

    async def in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that takes long away from the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def check_model(self, name: str) -> int:
        """Return the number of a model's adapter, or raise an ApiError: it is not served."""
        if name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            message = f"The model {name[:200]!r} is not served here; {served} is."
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.model_names.index(name)

    def sampling(self, asked: ChatRequest | CompletionRequest) -> Sampling:
        """Return how the answers of a request are sampled, all but their length."""
        if (asked.n or 1) > self.settings.max_n:
            raise bad_request(f"n is {asked.n}; at most {self.settings.max_n} is taken.", param="n")
        if asked.stream_options is not None and not asked.stream:
            raise bad_request("stream_options requires stream. Set it too.", "stream_options")
        logprobs = asked.logprobs if isinstance(asked, CompletionRequest) else None
        if isinstance(asked, ChatRequest):
            if asked.top_logprobs is not None and not asked.logprobs:
                raise bad_request("top_logprobs requires logprobs. Set it too.", "top_logprobs")
            logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        bias = tuple((int(key), value) for key, value in (asked.logit_bias or {}).items())
        stop_ids = asked.stop_token_ids or []
        num_ids = self.prompts.num_ids
        for name, ids in (("logit_bias", [one for one, _ in bias]), ("stop_token_ids", stop_ids)):
            if too_large := [token_id for token_id in ids if token_id >= num_ids]:
                message = f"{name} has the token id {too_large[0]}; the model has {num_ids}."
                raise bad_request(message, name)
        own = () if asked.ignore_eos else self.engine.stop_ids
        ends = tuple(dict.fromkeys([*own, *stop_ids])) if asked.ignore_eos or stop_ids else None
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        temperature = asked.temperature
        return Sampling(
            temperature=self.settings.default_temperature if temperature is None else temperature,
            top_k=max(asked.top_k or 0, 0),  # -1, as vLLM has it: all
            top_p=1.0 if asked.top_p is None else asked.top_p,
            min_p=asked.min_p or 0.0,
            repetition_penalty=asked.repetition_penalty or 1.0,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=secrets.randbelow(_SEEDS) if asked.seed is None else asked.seed % _SEEDS,
            stop=tuple(dict.fromkeys(stop)),
            stop_token_ids=ends,
            min_new_tokens=asked.min_tokens or 0,
            logprobs=logprobs,
        )

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
        limit, most = self.settings.max_tokens, self.engine.max_length
        wanted = default if asked is None else asked
        if sampling.min_new_tokens > wanted:
            least = sampling.min_new_tokens
            message = f"min_tokens is {least}, more than the answer may have. Raise {field}, too."
            raise bad_request(message, "min_tokens")
        if asked is not None and asked > limit:
            raise bad_request(f"{field} is {asked}; at most {limit} is taken.", param=field)
        num_prompt_tokens = int(prompt["input_ids"].shape[1])
        room = limit if most is None else most - num_prompt_tokens
        if most is not None and room < (asked or 1):
            asked_text = f" and {asked} tokens of answer were asked for" if asked else ""
            raise bad_request(
                f"The prompt has {num_prompt_tokens} tokens{asked_text}; the model has {most} "
                "positions for both. Shorten the prompt, or ask for less.",
                "messages" if asked is None else field,
                "context_length_exceeded",
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
        self,
        logprobs: Sequence[TokenLogprob],
        *,
        offset: int,
        num_top: int,
        as_ids: bool | None = False,
    ) -> dict[str, Any]:
        """Return log-probabilities as completions have them.

        Args:
            offset: characters of the text before the first of them.
            num_top: 0: no likeliest tokens were asked for.
            as_ids: write tokens as `token_id:7`, as vLLM does; texts may be equal.
        """
        texts = [self.text(one.token_id) for one in logprobs]
        offsets = itertools.accumulate(map(len, texts), initial=offset)
        name = "token_id:{}".format if as_ids else self.text
        return {
            "tokens": [name(one.token_id) for one in logprobs],
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [_tops(one, name) for one in logprobs] if num_top else None,
            "text_offset": list(offsets)[:-1],
        }

    def prompt(
        self,
        ids: Sequence[int],
        scored: Scored | None,
        *,
        text: str,
        num_top: int,
        as_ids: bool | None = False,
    ) -> dict[str, Any]:
        """Return those of a prompt; nothing is known of its first token.

        Args:
            scored: of all tokens but the first; None: there is but one.
            text: in which special tokens take no room.
        """
        growing = GrowingText(self.tokenizer)
        lengths = itertools.accumulate((len(growing.add(one)) for one in ids), initial=0)
        values = scored.logprobs if scored else ()
        tops = scored.tops if scored and num_top else ((),) * len(values)
        rest = map(TokenLogprob, ids[1:], values, tops)
        made = self.plain(list(rest), offset=0, num_top=num_top, as_ids=as_ids)
        first = f"token_id:{ids[0]}" if as_ids else self.text(ids[0])
        return {
            "tokens": [first, *made["tokens"]],
            "token_logprobs": [None, *made["token_logprobs"]],
            "top_logprobs": [None, *made["top_logprobs"]] if num_top else None,
            "text_offset": [min(one, len(text)) for one in lengths][:-1],
        }

    def _read(self, token_id: int) -> tuple[str, list[int] | None]:
        text = self.tokenizer.decode([token_id])
        if "\ufffd" not in text:
            return text, list(text.encode())
        letters = self.tokenizer.convert_ids_to_tokens(token_id) or ""
        known = [_BYTE_OF_LETTER[letter] for letter in letters if letter in _BYTE_OF_LETTER]
        return text, known if len(known) == len(letters) else None


def _tops(one: TokenLogprob, name: Callable[[int], str]) -> dict[str, float]:
    """The likeliest tokens and the one that is there; of equal texts the likelier counts."""
    found: dict[str, float] = {}
    for token_id, value in (*one.top, (one.token_id, one.logprob)):
        found.setdefault(name(token_id), _finite(value))
    return found


def _finite(value: float) -> float:
    return max(float(value), LEAST)
