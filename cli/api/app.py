"""The ASGI application: endpoints, error bodies, CORS, the journal, and an OpenAPI document of what is understood.

Starlette does the routing. FastAPI, which is Starlette with pydantic, would check and document bodies; ours are
msgspec's, and its import alone takes half of the time in which a server of ours gives its first token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .errors import ApiError
from .journal import Journal, Record
from .openapi import document
from .routes import Endpoints
from .service import Service

Lifespan = Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]


def make_app(service: Service, lifespan: Lifespan) -> Starlette:
    """The application that serves `service`; `lifespan` surrounds its life."""
    routes = Endpoints(service).routes()

    def openapi(http: Request) -> Response:
        return Response(document(routes), media_type="application/json")

    middleware = [Middleware(Journal, metrics=service.metrics)]
    if origins := service.settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    return Starlette(
        routes=[*routes, Route("/openapi.json", openapi)],
        middleware=middleware,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=lifespan,
    )


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
