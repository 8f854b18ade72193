"""What `/metrics` shows, in Prometheus' format and under vLLM's names, and the metrics of a single answer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hsd_jax.inputs import Row
from hsd_jax.session import FAILED, RequestStats, Taken

if TYPE_CHECKING:
    from hsd_jax.serve.engine import Engine, Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)


class Metrics:
    """The counts of a server since its start. Each has the label `model_name`."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()

        def made(kind: Any, name: str, what: str, *labels: str, **how: Any) -> Any:
            one = kind(f"vllm:{name}", what, ("model_name", *labels), registry=self.registry, **how)
            return partial(one.labels, model) if labels else one.labels(model)

        self._running = made(Gauge, "num_requests_running", "Rows that have a slot")
        self._waiting = made(Gauge, "num_requests_waiting", "Rows that wait for a slot")
        self._usage = made(Gauge, "kv_cache_usage_perc", "The share of the places of all slots that hold a token")
        self._prompt = made(Counter, "prompt_tokens", "Tokens of prompts of ended rows")
        self._new = made(Counter, "generation_tokens", "New tokens")
        self._queried = made(Counter, "prefix_cache_queries", "Tokens of prompts of ended rows")
        self._cached = made(Counter, "prefix_cache_hits", "Those of them that an earlier row began with")
        self._ended = made(Counter, "request_success", "Ended rows", "finished_reason")
        self._failed = made(Counter, "request_failures", "Requests that got an error", "reason")
        self.queue_seconds = made(Histogram, "request_queue_time_seconds", "From request to slot", buckets=_WHOLE)
        self._first = made(Histogram, "time_to_first_token_seconds", "From request to first token", buckets=_FIRST)
        self._between = made(Histogram, "inter_token_latency_seconds", "Between tokens", buckets=_BETWEEN)
        self._whole = made(Histogram, "e2e_request_latency_seconds", "From request to end", buckets=_WHOLE)
        self._drafts = made(Counter, "spec_decode_num_drafts", "Passes of the target that verified drafts")
        self._drafted = made(Counter, "spec_decode_num_draft_tokens", "Depths of drafts that were verified")
        self._accepted = made(Counter, "spec_decode_num_accepted_tokens", "Accepted drafts")
        per = "spec_decode_num_accepted_tokens_per_pos"
        self._per_place = made(Counter, per, "Accepted drafts at each depth", "position")

    def watch(self, engine: Engine) -> None:
        """Reads the gauges from an engine whenever they are shown."""
        self._running.set_function(lambda: engine.num_running)
        self._waiting.set_function(lambda: engine.num_waiting)
        self._usage.set_function(lambda: engine.num_tokens / (engine.num_slots * engine.max_len))

    def count_tokens(self, num: int, since_last: float | None, since_request: float) -> None:
        """Counts new tokens of a row, which came so long after those before them, if any, and after the request."""
        self._new.inc(num)
        if since_last is None:
            self._first.observe(since_request)
        else:
            for _ in range(num):
                self._between.observe(since_last / num)

    def count_row(self, row: Row, taken: Taken, seconds: float) -> None:
        """Counts a row that has ended."""
        self._prompt.inc(len(row.tokens))
        self._queried.inc(len(row.tokens))
        if taken.finish_reason != FAILED:
            self._ended(taken.finish_reason).inc()
        self._whole.observe(seconds)
        if taken.stats is not None:
            self._cached.inc(taken.stats.num_cached)
            found = speculative(taken.stats)
            self._drafts.inc(found["num_spec_steps"])
            self._drafted.inc(found["num_draft_tokens"])
            self._accepted.inc(found["num_accepted_draft_tokens"])
            for place, num in enumerate(np.cumsum(found["acceptance_histogram"][:0:-1])[::-1]):
                self._per_place(str(place)).inc(int(num))

    def count_failure(self, reason: str | None) -> None:
        """Counts a request that got an error after it was taken."""
        self._failed(reason or "other").inc()

    def shown(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)


def speculative(stats: RequestStats) -> dict[str, Any]:
    """What speculation did for a row, under vLLM's names.

    A tree has several nodes in a depth, of which one at most is accepted: a draft is a depth here. `tau` and
    `num_target_passes` are not vLLM's: they count the passes without drafts, too.
    """
    histogram, steps = stats.accepted_histogram.astype(int).tolist(), stats.num_drafted
    accepted, depth = sum(num * times for num, times in enumerate(histogram)), len(histogram) - 1
    histogram[0] -= stats.num_target_passes - steps
    return {
        "mean_acceptance_length": 1 + accepted / max(steps, 1),
        "draft_acceptance_rate": accepted / max(steps * depth, 1),
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": steps * depth,
        "num_spec_tokens": depth,
        "num_target_passes": stats.num_target_passes,
        "tau": stats.tau,
    }


def of_answer(job: Job, stats: RequestStats | None, num_tokens: int) -> dict[str, Any]:
    """The metrics of an answer, under vLLM's names."""
    first, last = job.first or job.came, job.last or job.came
    seconds = last - first
    return {
        "speculative_decoding": None if stats is None else speculative(stats),
        "time_to_first_token_ms": 1e3 * (first - job.came),
        "generation_time_ms": 1e3 * seconds,
        "queue_time_ms": 1e3 * ((job.admitted or job.came) - job.came),
        "mean_itl_ms": 1e3 * seconds / max(num_tokens - 1, 1),
        "tokens_per_second": num_tokens / max(last - (job.admitted or job.came), 1e-9),
    }
