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
TOKENS_TINY = 128
"""Of shorter prompts most of the time is a step's fixed part: what a token of them takes says nothing of long ones."""


class Mean:
    """A running mean in which old samples fade; None before the first. `weight` is what a new one counts.

    Tiny samples are better than nothing: they count until the first other one, which takes their place.
    """

    def __init__(self, weight: float) -> None:
        self.value: float | None = None
        self._weight = weight
        self._only_tiny = True

    @property
    def settled(self) -> float | None:
        """The mean, where it is one of samples that are not tiny."""
        return None if self._only_tiny else self.value

    def note(self, sample: float, *, tiny: bool = False) -> None:
        """One more sample."""
        if tiny and not self._only_tiny:
            return
        anew = self.value is None or (self._only_tiny and not tiny)
        self._only_tiny = tiny
        self.value = sample if anew or self.value is None else (1 - self._weight) * self.value + self._weight * sample


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

    Blends and full prefills are kept apart: rows that are scattered over a long prompt cost more than neighbours. Of
    fewer rows than `TOKENS_TINY` most of the time is no row's: such prefills, and what was profiled with a short blend
    at the start, stand in until there is a longer one. Of those the cheapest is nearest to the truth.
    """

    def __init__(self) -> None:
        self._profiled: float | None = None
        self._blend, self._full = Mean(WEIGHT), Mean(WEIGHT)

    def note(self, rows: float, seconds: float, *, blend: bool) -> None:
        """A prefill computed what `rows` rows through all layers are; `seconds` of device time."""
        if rows <= 0 or seconds < SAMPLE_COMPUTE_S_MIN:
            return
        (self._blend if blend else self._full).note(seconds / rows, tiny=rows < TOKENS_TINY)

    def profile(self, rows: float, seconds: float) -> None:
        """A blend of the start, before any request, computed what `rows` rows through all layers are."""
        if rows > 0 and seconds >= SAMPLE_COMPUTE_S_MIN:
            self._profiled = seconds / rows

    @property
    def blend_row_s(self) -> float | None:
        """Seconds per row in a blend, reading and choosing included; None where nothing is known of any."""
        if self._blend.settled is not None:
            return self._blend.settled
        known = _known(self._profiled, self._blend.value)
        if not known:
            return None
        # a short prompt's row sees few keys, and costs more behind a long one
        return min(known) if self._full.settled is None else max(self._profiled or 0.0, self._full.settled)

    @property
    def row_s(self) -> float | None:
        """Seconds per row wherever it is computed, the higher one of what is known."""
        settled = _known(self._blend.settled, self._full.settled)
        short = _known(self._profiled, self._blend.value, self._full.value)
        return max(settled) if settled else min(short, default=None)


def _known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]
