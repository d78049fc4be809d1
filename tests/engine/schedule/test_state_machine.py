"""Blocks, tree and scheduler together under random requests, aborts and pipelines, checked after every call.

A long run: `LLMCTL_STATE_STEPS=1000000 pytest tests/engine/schedule/test_state_machine.py --log-cli-level=INFO`.
"""

from __future__ import annotations

import logging
import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmctl.engine.config import POLICIES, SpeculativeConfig
from llmctl.engine.request import FinishReason
from llmctl.engine.schedule.pace import PaceConfig
from llmctl.engine.schedule.windows import WindowLimit, blocks_behind
from llmctl.kernels.errors import CapacityError

from .builders import check_invariants, config, request
from .fake_runner import FakeModel, Loop, calm_run

log = logging.getLogger(__name__)

RULES = int(os.environ.get("LLMCTL_STATE_STEPS", "2000"))  # to run in all, about
RULES_EACH = 50

STOP_IDS = (0, 1)
prompts = st.builds(
    lambda stem, length, tail: (STEMS[stem] * 3)[:length] + tail,
    st.integers(0, 2),
    st.integers(0, 20),
    st.lists(st.integers(0, 2), min_size=1, max_size=7),
)
STEMS = ([2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 9, 9, 9], [5, 5, 5, 5, 5, 5, 5])


class SchedulerMachine(RuleBasedStateMachine):
    rules_run = 0
    steps_run = 0
    drafted = 0
    accepted = 0
    written = 0
    read_back = 0
    failed = 0

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from((1, 2, 4, 8)),
        groups=st.sampled_from((1, 1, 2)),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from((1, 3, 8, 64)),
        depth=st.integers(1, 3),
        caching=st.sampled_from((True, True, False)),
        policy=st.sampled_from(POLICIES),
        bad_every=st.sampled_from((0, 0, 20)),
        eviction_k=st.integers(1, 3),
        repeats=st.sampled_from((0, 4, 7)),
        drafts=st.sampled_from((0, 1, 3, 6)),
        tier=st.sampled_from((0, 2, 10, 40, 40)),
        mode=st.sampled_from(("auto", "swap", "recompute")),
        lost_every=st.sampled_from((0, 0, 4)),
        disk=st.sampled_from((1 << 30, 1 << 30, 2)),
        swap_us=st.sampled_from((5, 4000, 20_000)),
        beside=st.sampled_from((0, 0, 1, 3)),
        window=st.sampled_from((0, 0, 1, 3, 7)),
        window_tier=st.sampled_from((0, 2, 30)),
    )
    def begin(
        self,
        num_blocks,
        block_size,
        groups,
        max_num_seqs,
        budget,
        depth,
        caching,
        policy,
        bad_every,
        eviction_k,
        repeats,
        drafts,
        tier,
        mode,
        lost_every,
        disk,
        swap_us,
        beside,
        window,
        window_tier,
    ):
        self.model = FakeModel(
            vocab=12, bad_every=bad_every, repeats=repeats, lost_every=lost_every, disk=disk, swap_us=swap_us
        )
        speculation = SpeculativeConfig(
            method="ngram" if drafts else "none", num_speculative_tokens=max(drafts, 1), prompt_lookup_min=1
        )
        least = blocks_behind(window, block_size) + -(-budget * depth // block_size)
        windows = (WindowLimit(window, least + 1, window_tier if tier and caching else 0),) if window else ()
        sizes = (num_blocks,) if groups == 1 else (num_blocks, num_blocks + 2)
        self.loop = Loop(
            config(
                sizes,
                block_size,
                max_num_seqs,
                budget,
                max_model_len=40,
                depth=depth,
                enable_prefix_caching=caching,
                policy=policy,
                eviction_k=eviction_k,
                speculation=speculation,
                tier_blocks=tier if caching else 0,
                preemption_mode=mode,
                windows=windows,
                pace=PaceConfig(tokens=beside) if beside else None,
                epoch=3,
            ),
            self.model,
        )
        self.limit = min(40, num_blocks * block_size)
        self.requests = {}
        self.aborted = set()
        self.expired = set()
        self.count = 0

    @rule(
        prompt=prompts,
        max_tokens=st.integers(0, 12),
        n=st.sampled_from((1, 1, 1, 2, 4)),
        stops=st.booleans(),
        min_tokens=st.integers(0, 3),
        tenant=st.sampled_from(("a", "b")),
        salt=st.sampled_from(("", "", "", "s")),
        priority=st.sampled_from((0, 0, 0, 1)),
    )
    def add(self, prompt, max_tokens, n, stops, min_tokens, tenant, salt, priority):
        asked = request(
            f"r{self.count}",
            prompt,
            max_tokens,
            n,
            STOP_IDS if stops else (),
            min_tokens,
            seed=self.count,
            tenant=tenant,
            salt=salt,
            priority=priority,
        )
        self.count += 1
        fits = len(prompt) + min(max_tokens, 1) <= self.limit
        try:
            self.loop.add(asked)
            assert fits
            self.requests[asked.id] = asked
        except CapacityError:
            assert not fits

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        chosen = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(chosen)
        self.loop.abort(chosen)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), due=st.integers(0, 9))
    def hurry(self, data, due):
        self.loop.scheduler.hurry(data.draw(st.sampled_from(sorted(self.requests))), float(due))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def expire(self, data):
        chosen = data.draw(st.sampled_from(sorted(self.requests)))
        outputs = self.loop.scheduler.expire(chosen, "too late")
        self.loop.take(outputs)
        if outputs:
            assert len(outputs) == self.requests[chosen].sampling.n
            self.expired.add(chosen)

    @rule()
    def launch(self):
        self.loop.launch()

    @rule()
    def deliver(self):
        if self.loop.results:
            self.loop.deliver()

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.loop.step()
            check_invariants(self.loop.scheduler)

    @invariant()
    def holds(self):
        if hasattr(self, "loop"):
            SchedulerMachine.rules_run += 1
            if SchedulerMachine.rules_run % 20_000 == 0:
                log.info("%d rules so far", SchedulerMachine.rules_run)
            check_invariants(self.loop.scheduler)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        loop = self.loop
        received = loop.run()
        check_invariants(loop.scheduler)
        SchedulerMachine.steps_run += len(loop.steps)
        SchedulerMachine.drafted += loop.scheduler.stats().draft_tokens
        SchedulerMachine.accepted += loop.scheduler.stats().accepted_tokens
        stats = loop.scheduler.stats()
        SchedulerMachine.written += stats.tier_writes
        SchedulerMachine.read_back += stats.tier_hits
        SchedulerMachine.failed += stats.tier_failures
        pools = (*loop.config.num_blocks, *(each.num_blocks for each in loop.config.windows))
        assert stats.blocks_free + stats.blocks_cached == sum(pools)
        assert (stats.waiting, stats.running, stats.blocks_active) == (0, 0, 0)
        assert len(loop.scheduler._roster.slots._free) == loop.config.max_num_seqs
        for asked in self.requests.values():
            for index in range(asked.sampling.n):
                got = received[asked.id, index]
                tokens, finish = calm_run(asked, index, self.limit, self.model)
                if asked.id in self.expired:
                    assert (got.tokens, got.finish, got.error) == ([], FinishReason.OVERDUE, "too late")
                elif got.finish is FinishReason.ABORT:
                    assert asked.id in self.aborted
                    assert got.tokens == tokens[: len(got.tokens)]
                else:
                    assert (got.tokens, got.finish) == (tokens, finish)


class TestScheduler(SchedulerMachine.TestCase):
    settings = settings(
        max_examples=max(1, RULES // RULES_EACH),
        stateful_step_count=RULES_EACH,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        derandomize="LLMCTL_STATE_STEPS" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )

    @classmethod
    def tearDownClass(cls):
        log.info(
            "%d rules and %d steps were run, %d drafts were made and %d stood, %d blocks went to tier 2, %d came back, "
            "%d were lost",
            SchedulerMachine.rules_run,
            SchedulerMachine.steps_run,
            SchedulerMachine.drafted,
            SchedulerMachine.accepted,
            SchedulerMachine.written,
            SchedulerMachine.read_back,
            SchedulerMachine.failed,
        )
