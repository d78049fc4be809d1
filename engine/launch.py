"""From an EngineConfig to something that answers: find the model, map it, plan, build the engine, wrap a client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .client import EngineClient, LocalClient
from .config import EngineConfig, environment
from .engine import Engine, StepRunner
from .frontend import Frontend
from .load.hub import resolve as resolve_source
from .load.model import Model, open_model
from .load.progress import Progress
from .messages import EngineInfo
from .plan import Plan, resolve
from .process import new_epoch
from .process_client import ProcessClient
from .runner.probe import try_bits
from .runner.runner import RecordingRunner, Runner
from .schedule.limits import SchedulerConfig
from .schedule.scheduler import Scheduler
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)


def launch(config: EngineConfig, *, process: bool = False, progress: Progress | None = None) -> Frontend:
    """A ready engine behind its text face: on a thread of this process, or in a process of its own.

    Raises LlmctlError for a model that cannot be found, read or run here, and for options that do not fit.
    """
    config.check()
    if process:
        return face(ProcessClient(config, epoch=new_epoch(), progress=progress), config)
    model = _open(config, progress)
    with ThreadPoolExecutor(1) as beside:  # parsing a vocabulary takes as long as building the engine
        parsed = beside.submit(Tokenizer, model.folder)
        engine, info = assemble(config, model, epoch=new_epoch())
    tokenizer = parsed.result()
    return Frontend(LocalClient(engine, info), tokenizer, config.seed)


def face(client: EngineClient, config: EngineConfig, template: str | None = None) -> Frontend:
    """The text face of a client's engine: its model's tokenizer, and its chat template or the one given."""
    return Frontend(client, Tokenizer(Path(client.info.folder), template), config.seed)


def build_engine(
    config: EngineConfig,
    *,
    epoch: int,
    progress: Progress | None = None,
    record: Callable[[bytes], None] | None = None,
) -> tuple[Engine, EngineInfo]:
    """An engine on this thread, for a loop or a test to drive. `record` gets every encoded Step before it runs."""
    return assemble(config, _open(config, progress), epoch=epoch, record=record)


def assemble(
    config: EngineConfig, model: Model, *, epoch: int, record: Callable[[bytes], None] | None = None
) -> tuple[Engine, EngineInfo]:
    """An engine for a model that is already open; `record` as in `build_engine`."""
    plan, budget = resolve(config, model)
    log.info("plan: %s", plan)
    log.info("memory: %s", budget)
    runner = Runner(model, plan)
    same_bits = plan.model_impl == "llmctl" or _tried(runner, model, plan)
    driven: StepRunner = runner if record is None else RecordingRunner(runner, record)
    engine = Engine(Scheduler(scheduler_config(plan, epoch)), driven, plan.async_depth)
    return engine, _info(model, plan, epoch, same_bits)


def scheduler_config(plan: Plan, epoch: int) -> SchedulerConfig:
    """The part of the plan that the scheduler works with."""
    return SchedulerConfig(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        block_size=plan.block_size,
        num_blocks=(plan.num_blocks,),
        max_model_len=plan.max_model_len,
        enable_prefix_caching=plan.enable_prefix_caching,
        eviction_k=plan.eviction_k,
        policy=plan.scheduling_policy,
        depth=plan.async_depth,
        speculation=plan.speculation,
        epoch=epoch,
    )


def _open(config: EngineConfig, progress: Progress | None) -> Model:
    settings = environment()
    source = resolve_source(config.model, environment=settings, progress=progress)
    return open_model(
        source, implementation=config.model_impl, dtype=config.dtype, cache=settings.cache, progress=progress
    )


def _tried(runner: Runner, model: Model, plan: Plan) -> bool:
    """Whether a trial at load gave the same bits in every way; the log tells."""
    trial = try_bits(runner, plan, model.spec.vocab_size)
    if trial.same:
        log.info("%s: transformers' modules gave the same bits in %d ways", model.name, trial.ways)
    else:
        log.warning("%s: outside the promise of the same bits: %s", model.name, trial.finding)
    return trial.same


def _info(model: Model, plan: Plan, epoch: int, same_bits: bool) -> EngineInfo:
    return EngineInfo(
        model=plan.model,
        folder=str(model.folder),
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        vocab_size=model.spec.vocab_size,
        weight_format=" + ".join(plan.weight_formats),
        kv_format=plan.kv_format,
        threads=plan.threads,
        isa=plan.isa,
        fingerprint=plan.fingerprint,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        epoch=epoch,
        model_impl=plan.model_impl,
        same_bits=same_bits,
    )
