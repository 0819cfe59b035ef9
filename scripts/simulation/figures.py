"""What a simulated run comes to: waiting, throughput, hits, deadlines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvblend.actors.messages import Finished, Usage
from simulation.world import Ended, Outcome

BINS = 60


def summarize(outcome: Outcome, policy: str) -> dict[str, Any]:
    """The figures of one policy, in seconds and shares; what nobody had is None."""
    ended = outcome.ended
    answered = [one for one in ended if isinstance(one.terminal, Finished) and one.terminal.reason != "cancelled"]
    usages = [one.terminal.usage for one in answered if isinstance(one.terminal, Finished)]
    codes = Counter(_ending(one) for one in ended)
    bound = [one for one in ended if one.bound]
    met = sum(1 for one in bound if _ending(one) == "answered")
    hits, misses = sum(usage.chunk_hits for usage in usages), sum(usage.chunk_misses for usage in usages)
    span = max((one.ended_s for one in ended), default=0.0)
    return {
        "policy": policy,
        "requests": len(ended),
        "endings": dict(sorted(codes.items())),
        "requests_per_s": len(answered) / span if span else 0.0,
        "wait_s": _spread([usage.queue_ms / 1e3 for usage in usages]),
        "first_token_s": _spread([usage.ttft_ms / 1e3 for usage in usages]),
        "total_s": _spread([usage.total_ms / 1e3 for usage in usages]),
        "chunk_hit_ratio": hits / (hits + misses) if hits + misses else None,
        "memory_hit_ratio": _in_memory(usages),
        "deadlines_met": met / len(bound) if bound else None,
        "device_busy": outcome.busy_s / outcome.simulated_s if outcome.simulated_s else 0.0,
        "steps": outcome.steps,
        "read_bytes": outcome.bytes_read,
        "simulated_s": outcome.simulated_s,
        "events": outcome.events,
        "events_per_s": outcome.events / outcome.cpu_s if outcome.cpu_s else 0.0,
    }


def _in_memory(usages: Sequence[Usage]) -> float | None:
    """The share of all looked-up segments that lay in memory."""
    looked = sum(sum(usage.tiers.values()) + usage.chunk_misses for usage in usages)
    return sum(usage.tiers.get("host", 0) for usage in usages) / looked if looked else None


def _ending(one: Ended) -> str:
    """How a request ended, in a word."""
    if one.terminal is None:
        return "refused"
    if isinstance(one.terminal, Finished):
        return "cancelled" if one.terminal.reason == "cancelled" else "answered"
    return one.terminal.code


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": math.fsum(ordered) / len(ordered),
        "p50": quantile(ordered, 0.5),
        "p99": quantile(ordered, 0.99),
        "max": ordered[-1],
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of ascending values that at least this share does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def over_time(outcome: Outcome) -> dict[str, list[float]]:
    """`BINS` spans of the simulated time: their ends, answers per second and share of chunks in memory in each."""
    width = max((one.ended_s for one in outcome.ended), default=0.0) / BINS or 1.0
    spans: list[list[Usage]] = [[] for _ in range(BINS)]
    for one in outcome.ended:
        if isinstance(one.terminal, Finished):
            spans[min(BINS - 1, int(one.ended_s / width))].append(one.terminal.usage)
    shares = [_in_memory(usages) for usages in spans]
    return {
        "at_s": [width * (place + 1) for place in range(BINS)],
        "requests_per_s": [len(usages) / width for usages in spans],
        "memory_hit_ratio": [math.nan if share is None else share for share in shares],
    }


def first_tokens(outcome: Outcome) -> list[float]:
    """Seconds to the first token of each answered request, ascending."""
    ends = [one.terminal for one in outcome.ended]
    return sorted(end.usage.ttft_ms / 1e3 for end in ends if isinstance(end, Finished) and end.usage.ttft_ms)
