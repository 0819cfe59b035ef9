"""Requests before they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Behaviour = Literal["normal", "cancel", "disconnect", "slow"]


class BadData(Exception):
    """The data set cannot be used; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: `chunks` are places in the pool; `at_s` is when it is due, after `stop_after` deltas it stops."""

    index: int
    question: str
    chunks: tuple[int, ...] = ()
    output_tokens: int = 128
    at_s: float = 0.0
    behaviour: Behaviour = "normal"
    stop_after: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that one rate sends: `warmups` before, uncounted, then `jobs`."""

    pool: tuple[str, ...]
    jobs: tuple[Job, ...]
    warmups: tuple[Job, ...] = ()
