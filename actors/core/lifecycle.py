"""The life of a request as one table."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


TERMINAL_PHASES = frozenset({Phase.FINISHED, Phase.CANCELLED, Phase.FAILED})

# QUEUED stands behind LOADING and PREFILLING too: a request goes back to the queue when it must wait for a chunk that
# is being computed, or when a chunk it was blending turns out damaged. Never after its first token.
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.LOADING, *TERMINAL_PHASES}),
    Phase.LOADING: frozenset({Phase.QUEUED, Phase.PREFILLING, *TERMINAL_PHASES}),
    Phase.PREFILLING: frozenset({Phase.QUEUED, Phase.DECODING, *TERMINAL_PHASES}),
    Phase.DECODING: TERMINAL_PHASES,
    Phase.FINISHED: frozenset(),
    Phase.CANCELLED: frozenset(),
    Phase.FAILED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A request was moved to a phase that its present one does not lead to."""


def check_transition(request_id: str, before: Phase, after: Phase) -> None:
    """Raise IllegalTransition unless the table allows it."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"request {request_id} cannot go from {before} to {after}")
