"""From options to a report: brings up the targets, builds the workload for them, measures, and says how it was done."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import platform
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ...engine.config import EngineConfig, environment
from ...engine.launch import launch
from ...engine.load.hub import resolve
from ...engine.load.packed import open_packed
from ...engine.load.progress import Progress
from ...engine.messages import EngineInfo, EngineStats
from ...engine.request import SamplingParams
from ...engine.tokenizer import Tokenizer
from ...kernels.device import default_threads, read_machine
from .build import Asked
from .dataset_options import DEFAULTS, WorkloadOptions
from .datasets import build
from .guards import busy
from .http_target import CHAT, COMPLETIONS, Endpoint, OpenAIServer, find_model, join_url, make_client
from .load_shape import Load
from .made import ordinary_tokens
from .options import LoadOptions, ReportOptions, TargetOptions
from .report import LoadFacts, Option, Provenance, Report, WorkloadFacts, load_average, speculation, versions
from .session import Plan, measure
from .targets import InProcess, Target
from .transformers_target import start_transformers
from .workload import Workload, form_of

PAIRED_ROUNDS = 2  # beside a peer: each goes first once


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that was asked."""

    config: EngineConfig
    workload: WorkloadOptions
    load: LoadOptions
    target: TargetOptions
    report: ReportOptions

    @property
    def sampling(self) -> SamplingParams:
        """Greedy, so that two runs of one seed compute the same."""
        default = DEFAULTS[self.workload.dataset].ignore_eos
        asked = self.workload.ignore_eos
        return SamplingParams(temperature=0, ignore_eos=default if asked is None else asked)


@dataclass(frozen=True, slots=True)
class _Side:
    """A target, and what is known of its model; `model` is a name, `local` what finds it on this machine."""

    target: Target
    model: str
    local: str
    tokenizer: Tokenizer | None
    chat: bool
    context: int
    engine: EngineInfo | None
    stats: Callable[[], EngineStats] | None = None


async def run(options: Options, progress: Progress) -> Report:
    """Measure as asked. Raises LlmctlError for what cannot work; Ctrl-C while measuring gives a partial report."""
    started, before = datetime.now(UTC), load_average()
    async with AsyncExitStack() as stack:
        bring_up = _server(options, progress) if options.target.base_url else _own_engine(options, progress)
        side = await stack.enter_async_context(bring_up)
        asked = Asked(side.tokenizer, side.chat, side.context)
        workload = build(options.workload, asked, environment(), progress)
        targets = [side.target]
        if options.target.against:
            targets.append(await stack.enter_async_context(_transformers(options, side, progress)))
        pool = workload.token_ids if side.tokenizer is None else ordinary_tokens(side.tokenizer)
        plan = _plan(options)
        measured = await measure(targets, workload, plan, pool, progress)
        speculated = None if side.stats is None else speculation(await asyncio.to_thread(side.stats))
    refused = measured.refused and not options.report.allow_tainted
    machine = read_machine()
    provenance = Provenance(
        started=started.isoformat(timespec="seconds"),
        machine=machine,
        system=platform.platform(),
        versions=versions(peers=bool(options.target.against)),
        model=side.model,
        engine=side.engine,
        options=_flat(options),
        load_average=(before, load_average()),
    )
    return Report(
        provenance=provenance,
        workload=_workload_facts(workload, options),
        load=_load_facts(plan),
        results=() if refused else measured.results,
        ratios=() if refused else measured.ratios,
        findings=(*busy(before[0], machine.cores), *measured.findings),
        speculation=speculated,
        partial=measured.partial,
        refused=refused,
        rounds=measured.rounds,
    )


@asynccontextmanager
async def _own_engine(options: Options, progress: Progress) -> AsyncIterator[_Side]:
    frontend = launch(options.config, progress=progress)
    try:
        info = frontend.info
        target = InProcess(frontend, options.sampling)
        local = options.config.model
        yield _Side(target, info.model, local, frontend.tokenizer, False, info.max_model_len, info, frontend.stats)
    finally:
        await asyncio.to_thread(frontend.close)


@asynccontextmanager
async def _server(options: Options, progress: Progress) -> AsyncIterator[_Side]:
    asked = options.target
    path = asked.endpoint or COMPLETIONS
    tokenizer = None
    if asked.tokenizer:
        tokenizer = Tokenizer(packed_folder(asked.tokenizer, progress))
    async with make_client() as client:
        progress("waiting for the server", 0, 0)
        model, context = await find_model(
            client, asked.base_url, asked.api_key, options.config.model, asked.ready_timeout_s
        )
        endpoint = Endpoint(join_url(asked.base_url, path), path.endswith(CHAT[3:]), model, asked.api_key)
        pids = () if asked.server_pid is None else (asked.server_pid,)
        target = OpenAIServer(client, endpoint, options.sampling, pids)
        yield _Side(target, model, asked.tokenizer, tokenizer, endpoint.chat, context, None)


@asynccontextmanager
async def _transformers(options: Options, side: _Side, progress: Progress) -> AsyncIterator[Target]:
    assert side.tokenizer is not None
    progress("loading transformers", 0, 0)
    source = resolve(side.local, environment=environment(), progress=progress)
    threads = default_threads() if side.engine is None else side.engine.threads
    stop_ids = () if options.sampling.ignore_eos else side.tokenizer.eos_ids
    target = await start_transformers(source, threads, stop_ids)
    try:
        yield target
    finally:
        await target.close()


def packed_folder(name: str, progress: Progress) -> Path:
    """Where the packed files of a model are, its tokenizer among them; packs it if need be."""
    settings = environment()
    source = resolve(name, environment=settings, progress=progress)
    return open_packed(source, dtype="auto", cache=settings.cache, progress=progress).folder


def _plan(options: Options) -> Plan:
    asked, defaults = options.load, DEFAULTS[options.workload.dataset]
    limit = asked.max_concurrency
    if limit is None:
        limit = 0 if math.isfinite(asked.request_rate) else defaults.max_concurrency
    return Plan(
        load=Load(limit, asked.request_rate, asked.burstiness),
        num_warmups=asked.num_warmups,
        rounds=asked.rounds or (PAIRED_ROUNDS if options.target.against else 1),
        timeout_s=asked.timeout_s,
        seed=options.workload.seed,
        salt=asked.salt,
        limits_ms=options.report.limits_ms,
    )


def _workload_facts(workload: Workload, options: Options) -> WorkloadFacts:
    items = workload.items
    form = form_of(items[0].prompt)
    return WorkloadFacts(
        dataset=workload.dataset,
        source=workload.source,
        stand_in=workload.stand_in,
        notes=workload.notes,
        num_prompts=len(items),
        prompt_form=form,
        prompt_tokens_mean=statistics.fmean(len(item.prompt) for item in items) if form == "ids" else None,
        output_tokens_mean=statistics.fmean(item.max_tokens for item in items),
        ignore_eos=workload.ignore_eos,
        seed=options.workload.seed,
        salt=options.load.salt,
        digest=workload.digest,
    )


def _load_facts(plan: Plan) -> LoadFacts:
    load = plan.load
    return LoadFacts(
        max_concurrency=load.max_concurrency,
        request_rate=load.request_rate if math.isfinite(load.request_rate) else None,
        burstiness=load.burstiness if math.isfinite(load.burstiness) else None,
        num_warmups=plan.num_warmups,
        rounds=plan.rounds,
        timeout_s=plan.timeout_s,
        goodput_ms=dict(plan.limits_ms),
    )


def _flat(options: Options) -> dict[str, Option]:
    """Every option as it was given or left at its default, except the key (and goodput, which LoadFacts has)."""
    asked = {
        **msgspec.structs.asdict(options.config),
        **dataclasses.asdict(options.workload),
        **dataclasses.asdict(options.load),
        **dataclasses.asdict(options.target),
        **dataclasses.asdict(options.report),
    }
    del asked["api_key"], asked["limits_ms"]
    return {name: _plain(value) for name, value in asked.items()}


def _plain(value: object) -> Option:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
