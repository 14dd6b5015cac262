"""What a server counts, in the format of Prometheus."""

# Tests: tests/server/test_health.py

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from radixrt.runtime import Runtime

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """Of one server: responses as they are made, and a Runtime's numbers when they are asked for."""

    def __init__(self, runtime: Runtime) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_RuntimeNumbers(runtime))
        self.responses = Counter(
            "radixrt_responses",
            "Responses by endpoint and status",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "radixrt_response_seconds",
            "Time of a response, of a stream to its end",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "radixrt_first_event_seconds",
            "Time to the first text of a stream",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)


class _RuntimeNumbers:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """As a registry asks for them."""
        runtime = self._runtime
        activity, cache = runtime.activity(), runtime.cache_stats()
        counted = [
            ("passes", "Forward passes", activity.passes),
            ("extended_tokens", "Prompt tokens computed", activity.extended_tokens),
            ("decoded_tokens", "Tokens sampled", activity.decoded_tokens),
            ("device_seconds", "The device's time in passes", activity.busy_seconds),
            ("prompt_tokens", "Prompt tokens of admitted requests", cache.prompt_tokens),
            ("cached_tokens", "Those of them that were found in the cache", cache.cached_tokens),
        ]
        current = [
            ("running_requests", "Requests that run", runtime.num_running),
            ("waiting_requests", "Requests that wait for memory or a place", runtime.num_waiting),
            ("pool_tokens", "Tokens that the KV pool holds at most", cache.capacity),
            ("pool_free_tokens", "Tokens that it has room for without an eviction", cache.free),
            ("pool_evictable_tokens", "Cached tokens that no request holds", cache.evictable),
        ]
        if cache.state_capacity:
            again = "Cached prompt tokens that were computed again, since no state was kept there"
            given_up = "States left where prompts part, and given up before any request began with them"
            ends = "Of these, ends of answers that no request has gone on from"
            counted += [
                ("stateless_tokens", again, cache.stateless_tokens),
                ("states_given_up_unused", given_up, cache.states_given_up_unused),
                ("stored_states", "States that were copied to the host", cache.state_stored),
                ("loaded_states", "States that were copied back from it", cache.state_loaded),
            ]
            current += [
                ("states", "States of sequences that there are at most", cache.state_capacity),
                ("free_states", "Those of them that are free", cache.state_free),
                ("running_states", "Those of running requests", cache.state_own),
                ("kept_states", "Those that are kept for others", cache.state_kept),
                ("kept_end_states", ends, cache.state_ends),
                ("kept_unused_states", "Of these, places where prompts part, not used yet", cache.state_unused),
                ("host_states", "States that have a copy on the host", cache.state_on_host),
            ]
        for name, about, value in counted:
            yield CounterMetricFamily(f"radixrt_{name}", about, value=value)
        for name, about, value in current:
            yield GaugeMetricFamily(f"radixrt_{name}", about, value=value)
