"""Numbers a remote tier tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WEIGHT = 0.2
"""Share of the newest measurement in a moving mean."""
MEASURED_BYTES_MIN = 1 << 16
"""Shorter answers say more about latency than about throughput."""

RemoteState = Literal["idle", "up", "down", "closed"]


@dataclass(frozen=True, slots=True)
class RemoteFigures:
    """A moment's state, and the counts since the tier was opened. All `*_bytes` and `bytes_*` are bytes.

    `state` is `idle` before the first contact, and `down` while the server is left alone. `hits` and `misses` count
    lookups that the server answered, `skipped` operations that were not tried as it is down, `errors` those that
    failed, `damaged` chunks that were not as they were written. `latency_ms` is of a lookup, `read_mb_s` (10^6 bytes
    per second) of layers; both are moving means, 0 before the first. `bytes_budget` (0: none) and `bytes_used` are the
    server's own, as of the last write.
    """

    state: RemoteState
    hits: int
    misses: int
    skipped: int
    errors: int
    damaged: int
    writes: int
    writes_failed: int
    removed: int
    bytes_read: int
    bytes_written: int
    latency_ms: float
    read_mb_s: float
    bytes_budget: int
    bytes_used: int


@dataclass(slots=True)
class RemoteCounts:
    """The counts behind `RemoteFigures`."""

    hits: int = 0
    misses: int = 0
    skipped: int = 0
    errors: int = 0
    damaged: int = 0
    writes: int = 0
    writes_failed: int = 0
    removed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_budget: int = 0
    bytes_used: int = 0
    latency_s: float = 0.0
    bytes_per_s: float = 0.0

    def note_lookup(self, seconds: float) -> None:
        """A lookup was answered after so long."""
        self.latency_s = _mean(self.latency_s, seconds)

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """So many bytes of layers came in so long."""
        self.bytes_read += num_bytes
        if num_bytes >= MEASURED_BYTES_MIN and seconds > 0:
            self.bytes_per_s = _mean(self.bytes_per_s, num_bytes / seconds)

    def figures(self, state: RemoteState) -> RemoteFigures:
        """A snapshot."""
        return RemoteFigures(
            state=state,
            hits=self.hits,
            misses=self.misses,
            skipped=self.skipped,
            errors=self.errors,
            damaged=self.damaged,
            writes=self.writes,
            writes_failed=self.writes_failed,
            removed=self.removed,
            bytes_read=self.bytes_read,
            bytes_written=self.bytes_written,
            latency_ms=1e3 * self.latency_s,
            read_mb_s=self.bytes_per_s / 1e6,
            bytes_budget=self.bytes_budget,
            bytes_used=self.bytes_used,
        )


def _mean(old: float, new: float) -> float:
    return new if old == 0.0 else old + WEIGHT * (new - old)
