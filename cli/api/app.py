"""The ASGI application: endpoints, error bodies, CORS, the journal, and an OpenAPI document of what is understood."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from .errors import ApiError
from .journal import Journal, Record
from .routes import REQUESTS, Endpoints
from .service import Service

Lifespan = Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]


def make_app(service: Service, lifespan: Lifespan) -> FastAPI:
    """The application that serves `service`; `lifespan` surrounds its life."""
    settings = service.settings
    app = FastAPI(
        title="llmctl",
        version=__version__,
        openapi_url=None,
        lifespan=lifespan,
    )
    app.include_router(Endpoints(service).router())
    app.add_route("/openapi.json", _document(app), include_in_schema=False)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(Journal, metrics=service.metrics)
    return app


def _document(app: FastAPI) -> Callable[[Request], Response]:
    """The endpoint that describes the others. Bodies are msgspec's, so their schemas are put in by hand."""
    _, components = msgspec.json.schema_components(list(REQUESTS.values()), ref_template="#/components/schemas/{name}")
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for path, kind in REQUESTS.items():
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    encoded = msgspec.json.encode(document)

    def openapi(http: Request) -> Response:
        return Response(encoded, media_type="application/json")

    return openapi


async def _api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    record: Record = http.state.record
    record.error = error.code or error.message
    return error.response()


async def _http_error(http: Request, error: Exception) -> Response:
    """What the framework itself refuses: a path or a method that does not exist."""
    assert isinstance(error, HTTPException), error
    if error.status_code == 404:
        return ApiError(404, f"there is no {http.method} {http.url.path}", code="not_found").response()
    answer = ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}").response()
    answer.headers.update(error.headers or {})
    return answer
