"""The routes, and what all of them share."""

import importlib
import importlib.util
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from stageline.serving.answer_models import (
    ChatCompletion,
    Completion,
    Health,
    ModelCard,
    ModelList,
)
from stageline.serving.chat_answers import answer_chat
from stageline.serving.chat_models import ChatRequest
from stageline.serving.completion_answers import answer_completion
from stageline.serving.completion_models import CompletionRequest
from stageline.serving.document import ASKING, READING, body_of, errors, make_document, stream_of
from stageline.serving.errors import add_error_handlers
from stageline.serving.gate import Gate
from stageline.serving.live import LiveResponse, Out
from stageline.serving.metrics import CONTENT_TYPE
from stageline.serving.service import Service


def make_app(service: Service) -> FastAPI:
    """The ASGI app of a service."""
    settings = service.settings
    # no /docs: its page would load scripts from elsewhere
    app = FastAPI(
        title="Stageline", version="1", docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.include_router(_asking(service))
    app.include_router(_reading(service))
    add_error_handlers(app)

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = make_document(
                app,
                [ChatRequest, CompletionRequest],
                model_name=settings.model_name,
                has_keys=bool(settings.api_keys),
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    app.add_middleware(
        Gate, api_keys=settings.api_keys, open_paths=_add_page(app), metrics=service.metrics
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


def _asking(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses={
            200: {"model": ChatCompletion, **stream_of("the answers, or their chunks")},
            **errors(*ASKING),
        },
        openapi_extra=body_of(ChatRequest),
    )
    async def chat_completions(request: Request) -> LiveResponse:
        """Answers a chat, OpenAI's way."""

        async def answer(asked: ChatRequest, out: Out) -> None:
            await answer_chat(service, asked, out)

        return await service.respond(request, ChatRequest, answer)

    @router.post(
        "/v1/completions",
        response_model=None,
        responses={
            200: {"model": Completion, **stream_of("the texts, or their chunks")},
            **errors(*ASKING),
        },
        openapi_extra=body_of(CompletionRequest),
    )
    async def completions(request: Request) -> LiveResponse:
        """Goes on with texts, OpenAI's way."""

        async def answer(asked: CompletionRequest, out: Out) -> None:
            await answer_completion(service, asked, out)

        return await service.respond(request, CompletionRequest, answer)

    return router


def _reading(service: Service) -> APIRouter:
    router = APIRouter()
    card = {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "stageline",
        "max_model_len": service.engine.max_length,
        "stageline": {
            "takes_images": service.takes_images,
            "max_length": service.engine.max_length,
        },
    }

    @router.get("/v1/models", response_model=ModelList, responses=errors(*READING))
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [card]}

    @router.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors(*READING))
    async def one_model(model: str) -> dict[str, Any]:
        """One model."""
        service.check_model(model)
        return card

    @router.get("/health", response_model=Health, responses=errors(500, 503))
    async def health() -> dict[str, Any]:
        """Whether requests can be answered."""
        service.desk.check_open()
        stats = service.engine.stats()
        return {"status": "ok", "running": stats.running, "queued": stats.queued}

    @router.get(
        "/metrics",
        response_model=None,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **errors(401, 500),
        },
        response_class=Response,
    )
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    return router


def _add_page(app: FastAPI) -> frozenset[str]:
    """The web page for chats; its paths, which are open to everybody."""
    if importlib.util.find_spec("stageline.serving.page") is None:
        return frozenset()
    page = importlib.import_module("stageline.serving.page")
    page.add_page(app)
    return page.PATHS
