"""From a model that was found to an engine: plan, build. A worker needs no text and no client."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

from ..kernels.cuda.driver import OutOfMemory
from ..kernels.device import give_back_freed_memory
from ..kernels.errors import CapacityError
from .audit import AuditedEngine
from .budget import MemoryBudget
from .config import EngineConfig
from .drafting import draft_config, make_proposer
from .engine import Core, Engine, StepRunner
from .find import find_model
from .load.disk import check_swap_room
from .load.model import Model
from .load.progress import Progress
from .load.vocabulary import Vocabulary, check_same_vocabulary
from .messages import EngineInfo
from .plan import Plan, resolve
from .pools import blocks_for
from .runner.golden import check_golden
from .runner.make import make_runner
from .runner.probe import try_bits
from .runner.runner import RecordingRunner, Runner
from .schedule.limits import SchedulerConfig
from .schedule.scheduler import Scheduler
from .schedule.windows import WindowLimit
from .shortage import Demand
from .sizes import format_bytes

log = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    *,
    epoch: int,
    progress: Progress | None = None,
    record: Callable[[bytes], None] | None = None,
) -> tuple[Core, EngineInfo]:
    """An engine on this thread, for a loop or a test to drive. `record` gets every encoded Step before it runs."""
    return assemble(config, find_model(config, progress), epoch=epoch, progress=progress, record=record)


def assemble(
    config: EngineConfig,
    model: Model,
    *,
    epoch: int,
    progress: Progress | None = None,
    record: Callable[[bytes], None] | None = None,
) -> tuple[Core, EngineInfo]:
    """An engine for a model that is already open, which opens its draft model; `record` as in `build_engine`."""
    drafts = config.speculative_config.method == "draft_model"
    draft = find_model(draft_config(config), progress) if drafts else None
    if draft is not None:
        check_same_vocabulary(Vocabulary.of(draft), Vocabulary.of(model))
    plan, budget = resolve(config, model, draft)
    log.info("plan: %s", plan)
    log.info("memory: %s", budget)
    if plan.tier_blocks and not plan.on_gpu:  # before anything is built
        check_swap_room(Path(plan.tier_folder), budget.tier_bytes)
    try:
        runner = make_runner(model, plan)
    except OutOfMemory as error:
        raise _no_memory(budget) from error
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise _no_memory(budget) from error
    if isinstance(runner, Runner):
        same_bits = plan.model_impl == "llmctl" or _tried(runner, model, plan)
    else:
        same_bits = plan.deterministic
    if model.golden is not None and config.rope_scaling is None:  # what was measured had the model's own rope
        check_golden(runner, plan, model, model.golden)
    driven: StepRunner = runner if record is None else RecordingRunner(runner, record)
    proposer = None if draft is None else make_proposer(draft, model, plan, runner)
    engine: Core = Engine(Scheduler(scheduler_config(plan, epoch), proposer), driven, plan.async_depth)
    if config.cache_audit:
        engine = AuditedEngine(engine, config.cache_audit)
    info = _info(model, plan, epoch, same_bits)
    give_back_freed_memory()
    return engine, info


def scheduler_config(plan: Plan, epoch: int) -> SchedulerConfig:
    """The part of the plan that the scheduler works with."""
    return SchedulerConfig(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        block_size=plan.block_size,
        num_blocks=(plan.num_blocks,),
        windows=tuple(
            WindowLimit(group.window, group.num_blocks, group.tier_blocks, group.bytes_per_token * plan.block_size)
            for group in plan.groups[1:]
        ),
        max_model_len=plan.max_model_len,
        enable_prefix_caching=plan.enable_prefix_caching,
        eviction_k=plan.eviction_k,
        policy=plan.scheduling_policy,
        tenant_weights=plan.tenant_weights,
        pace=plan.pace,
        depth=plan.async_depth,
        tier_blocks=plan.tier_blocks,
        preemption_mode=plan.preemption_mode,
        bytes_per_block=plan.bytes_per_block,
        speculation=plan.speculation,
        max_logit_rows=plan.max_logit_rows,
        epoch=epoch,
    )


def _no_memory(budget: MemoryBudget) -> CapacityError:
    """The system gave less than it said it had: another program was faster, or the process has a limit of its own."""
    one = blocks_for(budget.max_model_len, budget.block_size)
    smaller = (
        f"use `--num-gpu-blocks-override {one}`, which is enough for one sequence of {budget.max_model_len} tokens"
    )
    demand = Demand(budget.available, budget.weights, budget.workspace, budget.reserve, 0.0)
    return demand.refused(
        f"the system refused to give {format_bytes(budget.workspace + budget.kv_bytes)} for workspace and KV cache",
        smaller if one < budget.num_blocks else "use a smaller `--max-model-len`, or free memory",
        budget.kv_bytes,
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
        num_blocks=sum(group.num_blocks for group in plan.groups),
        block_size=plan.block_size,
        epoch=epoch,
        model_impl=plan.model_impl,
        same_bits=same_bits,
    )
