"""Counters and histograms of the front, rendered for Prometheus; knows nothing of HTTP or engines.

Values are counted in plain lists, as only the event loop's thread writes them: a histogram costs a
bisect per observation. prometheus-client writes the format. Every series also appears under the
names that vLLM and SGLang users have in their dashboards (`_ALIASES`).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

_TTFT: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_TTFT += (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_GAP: tuple[float, ...] = (
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
)
_GAP += (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_E2E: tuple[float, ...] = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0)
_E2E += (30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Histogram:
    """Counts observations into buckets by upper bound (inclusive)."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as the text format wants it."""
        pairs: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            pairs.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return pairs


class Metrics:
    """What the front counts. `set_engine` takes a snapshot of what the engine counts."""

    def __init__(self, model_name: str) -> None:
        self.ttft = Histogram(_TTFT)
        self.inter_token = Histogram(_GAP)
        self.e2e = Histogram(_E2E)
        self.prompt_length = Histogram(_TOKENS)
        self.generation_length = Histogram(_TOKENS)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = {}  # finish reason -> sequences
        self.http: dict[tuple[str, int], int] = {}  # (route, status) -> responses
        self._engine: dict[str, float] = {}
        self._model_name = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(_Families(self))

    def sequence_finished(
        self, reason: str, prompt_tokens: int, cached_tokens: int, generated: int, seconds: float
    ) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.prompt_length.observe(prompt_tokens)
        self.generation_length.observe(generated)
        self.e2e.observe(seconds)

    def responded(self, route: str, status: int) -> None:
        self.http[route, status] = self.http.get((route, status), 0) + 1

    def set_engine(self, values: dict[str, float]) -> None:
        """Gauges and counters by the names in `_ENGINE_GAUGES` and `_ENGINE_COUNTERS`."""
        self._engine = values

    def render(self) -> bytes:
        """The text exposition format (content type `prometheus_client.CONTENT_TYPE_LATEST`)."""
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        label, model = ["model_name"], [self._model_name]
        for name, help_text in _ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(f"detour_{name}", help_text, labels=label)
            gauge.add_metric(model, self._engine.get(name, 0.0))
            yield gauge
        counters = dict(self._engine)
        counters["prompt_tokens"] = self.prompt_tokens
        counters["cached_tokens"] = self.cached_tokens
        counters["generation_tokens"] = self.generation_tokens
        for name, help_text in _COUNTERS.items():
            counter = CounterMetricFamily(f"detour_{name}", help_text, labels=label)
            counter.add_metric(model, counters.get(name, 0.0))
            yield counter
        requests = CounterMetricFamily(
            "detour_requests", "Sequences that ended.", labels=[*label, "finished_reason"]
        )
        for reason, count in sorted(self.finished.items()):
            requests.add_metric([*model, reason], count)
        yield requests
        responses = CounterMetricFamily(
            "detour_http_responses", "HTTP responses.", labels=["route", "status"]
        )
        for (route, status), count in sorted(self.http.items()):
            responses.add_metric([route, str(status)], count)
        yield responses
        for name, (help_text, histogram) in self._histograms().items():
            family = HistogramMetricFamily(f"detour_{name}", help_text, labels=label)
            family.add_metric(model, histogram.cumulative(), histogram.sum)
            yield family

    def _histograms(self) -> dict[str, tuple[str, Histogram]]:
        return {
            "time_to_first_token_seconds": ("From arrival to the first token.", self.ttft),
            "inter_token_latency_seconds": ("Between tokens of a sequence.", self.inter_token),
            "e2e_request_latency_seconds": ("From arrival to the last token.", self.e2e),
            "request_prompt_tokens": ("Prompt tokens of a sequence.", self.prompt_length),
            "request_generation_tokens": ("Tokens a sequence generated.", self.generation_length),
        }


class _Families(Collector):
    """Our families, each followed by its copies under the names of other servers."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        for family in self._metrics.families():
            yield family
            for alias in _ALIASES.get(family.name.removeprefix("detour_"), ()):
                copy = Metric(alias, family.documentation, family.type)
                for sample in family.samples:
                    copy.samples.append(
                        sample._replace(name=alias + sample.name.removeprefix(family.name))
                    )
                yield copy


_ENGINE_GAUGES = {
    "requests_running": "Sequences in a slot.",
    "requests_waiting": "Sequences that wait for one.",
    "token_usage": "Share of the KV cache's pages that sequences hold, 0 to 1.",
    "used_tokens": "Tokens' worth of KV pages that sequences hold.",
    "capacity_tokens": "Tokens that the KV cache can hold.",
    "cached_prefix_tokens": "Tokens' worth of pages that hold prefixes no sequence uses now.",
    "cache_hit_rate": "Share of all prompt tokens so far that came from the prefix cache, 0 to 1.",
    "generation_throughput": "Tokens generated per second over the last seconds.",
    "step_seconds": "How long the last step took.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of sequences that ended, cached ones included.",
    "cached_tokens": "Of them, tokens whose KV came from the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "steps": "Forward passes.",
    "preemptions": "Sequences put back to the queue for want of pages.",
    "evicted_pages": "Pages of cached prefixes given up for new tokens.",
    "healed": "Page-pool accounting faults found and repaired.",
}
_ALIASES: dict[str, tuple[str, ...]] = {
    "requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "token_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "used_tokens": ("sglang:num_used_tokens",),
    "capacity_tokens": ("sglang:max_total_num_tokens",),
    "cache_hit_rate": ("sglang:cache_hit_rate",),
    "generation_throughput": ("sglang:gen_throughput",),
    "prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries", "sglang:prompt_tokens"),
    "cached_tokens": ("vllm:prefix_cache_hits", "sglang:cached_tokens"),
    "generation_tokens": ("vllm:generation_tokens", "sglang:generation_tokens"),
    "preemptions": ("vllm:num_preemptions", "sglang:num_retracted_requests"),
    "requests": ("vllm:request_success", "sglang:num_requests"),
    "time_to_first_token_seconds": (
        "vllm:time_to_first_token_seconds",
        "sglang:time_to_first_token_seconds",
    ),
    "inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
    ),
    "e2e_request_latency_seconds": (
        "vllm:e2e_request_latency_seconds",
        "sglang:e2e_request_latency_seconds",
    ),
    "request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "request_generation_tokens": ("vllm:request_generation_tokens",),
}
