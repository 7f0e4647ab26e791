"""What all routes share: the model's name, threads for prompts, from a request to its events."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from stageline.inference.decoding.request import (
    Cancelled,
    Failed,
    Finished,
    Piece,
    Request,
    Sampling,
    Scored,
    ScoreRequest,
)
from stageline.serving.bodies import SMALL_BODY, BodyReader, Model, check_content_type, drain, parse
from stageline.serving.desk import Desk, Engine, Place
from stageline.serving.errors import ApiError, of_engine
from stageline.serving.live import LiveResponse, Out
from stageline.serving.metrics import Metrics
from stageline.serving.prompts import Prompt, PromptMaker
from stageline.serving.sampling import with_length
from stageline.serving.settings import ServerSettings
from stageline.serving.token_texts import TokenTexts

_NUM_THREADS = 2
_LETTERS = 24
# of the fields of a request, while it is answered
_NEEDED = frozenset(["n", "stream", "stream_options", "logprobs", "parallel_tool_calls"])


class Service:
    """The server without HTTP.

    Args:
        prompts: makes prompts of what clients send.
    """

    def __init__(self, engine: Engine, prompts: PromptMaker, settings: ServerSettings) -> None:
        self.engine = engine
        self.prompts = prompts
        self.settings = settings
        self.metrics = Metrics(engine.stats)
        self.desk = Desk(engine, max_queue=settings.max_queue, metrics=self.metrics)
        self.bodies = BodyReader(settings.max_body_bytes, seconds=settings.read_seconds)
        self.texts = TokenTexts(engine.processor)
        self.created = int(time.time())
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompts")

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold pictures."""
        return self.settings.max_images > 0 and self.prompts.takes_images

    async def respond(
        self, request: Any, model: type[Model], answer: Callable[[Model, Out], Any]
    ) -> LiveResponse:
        """Reads a request and answers it.

        Args:
            answer: writes what follows from the body.
        """
        try:
            self.desk.check_open()
            check_content_type(request)
        except ApiError:
            await drain(request)
            raise
        body = await self.bodies(request)

        async def work(out: Out) -> None:
            asked = await self._parsed(body.content, model)
            self.check_model(getattr(asked, "model", ""))
            await answer(asked, out)

        return LiveResponse(work, seconds=self.settings.request_seconds, forget=body.free)

    async def _parsed(self, body: bytes, model: type[Model]) -> Model:
        if len(body) <= SMALL_BODY:
            return parse(body, model)
        return await self.in_thread(parse, body, model)

    async def in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that takes long away from the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def check_model(self, name: str) -> None:
        """Refuses other models than the one that is served.

        Raises:
            ApiError: 404.
        """
        if name != self.settings.model_name:
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; {self.settings.model_name!r} is.",
                param="model",
                code="model_not_found",
            )

    def head(self, kind: str, prefix: str) -> dict[str, Any]:
        """What all answers begin with."""
        return {
            "id": f"{prefix}-{secrets.token_hex(_LETTERS // 2)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.settings.model_name,
            "system_fingerprint": None,
        }

    def fitted(
        self, prompt: Prompt, sampling: Sampling, asked: int | None, *, default: int, field: str
    ) -> Sampling:
        """The sampling with a length that has room behind the prompt; raises as `with_length`."""
        return with_length(
            sampling,
            asked,
            default=default,
            num_prompt_tokens=int(prompt["input_ids"].shape[1]),
            max_length=self.engine.max_length,
            limit=self.settings.max_tokens_limit,
            field=field,
        )


def forget_large(asked: BaseModel, out: Out) -> None:
    """Lets go of what came with a request, once its prompts are made: answers take a while."""
    for name in type(asked).model_fields:
        if name not in _NEEDED:
            setattr(asked, name, None)
    out.forget()


def copies(prompt: Prompt, sampling: Sampling, count: int) -> list[Request]:
    """Requests for some answers to one prompt, each with a seed of its own."""
    return [
        Request("answer", prompt, replace(sampling, seed=(sampling.seed + place) % 2**63))
        for place in range(count)
    ]


async def good_events(
    place: Place, requests: Sequence[Request | ScoreRequest]
) -> AsyncIterator[tuple[int, Piece | Finished | Scored]]:
    """The events of a place, as long as all is well.

    Raises:
        ApiError: an answer failed, or was cancelled.
    """
    async for number, event in place.events(requests):
        if isinstance(event, Failed):
            raise of_engine(event.error)
        if isinstance(event, Finished) and event.reason == "cancelled":
            raise of_engine(Cancelled())
        yield number, event


class UsageCount:
    """Tokens of one request; a prompt counts once, however many answers it gets."""

    def __init__(self) -> None:
        self.prompts: dict[int, int] = {}
        self.completion = 0

    def add(self, prompt: int, event: Finished) -> None:
        """An answer to prompt number `prompt` is done."""
        self.prompts[prompt] = event.prompt_tokens
        self.completion += event.completion_tokens

    def add_prompt(self, prompt: int, num_tokens: int) -> None:
        """A prompt is all there is."""
        self.prompts[prompt] = num_tokens

    def as_object(self) -> dict[str, int]:
        """As OpenAI has it."""
        prompt = sum(self.prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
        }
