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


def test_what_became_of_drafts_is_shown_by_their_place():
    stats = EngineStats(drafts=9, draft_tokens=20, accepted_tokens=11, accepted_per_position=(7, 4), draft_s=0.5)
    metrics = Metrics("m")
    metrics.watch_engine(lambda: stats)
    shown = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if not line.startswith("#"))
    assert float(shown['llmctl:spec_decode_num_accepted_tokens_total{model_name="m"}']) == 11
    assert float(shown['llmctl:spec_decode_draft_seconds_total{model_name="m"}']) == 0.5
    by_place = [
        shown[f'llmctl:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="{place}"}}']
        for place in range(2)
    ]
    assert list(map(float, by_place)) == [7, 4]
