"""Rows and ratios of `bench/peers.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from peer_own import MODES

BLENDED = tuple(name for name, mode in MODES.items() if mode.mode != "full")


def own_row(mode: str, tokens: int, ttft_ms: Sequence[float], rate: float | None) -> dict[str, Any]:
    """One of kvblend's modes."""
    how = MODES[mode]
    return _row("kvblend", mode, tokens, ttft_ms, rate) | {"selector": how.selector, "ratio": how.ratio}


def peer_row(engine: str, tokens: int, ttft_ms: Sequence[float], rate: float | None) -> dict[str, Any]:
    """A peer's full prefill."""
    return _row(engine, "full", tokens, ttft_ms, rate) | {"selector": "none", "ratio": None}


def _row(engine: str, mode: str, tokens: int, ttft_ms: Sequence[float], rate: float | None) -> dict[str, Any]:
    return {
        "engine": engine,
        "mode": mode,
        "tokens": tokens,
        "ttft_ms_median": statistics.median(ttft_ms),
        "ttft_ms_min": min(ttft_ms),
        "ttft_ms": list(ttft_ms),
        "requests_per_s": rate,
    }


def ratios(ttft_ms: Mapping[str, float], rate: Mapping[str, float]) -> dict[str, float]:
    """How many times faster each mode is: `MODE/own_full` and `MODE/best_peer` by first token, `.../rate` by requests.

    `full/transformers` is the time of one's own full prefill in units of transformers'. What was not measured is not
    there.
    """
    peers = [time for name, time in ttft_ms.items() if name not in MODES]
    peer_rates = [value for name, value in rate.items() if name not in MODES]
    found: dict[str, float] = {}
    for mode in BLENDED:
        found[f"{mode}/own_full"] = ttft_ms["full"] / ttft_ms[mode]
        if peers:
            found[f"{mode}/best_peer"] = min(peers) / ttft_ms[mode]
        if mode in rate and "full" in rate:
            found[f"{mode}/own_full/rate"] = rate[mode] / rate["full"]
        if mode in rate and peer_rates:
            found[f"{mode}/best_peer/rate"] = rate[mode] / max(peer_rates)
    if "transformers" in ttft_ms:
        found["full/transformers"] = ttft_ms["full"] / ttft_ms["transformers"]
    return found
