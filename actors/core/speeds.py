"""How fast things are, measured while they run: tiers by their reads, computing by finished prefills."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.3
"""What a new sample counts against all before it."""
SAMPLE_BYTES_MIN = 1 << 18
SAMPLE_BUSY_S_MIN = 0.02
"""A sample of a tier is at least this large: of a few small reads nothing can be learnt."""
SAMPLE_COMPUTE_S_MIN = 0.02
"""Shorter computing is mostly overhead."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """One tier: bytes per second while it is read, seconds before the first byte of a read, and when that was seen."""

    bytes_per_s: float
    latency_s: float
    at_s: float

    def load_s(self, num_bytes: int) -> float:
        """Seconds to read this many bytes."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


class TierMeter:
    """Throughput of one tier over the time in which at least one read is out, however many overlap."""

    def __init__(self) -> None:
        self._out = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0
        self._latency_s: float | None = None
        self._speed: TierSpeed | None = None

    def begin(self, at_s: float) -> None:
        """A read starts."""
        if not self._out:
            self._since_s = at_s
        self._out += 1

    def end(self, num_bytes: int, at_s: float) -> None:
        """A read is over; of one that failed count 0 bytes."""
        self._out -= 1
        self._busy_s += max(0.0, at_s - self._since_s)
        self._since_s = at_s
        self._bytes += num_bytes
        if self._bytes >= SAMPLE_BYTES_MIN and self._busy_s >= SAMPLE_BUSY_S_MIN:
            rate = self._bytes / self._busy_s
            if self._speed is not None:
                # times are averaged, not rates: one fast sample must not hide a slow tier
                rate = 1.0 / ((1.0 - WEIGHT) / self._speed.bytes_per_s + WEIGHT / rate)
            self._speed = TierSpeed(rate, self._latency_s or 0.0, at_s)
            self._bytes, self._busy_s = 0, 0.0

    def note_latency(self, seconds: float) -> None:
        """A small read (a chunk's header) took this long."""
        before = seconds if self._latency_s is None else self._latency_s
        self._latency_s = (1.0 - WEIGHT) * before + WEIGHT * seconds

    @property
    def speed(self) -> TierSpeed | None:
        """What is known; None before the first sample."""
        return self._speed


class ComputeMeter:
    """Seconds per prompt row through all layers, of prefills that had the device to themselves.

    Blends and full prefills are kept apart: rows that are scattered over a long prompt cost more than neighbours. What
    was profiled with a short blend at the start stands in for blends until there is one.
    """

    def __init__(self) -> None:
        self._profiled: float | None = None
        self._blend: float | None = None
        self._full: float | None = None

    def note(self, rows: float, seconds: float, *, blend: bool) -> None:
        """A prefill computed what `rows` rows through all layers are; `seconds` of device time."""
        if rows <= 0 or seconds < SAMPLE_COMPUTE_S_MIN:
            return
        sample = seconds / rows
        if blend:
            self._blend = sample if self._blend is None else (1.0 - WEIGHT) * self._blend + WEIGHT * sample
        else:
            self._full = sample if self._full is None else (1.0 - WEIGHT) * self._full + WEIGHT * sample

    def profile(self, rows: float, seconds: float) -> None:
        """A blend of the start, before any request, computed what `rows` rows through all layers are."""
        if rows > 0 and seconds >= SAMPLE_COMPUTE_S_MIN:
            self._profiled = seconds / rows

    @property
    def blend_row_s(self) -> float | None:
        """Seconds per row in a blend, reading and choosing included; None where nothing is known of any."""
        if self._blend is not None or self._profiled is None:
            return self._blend
        # the profile's prompt was short, and a row costs more behind a long one
        return max(self._profiled, self._full or 0.0)

    @property
    def row_s(self) -> float | None:
        """Seconds per row wherever it is computed, the higher one of what is known."""
        return max((value for value in (self._blend, self._full) if value is not None), default=self._profiled)
