"""The OpenAPI document: bodies as strict as they are read, and every status that comes."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from stageline.serving.answer_models import ErrorBody

_REFS = "#/components/schemas/{model}"
_STATUSES = {
    400: "the request can't be answered as it is",
    401: "the API key is missing or wrong",
    404: "there is no such model or address",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is no JSON",
    429: "too many answers are under way: ask again later",
    500: "the server has failed",
    503: "the server can't answer now: ask again later",
    504: "the answer took too long",
}
READING = (401, 404, 500)
ASKING = tuple(_STATUSES)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may fail so."""
    return {status: {"model": ErrorBody, "description": _STATUSES[status]} for status in statuses}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route's document says of its body; the route itself reads it with limits."""
    content = {"application/json": {"schema": {"$ref": _REFS.format(model=model.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def stream_of(description: str) -> dict[str, Any]:
    """What a route's document says of its other answer, a stream: the schema of one event."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    return {"description": description, "content": {"text/event-stream": {"schema": event}}}


def make_document(
    app: FastAPI, models: list[type[BaseModel]], *, model_name: str, has_keys: bool
) -> dict[str, Any]:
    """The document of an app.

    Args:
        models: of the bodies that routes read by themselves; they have a field `model`.
        model_name: the only one that is served.
        has_keys: requests need a key.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in models:
        schema = model.model_json_schema(ref_template=_REFS)
        schemas |= schema.pop("$defs", {})
        schema["properties"]["model"] = {"type": "string", "enum": [model_name]}
        schemas[model.__name__] = schema
    if has_keys:
        scheme = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"key": scheme}
        for path, methods in document["paths"].items():
            for operation in methods.values():
                operation["security"] = [] if path == "/health" else [{"key": []}]
    return document
