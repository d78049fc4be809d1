"""The options of `llmctl serve` besides the engine's, and the records that they become."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..kernels.errors import UsageError
from .api.settings import ServeSettings, TenantLimits
from .expand import Built
from .options import parse_count

GENERATION = {"auto": True, "vllm": False, "openai": False}


_DEFAULT = ServeSettings()


def serve_settings(
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name", metavar="NAME", help="What requests call the model; repeatable, the first is shown."
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="The address to listen on.")] = _DEFAULT.host,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="0 takes a free one; stdout says which.")
    ] = _DEFAULT.port,
    uds: Annotated[str, typer.Option("--uds", metavar="PATH", help="Listen on a Unix socket instead.")] = "",
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", metavar="KEY", help="Ask clients for it; repeatable. Or set LLMCTL_API_KEY."),
    ] = None,
    root_path: Annotated[
        str, typer.Option("--root-path", metavar="PATH", help="Where a proxy in front puts the server.")
    ] = "",
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allowed-origins", metavar="URL", help="Web pages that may call (CORS); repeatable, * for all."),
    ] = None,
    ssl_keyfile: Annotated[str, typer.Option("--ssl-keyfile", metavar="FILE", help="Serve HTTPS with this key.")] = "",
    ssl_certfile: Annotated[str, typer.Option("--ssl-certfile", metavar="FILE", help="And this certificate.")] = "",
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue",
            parser=parse_count,
            metavar="N",
            help="Sequences that may wait besides those that run; more get 429.",
        ),
    ] = _DEFAULT.max_queue,
    max_queue_per_tenant: Annotated[
        str,
        typer.Option(
            "--max-queue-per-tenant",
            metavar="N,NAME=N,...",
            help="How many of them may be one tenant's, or that of a name in the request log; more get 429. 0: all.",
        ),
    ] = "",
    shutdown_timeout: Annotated[
        float,
        typer.Option("--shutdown-timeout", metavar="SECONDS", help="How long SIGTERM lets open requests go on."),
    ] = _DEFAULT.shutdown_timeout_s,
    stuck_after: Annotated[
        float,
        typer.Option("--stuck-after", metavar="SECONDS", help="Without a step for so long, /health says 503."),
    ] = _DEFAULT.stuck_after_s,
    chat_template: Annotated[
        str, typer.Option("--chat-template", metavar="FILE", help="A Jinja template instead of the model's own.")
    ] = "",
    generation_config: Annotated[
        str,
        typer.Option(
            "--generation-config",
            metavar="NAME",
            help="Sampling that a request leaves open: auto, as the model's makers say, or openai, as the API says.",
        ),
    ] = "auto",
    log_requests: Annotated[
        bool, typer.Option("--log-requests/--disable-log-requests", help="A line on stderr for each request.")
    ] = True,
    metrics: Annotated[bool, typer.Option("--enable-metrics/--disable-metrics", help="Serve /metrics.")] = True,
    debug_requests: Annotated[
        bool,
        typer.Option(
            "--enable-debug-requests/--disable-debug-requests",
            help="Serve /debug/requests: every request's tenant, sizes and states, to whoever may ask.",
        ),
    ] = False,
) -> ServeSettings:
    """The server options, checked as far as they can be without the model."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port is {port}, it must be from 0 to 65535")
    if bool(ssl_keyfile) != bool(ssl_certfile):
        raise UsageError("HTTPS needs a key and a certificate", "give `--ssl-keyfile` and `--ssl-certfile`")
    for name, seconds in (("--shutdown-timeout", shutdown_timeout), ("--stuck-after", stuck_after)):
        if not 0 <= seconds < 1e9:
            raise UsageError(f"{name} is {seconds}, it must be 0 or more seconds")
    if generation_config not in GENERATION:
        raise UsageError(f"--generation-config is `{generation_config}`", f"choose one of: {', '.join(GENERATION)}")
    for key in api_key or ():
        if not key.isascii() or not key.strip() or key != key.strip():
            raise UsageError("an API key is empty, or has spaces round it or characters that a header cannot carry")
    return ServeSettings(
        names=tuple(served_model_name or ()),
        host=host,
        port=port,
        uds=uds,
        api_keys=tuple(api_key or ()),
        root_path=root_path.rstrip("/"),
        allowed_origins=tuple(allowed_origins or ()),
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        max_queue=max_queue,
        tenant_queues=parse_tenant_limits(max_queue_per_tenant),
        shutdown_timeout_s=shutdown_timeout,
        stuck_after_s=stuck_after,
        log_requests=log_requests,
        metrics=metrics,
        debug_requests=debug_requests,
        chat_template=_template(chat_template) if chat_template else None,
        model_defaults=GENERATION[generation_config],
    )


@dataclass(frozen=True, slots=True)
class ModelClaims:
    """What else was said of the model: another tokenizer, a revision on the hub; "" for nothing."""

    tokenizer: str
    revision: str

    def check(self, model: str) -> None:
        """UsageError unless the tokenizer named is that of `model`."""
        if self.tokenizer not in ("", model):
            raise UsageError(
                f"--tokenizer is `{self.tokenizer}`, a model is served with its own tokenizer (`{model}`)",
                "leave the option out, or put the other tokenizer's files into the model's folder",
            )

    def revised(self, model: str) -> str:
        """The model with the revision that was asked for."""
        if not self.revision:
            return model
        if not model or "@" in model or Path(model).exists():
            raise UsageError(
                f"--revision is `{self.revision}`, only a model named by its hub id has revisions",
                "name the model as `org/name`",
            )
        return f"{model}@{self.revision}"


def model_claims(
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="MODEL", help="Only the model's own can be named.")
    ] = "",
    revision: Annotated[
        str, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit of a model on the hub.")
    ] = "",
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", "--tp", metavar="N", help="Only 1.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "-pp", metavar="N", help="Only 1.")
    ] = 1,
    enable_chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Prompts are always cut into chunks; `--max-num-batched-tokens` says how long.",
        ),
    ] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allowed and never needed: a model's own code is not run.")
    ] = False,
) -> ModelClaims:
    """What scripts written for other servers say, where it is true here. UsageError for what is not."""
    for name, size in (
        ("--tensor-parallel-size", tensor_parallel_size),
        ("--pipeline-parallel-size", pipeline_parallel_size),
    ):
        if size != 1:
            raise UsageError(f"{name} is {size}, a model runs in one engine on this machine", "leave it out, or give 1")
    if not enable_chunked_prefill:
        raise UsageError(
            "prompts are always cut into chunks", "raise `--max-num-batched-tokens` to have each prompt in one step"
        )
    return ModelClaims(tokenizer, revision)


def parse_tenant_limits(text: str) -> TenantLimits:
    """The limits that `8,alice=32` gives: one for all tenants, and others for those that are named."""
    others: int | None = None
    named: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = (piece.strip() for piece in part.rpartition("="))
        try:
            limit = parse_count(count)
        except typer.BadParameter as error:
            raise UsageError(
                f"`{part}` in --max-queue-per-tenant is no count, nor a name with one", "write it as 8,alice=32"
            ) from error
        if name in named or (not name and others is not None):
            raise UsageError(
                f"--max-queue-per-tenant gives {f'tenant `{name}`' if name else 'all tenants'} two limits",
                "give one of them",
            )
        if name:
            named[name] = limit
        else:
            others = limit
    return TenantLimits(others or 0, named)


def _template(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the chat template `{file}`: {error}") from error


ServerOptions = Annotated[ServeSettings, Built(serve_settings)]
ModelOptions = Annotated[ModelClaims, Built(model_claims)]
