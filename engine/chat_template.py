"""Chat templates: Jinja as the Hugging Face hub's templates expect it, in a sandbox.

A template comes with a model's files, so it is untrusted code: it runs in Jinja's immutable sandbox and whatever it
raises becomes an error of the request. The environment (whitespace rules, extensions, functions) is the one that
templates are written against: `trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, a
`tojson` that escapes nothing for HTML, and `{% generation %}` blocks, which only training uses and which are rendered
as they are.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ..kernels.errors import UsageError

Message = Mapping[str, object]

# What Python code inside a template can raise besides Jinja's own errors: a wrong type or a missing key in a message.
_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def render(
    template: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, object]] | None,
    documents: Sequence[Mapping[str, object]] | None,
    variables: Mapping[str, object],
) -> str:
    """The text of a conversation; UsageError if the template does not compile or refuses these messages."""
    try:
        return _compiled(template).render(
            {
                **special_tokens,
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "tools": None if tools is None else [dict(tool) for tool in tools],
                "documents": None if documents is None else [dict(document) for document in documents],
                **variables,
            }
        )
    except _ERRORS as error:
        raise UsageError(
            f"the chat template cannot render these messages: {error}",
            "check roles and their order, and that every message has the content the template uses",
        ) from error


def check_template(template: str) -> None:
    """Raise UsageError if the template does not compile."""
    try:
        _compiled(template)
    except _ERRORS as error:
        raise UsageError(f"the chat template does not compile: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` renders what is inside."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
