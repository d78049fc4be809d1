"""Prometheus metrics. Names are those of vLLM's dashboards where the meaning is the same, with our prefix.

Figures of the engine are read from its counters at the time of the scrape; figures of requests are counted as they end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...engine.messages import EngineStats
from ...engine.request import FinishReason

_FAST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_SLOW = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Metrics:
    """All metrics of one server. `model` is a label of each."""

    def __init__(self, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"llmctl:{name}", text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"llmctl:{name}", text, ("model_name",), registry=self._registry, buckets=tuple(buckets))

        self._http = counter("http_requests", "HTTP requests by endpoint and status.", "endpoint", "status")
        self._refused = counter("requests_refused", "Requests that were told to come later, by why.", "reason")
        self._finished = counter("request_success", "Sequences that ended, by reason.", "finished_reason")
        self._ttft = histogram("time_to_first_token_seconds", "From the request to its first token.", _SLOW)
        self._between_tokens = _TokenLatencies(model)
        self._registry.register(self._between_tokens)
        self._e2e = histogram("e2e_request_latency_seconds", "From the request to the end of its answer.", _SLOW)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)

    def refused(self, reason: str) -> None:
        """A request was answered with 429."""
        self._refused.labels(self._model, reason).inc()

    def first_token(self, seconds: float) -> None:
        """The first token of a request came."""
        self._ttft.labels(self._model).observe(seconds)

    def more_tokens(self, seconds: float, count: int) -> None:
        """So many tokens of a sequence came so long after its last ones."""
        self._between_tokens.add(seconds / count, count)

    def sequence_ended(self, reason: FinishReason) -> None:
        """A sequence ended."""
        self._finished.labels(self._model, reason.value).inc()

    def answered(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """A generation ended well."""
        self._e2e.labels(self._model).observe(seconds)
        self._prompt.labels(self._model).observe(prompt_tokens)
        self._generated.labels(self._model).observe(completion_tokens)

    def responded(self, endpoint: str, status: int) -> None:
        """An HTTP request ended, well or not; 499 if its client left."""
        self._http.labels(self._model, endpoint, str(status)).inc()

    def watch_engine(self, stats: Callable[[], EngineStats]) -> None:
        """Show the engine's own counters as well."""
        self._registry.register(_EngineCollector(self._model, stats))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _TokenLatencies(Collector):
    """A histogram that counts one token at a time at little cost: the library's takes a lock for each of its values.

    Only the event loop's thread uses it, which also scrapes.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = [0] * (len(_FAST) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """So many tokens each took so long."""
        self._counts[bisect_left(_FAST, seconds)] += tokens
        self._sum_s += seconds * tokens

    def collect(self) -> Iterable[Metric]:
        """The histogram, its buckets cumulative as Prometheus has them."""
        name, text = "llmctl:inter_token_latency_seconds", "Between tokens of one sequence."
        family = HistogramMetricFamily(name, text, labels=("model_name",))
        bounds = (*map(str, _FAST), "+Inf")
        family.add_metric((self._model,), tuple(zip(bounds, accumulate(self._counts))), self._sum_s)
        yield family


class _EngineCollector(Collector):
    """Reads the engine's counters when scraped."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._model, self._stats = model, stats

    def collect(self) -> Iterable[Metric]:
        """One family for each figure."""
        stats = self._stats()
        used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
        usage = used / (stats.blocks_total or 1)
        for name, text, value in (
            ("num_requests_running", "Sequences that run.", stats.running),
            ("num_requests_waiting", "Sequences that wait.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks that running sequences hold.", usage),
            ("kv_blocks", "KV blocks in all.", stats.blocks_total),
            ("kv_blocks_free", "KV blocks that hold nothing.", stats.blocks_free),
            ("kv_blocks_cached", "KV blocks that only the prefix cache holds.", stats.blocks_cached),
            ("kv_fragmentation", "Share of the blocks not in use that are in no run of 16.", stats.fragmentation),
            ("kv_waste", "Share of the positions in used blocks that hold no token.", stats.waste),
            ("scheduler_share", "Share of scheduling in the steps' time.", stats.scheduler_s / (stats.step_s or 1)),
            ("swap_blocks", "KV blocks that the swap space takes.", stats.tier_blocks),
            ("swap_blocks_used", "KV blocks that are there.", stats.tier_blocks_used),
            ("last_step_age_seconds", "Since the engine's last step; 0 when idle.", stats.last_step_age_s),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(f"llmctl:{name}", text, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of the requests that were started.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in it.", stats.cached_tokens),
            ("cache_audits", "Prefix hits that were computed again.", stats.cache_audits),
            ("cache_audit_failures", "Those that had other bits.", stats.cache_audit_failures),
            ("num_preemptions", "Sequences that had to give their memory up for a while.", stats.preemptions),
            ("recomputed_tokens", "Tokens computed again after their sequence made room.", stats.recomputed_tokens),
            ("swap_writes", "Blocks written to the swap space as they were thrown out.", stats.tier_writes),
            ("swap_clean_drops", "Blocks thrown out whose copy was there already.", stats.tier_clean_drops),
            ("swap_hits", "Blocks read back from the swap space.", stats.tier_hits),
            ("swap_failures", "Blocks that could not be written, or had changed when read.", stats.tier_failures),
            ("swapped_out_bytes", "Bytes written to the swap space.", stats.swapped_out_bytes),
            ("swapped_in_bytes", "Bytes read back from it.", stats.swapped_in_bytes),
            ("kv_evictions", "Cached blocks that were thrown out.", stats.evictions),
            ("kv_evicted_reused", "Blocks that came back after they were thrown out.", stats.evicted_reused),
            ("spec_decode_num_drafts", "Rows of steps that held drafts.", stats.drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", stats.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that stood.", stats.accepted_tokens),
            ("engine_steps", "Steps of the engine.", stats.steps),
            ("step_seconds", "Time of these steps, scheduling included.", stats.step_s),
            ("spec_decode_draft_seconds", "Of it in a draft model.", stats.draft_s),
            ("scheduler_seconds", "Of it in the scheduler and the prefix tree.", stats.scheduler_s),
        ):
            counter = CounterMetricFamily(f"llmctl:{name}", text, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
        by_place = CounterMetricFamily(
            "llmctl:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that stood, by their place in a draft.",
            labels=("model_name", "position"),
        )
        for place, stood in enumerate(stats.accepted_per_position):
            by_place.add_metric((self._model, str(place)), stood)
        yield by_place
