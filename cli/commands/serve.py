"""`llmctl serve`: one model behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...engine.config import DEFAULT_MODEL, EngineConfig, environment
from ...kernels.errors import UsageError
from ..api.settings import ServeSettings, tenant_of
from ..command_line import command_line
from ..config_file import Config, choose_named
from ..console import Console
from ..exits import ExitCode
from ..options import EngineOptions
from ..serve_options import ModelOptions, ServerOptions
from ..uncollected import uncollected

if TYPE_CHECKING:
    import socket


def serve(
    context: typer.Context,
    config: EngineOptions,
    settings: ServerOptions,
    claims: ModelOptions,
    file: Config = None,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print this command with all its options, and exit.")
    ] = False,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does.

    Its address is printed on stdout once requests are served. SIGTERM or Ctrl-C lets open requests finish.
    """
    console: Console = context.obj
    model = claims.revised(choose_named(config.model, file) or environment().model)
    shown = model or DEFAULT_MODEL
    claims.check(shown)
    if print_command:
        console.data(command_line(context, shown, left_out=("print_command", "api_key")))
        return
    settings = dataclasses.replace(
        settings,
        names=settings.names or (shown,),
        api_keys=settings.api_keys or tuple(filter(None, (environment().api_key,))),
    )
    _check_tenants(config, settings)
    _run(console, msgspec.structs.replace(config, model=model), settings)


def _check_tenants(config: EngineConfig, settings: ServeSettings) -> None:
    """UsageError for the weight or limit of a tenant that there cannot be: with API keys they alone are tenants."""
    tenants = [tenant_of(key) for key in settings.api_keys]
    weighed = [("--tenant-weights", name) for name in config.tenant_weights]
    limited = [("--max-queue-per-tenant", name) for name in settings.tenant_queues.named]
    for option, name in weighed + limited:
        if tenants and name not in tenants:
            raise UsageError(
                f"{option} names `{name}`, but with API keys the keys are the tenants",
                f"the keys given are, in their order: {', '.join(tenants)}",
            )


def _run(console: Console, config: EngineConfig, settings: ServeSettings) -> None:
    from ...engine.process import EngineProcess, new_epoch

    if settings.chat_template is not None:
        from ...engine.chat_template import check_template

        check_template(settings.chat_template)
    _check_certificate(settings)
    with _listen(settings) as listener:
        engine = EngineProcess(config, new_epoch())
        try:
            with uncollected():
                from ..api.server import serve  # takes as long to import as the engine to load, so they do it together

            ended_by = serve(settings, config, engine, listener, console)
        finally:
            engine.end()
            if settings.uds:
                Path(settings.uds).unlink(missing_ok=True)
    if ended_by is signal.SIGINT:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _listen(settings: ServeSettings) -> socket.socket:
    from ..api.sockets import listen, listen_unix

    return listen_unix(Path(settings.uds)) if settings.uds else listen(settings.host, settings.port)


def _check_certificate(settings: ServeSettings) -> None:
    if settings.ssl_certfile:
        import ssl

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"cannot use `{settings.ssl_certfile}` with the key `{settings.ssl_keyfile}`: {error}",
                "both are PEM files, and the key must not ask for a password",
            ) from error
