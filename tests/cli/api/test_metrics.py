"""What a scrape shows of the engine."""

from llmctl.cli.api.metrics import Metrics
from llmctl.engine.messages import EngineStats


def test_evictions_what_was_regretted_and_the_swap_space_are_shown():
    stats = EngineStats(
        preemptions=2, recomputed_tokens=77, evictions=11, evicted_reused=5, tier_blocks=40, tier_blocks_used=9,
        tier_writes=8, tier_clean_drops=3, tier_hits=4, tier_failures=1, swapped_out_bytes=8000, swapped_in_bytes=4000,
    )  # fmt: skip
    metrics = Metrics("m")
    metrics.watch_engine(lambda: stats)
    lines = metrics.render().decode().splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for name, value in (
        ("num_preemptions_total", 2), ("recomputed_tokens_total", 77), ("kv_evictions_total", 11),
        ("kv_evicted_reused_total", 5), ("swap_blocks", 40), ("swap_blocks_used", 9), ("swap_writes_total", 8),
        ("swap_clean_drops_total", 3), ("swap_hits_total", 4), ("swap_failures_total", 1),
        ("swapped_out_bytes_total", 8000), ("swapped_in_bytes_total", 4000),
    ):  # fmt: skip
        assert float(shown[f'llmctl:{name}{{model_name="m"}}']) == value, name
