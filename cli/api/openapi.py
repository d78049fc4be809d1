"""`/openapi.json`: the endpoints and the bodies that they understand, from the routes and msgspec's own schemas."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from starlette.routing import Route

from ... import __version__
from .schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def document(routes: Sequence[Route]) -> bytes:
    """The OpenAPI document of these routes, as JSON."""
    _, schemas = msgspec.json.schema_components(list(BODIES.values()), ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        operations = paths.setdefault(re.sub(r":\w+}", "}", route.path), {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operations[method.lower()] = _operation(route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "llmctl", "version": __version__},
            "paths": paths,
            "components": {"schemas": schemas},
        }
    )


def _operation(route: Route) -> dict[str, object]:
    summary = (route.endpoint.__doc__ or "").partition("\n")[0].rstrip(".")
    operation: dict[str, object] = {
        "operationId": route.name,
        "summary": summary,
        "responses": {"200": {"description": "The answer", "content": {"application/json": {"schema": {}}}}},
    }
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if route.path in BODIES:
        schema = {"$ref": f"#/components/schemas/{BODIES[route.path].__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
