"""The Prometheus metrics of one server, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvblend.actors.messages import Usage
from kvblend.api.server.gate import Gate
from kvblend.api.server.port import SystemPort

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "kvblend:"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_RATIOS = (0.0, 0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
_NATS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_STORE_TIERS = ("host", "disk", "remote")


class Metrics:
    """What happened, counted; and a system's state, read when somebody asks."""

    def __init__(self, system: SystemPort, gate: Gate) -> None:
        self.registry = registry = CollectorRegistry()

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _SECONDS, *labels: str) -> Histogram:
            return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        self.ttft = seconds("time_to_first_token_seconds", "From acceptance to the first token.")
        self.itl = seconds("inter_token_latency_seconds", "Between tokens as they reach the wire.", _STEPS)
        self.e2e = seconds("e2e_request_latency_seconds", "From acceptance to the end.")
        self.queue = seconds("request_queue_time_seconds", "From acceptance to admission.")
        self.load = seconds("kv_load_seconds", "Loading stored KV, by the slowest tier it came from.", _SECONDS, "tier")
        self.ratio = Histogram(
            f"{PREFIX}blend_recompute_ratio",
            "Share of the tokens of reused chunks that was computed anew.",
            buckets=_RATIOS,
            registry=registry,
        )
        self.divergence = Histogram(
            f"{PREFIX}blend_divergence",
            "Estimated KL from a full prefill, where a request bounds it, in nats per token.",
            buckets=_NATS,
            registry=registry,
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.output_tokens = counter("generation_tokens", "Tokens generated.")
        self.reused = counter("blend_reused_tokens", "Prompt tokens whose stored KV was used, by tier.", "tier")
        self.recomputed = counter("blend_recomputed_tokens", "Tokens with stored KV that were computed anew.")
        self.lookups = counter("chunk_lookup", "Chunks looked up for a prompt.", "result")
        self.finished = counter("request_success", "Requests that ended well, by reason.", "finished_reason")
        self.failed = counter("request_failure", "Requests refused or failed, by error code.", "code")
        self.connections = Gauge(f"{PREFIX}open_streams", "Answers being read.", registry=registry)
        registry.register(_State(system, gate))
        for result in ("hit", "miss"):
            self.lookups.labels(result)

    def count_end(self, reason: str, usage: Usage, *, generate: bool) -> None:
        """Count a request that ended without a failure."""
        self.finished.labels(reason).inc()
        if not generate:
            return
        self.e2e.observe(usage.total_ms / 1e3)
        self.queue.observe(usage.queue_ms / 1e3)
        if usage.ttft_ms:
            self.ttft.observe(usage.ttft_ms / 1e3)
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.output_tokens.inc(usage.output_tokens)
        self.lookups.labels("hit").inc(usage.chunk_hits)
        self.lookups.labels("miss").inc(usage.chunk_misses)
        self.recomputed.inc(usage.tokens_recomputed)
        for tier, tokens in share_out(usage.tokens_reused, usage.tier_tokens).items():
            self.reused.labels(tier).inc(tokens)
        taken = usage.tokens_reused + usage.tokens_recomputed
        if taken:
            self.ratio.observe(usage.tokens_recomputed / taken)
        if usage.kl_estimate is not None:
            self.divergence.observe(usage.kl_estimate)
        if usage.tiers:
            slowest = max(usage.tiers, key=lambda tier: _STORE_TIERS.index(tier) if tier in _STORE_TIERS else -1)
            self.load.labels(slowest).observe(usage.load_ms / 1e3)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


def share_out(total: int, weights: Mapping[str, int]) -> dict[str, int]:
    """`total` split in proportion to `weights`; the parts add up to it. All of it is `unknown` without weights."""
    whole = sum(weights.values())
    if not whole:
        return {"unknown": total} if total else {}
    parts = {name: total * weight // whole for name, weight in weights.items()}
    parts[max(weights, key=lambda name: weights[name])] += total - sum(parts.values())
    return parts


class _State(Collector):
    """Figures of the system at the moment of the question."""

    def __init__(self, system: SystemPort, gate: Gate) -> None:
        self._system = system
        self._gate = gate

    def describe(self) -> list[Metric]:
        """Nothing ahead of time: a system that starts has no figures yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family for each kind of figure."""
        figures = self._system.figures()
        yield from self._engine(figures.get("engine", {}))
        yield from self._store(figures.get("store", {}), figures.get("device_pool", {}))
        depth = GaugeMetricFamily(f"{PREFIX}actor_mailbox_depth", "Messages that wait.", labels=["actor"])
        restarts = CounterMetricFamily(f"{PREFIX}actor_restarts", "Restarts after a crash.", labels=["actor"])
        for name, value in figures.get("actors", {}).items():
            actor, _, figure = name.rpartition(".")
            if figure == "depth":
                depth.add_metric([actor], value)
            elif figure == "restarts":
                restarts.add_metric([actor], value)
        yield depth
        yield restarts
        text = "Connections cut because their client did not read."
        yield CounterMetricFamily(f"{PREFIX}ws_slow_consumer", text, value=self._gate.slow_consumers)

    def _engine(self, engine: Mapping[str, float]) -> Iterator[Metric]:
        for name, text in (
            ("num_requests_running", "Requests in the engine."),
            ("num_requests_waiting", "Requests that wait to be admitted."),
            ("kv_tokens_used", "KV slots of running requests."),
            ("kv_tokens_kept", "KV slots that finished answers keep for the next turn."),
            ("ratio_lever", "How far load presses the recompute ratio towards its floor, 0 to 1."),
        ):
            if name in engine:
                yield GaugeMetricFamily(PREFIX + name, text, engine[name])

    def _store(self, store: Mapping[str, float], pool: Mapping[str, float]) -> Iterator[Metric]:
        tiers = GaugeMetricFamily(f"{PREFIX}kv_tier_bytes", "Bytes of stored KV.", labels=["tier"])
        for tier in _STORE_TIERS:
            if f"{tier}_bytes" in store:
                tiers.add_metric([tier], store[f"{tier}_bytes"])
        if pool:
            tiers.add_metric(["device_pool"], pool["num_bytes"])
            yield CounterMetricFamily(f"{PREFIX}device_pool_hits", "Chunks found on the device.", value=pool["hits"])
            text = "Chunks that left the device for others."
            yield CounterMetricFamily(f"{PREFIX}device_pool_evictions", text, value=pool["evictions"])
        yield tiers
        if "chunks" in store:
            yield GaugeMetricFamily(f"{PREFIX}chunks", "Chunks stored.", store["chunks"])
