"""A chat server on a free port of this machine, in front of a fake engine or a true one."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stageline.inference.decoding.engine import DecodingEngine
from stageline.serving.app import http_server, make_app
from stageline.serving.prompts import PromptMaker
from stageline.serving.service import Service
from stageline.serving.settings import ServerSettings


@dataclass(frozen=True)
class Served:
    """A server that runs.

    Attributes:
        url: without /v1.
    """

    url: str
    service: Service
    app: Any


@contextlib.contextmanager
def served(
    engine: DecodingEngine,
    *,
    render: Callable[..., Any],
    image_token: Callable[..., Any],
    max_pixels: int = 1_000_000,
    listening: Mapping[str, Any] = {},
    **settings: Any,
) -> Iterator[Served]:
    """Serves while the context lasts.

    Args:
        render, image_token: parts of prompt_fn and image_token.
        listening: options of uvicorn.
        settings: of `ServerSettings`; the model is called tiny.
    """
    chosen = ServerSettings(**{"model_name": "tiny", **settings})
    prompts = PromptMaker(
        engine.processor,
        render=render,
        image_token=image_token,
        max_length=engine.max_length,
        max_images=chosen.max_images,
        max_pixels=max_pixels,
    )
    prompts.warm_up()
    service = Service(engine, prompts, chosen)
    app = make_app(service)
    with http_server(app, "127.0.0.1", 0, **listening) as url:
        yield Served(url, service, app)
