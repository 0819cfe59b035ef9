"""What became of a request, and how its figures are read from what the server says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from loadtest.jobs import Behaviour, Job

Status = Literal["ok", "failed", "cancelled", "disconnected"]
Reuse = Literal["full_hit", "partial_hit", "cold", "unknown"]
FULL_SHARE = 0.9
"""Of the words of a prompt's chunks: where only a number of cached tokens is known, so many are a full hit."""


class RequestFailed(Exception):
    """The server refused a request or did not finish it."""


@dataclass(slots=True)
class Outcome:
    """Times are seconds since the run's start. It was due at `due_s`; the client was `lag_s` late."""

    index: int
    behaviour: Behaviour
    status: Status
    due_s: float
    lag_s: float
    sent_s: float
    first_s: float | None
    end_s: float
    gaps_s: list[float]
    input_tokens: int
    output_tokens: int
    estimated: bool
    reuse: Reuse
    cached_tokens: int
    text: str
    error: str = ""


@dataclass
class Recording:
    """Collects what comes for one job; `stamps` are the monotonic times of its pieces of text."""

    job: Job
    stamps: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    sent: float = 0.0

    def note(self, piece: str, now: float) -> bool:
        """Add a piece of text that came at `now`; whether the job wants to stop here."""
        self.stamps.append(now)
        self.pieces.append(piece)
        return 0 < self.job.stop_after <= len(self.stamps)


class Transport(Protocol):
    """A way to send requests."""

    async def run(self, job: Job, recording: Recording) -> Status:
        """Send one and read it to its end, or to where it wants to stop. Raises whatever went wrong."""
        ...

    async def close(self) -> None:
        """Close what is open."""
        ...


def classify(job: Job, pool: tuple[str, ...], recording: Recording) -> Reuse:
    """How much of the chunks' KV was there: by kvblend's own figures, else by the number of cached tokens."""
    own = recording.figures
    if "chunk_hits" in own and "chunk_misses" in own:
        if not own["chunk_hits"]:
            return "cold"
        return "partial_hit" if own["chunk_misses"] else "full_hit"
    prompt, cached = recording.usage.get("prompt_tokens"), cached_tokens(recording.usage)
    if not prompt or cached is None:
        return "unknown"
    if cached == 0:
        return "cold"
    in_chunks = sum(len(pool[place].split()) for place in job.chunks)
    share = in_chunks / max(1, in_chunks + len(job.question.split()))
    return "full_hit" if job.chunks and cached >= FULL_SHARE * share * prompt else "partial_hit"


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """`prompt_tokens_details.cached_tokens`, None where the server does not say."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


def settle(
    recording: Recording, pool: tuple[str, ...], status: Status, error: str, start: float, due: float, lag: float
) -> Outcome:
    """The outcome of a recording that ends now; `start` and `due` are monotonic times."""
    job, stamps, usage = recording.job, recording.stamps, recording.usage
    asked = sum(len(pool[place].split()) for place in job.chunks) + len(job.question.split())
    given, said = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Outcome(
        index=job.index,
        behaviour=job.behaviour,
        status=status,
        due_s=due - start,
        lag_s=lag,
        sent_s=recording.sent - start,
        first_s=stamps[0] - start if stamps else None,
        end_s=time.monotonic() - start,
        gaps_s=[after - before for before, after in itertools.pairwise(stamps)],
        input_tokens=given if isinstance(given, int) else asked,
        output_tokens=said if isinstance(said, int) else len(stamps),
        estimated=not isinstance(given, int) or not isinstance(said, int),
        reuse=classify(job, pool, recording),
        cached_tokens=cached_tokens(usage) or 0,
        text="".join(recording.pieces),
        error=error,
    )
