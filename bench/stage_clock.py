"""Times of the engine's stages in one process, by wrapping its functions while a measurement lasts."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from typing import Any, Self

from kvblend.engine import step
from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.kv import KVSlab
from kvblend.engine.model import Model
from kvblend.engine.precision import Precision
from kvblend.engine.residual import Residual
from kvblend.engine.selectors.picking import Picker
from kvblend.engine.sequence import SequenceState
from kvblend.engine.step import Step

# one stage per function; what a function calls of another stage counts there
STAGES: list[tuple[object, str, str]] = [
    (Model, "embed", "embed"),
    (Model, "project", "gemm"),
    (Model, "finish", "gemm"),
    (Model, "logits", "logits"),
    (SdpaBackend, "attend", "attention"),
    (SdpaBackend, "prepare", "plans"),
    (step, "attend_observed", "attention"),
    (step, "rotate", "rotate"),
    (step, "check_parity", "parity"),
    (Precision, "decode_into", "decode"),
    (Precision, "decode_rows_into", "decode"),
    (Residual, "__init__", "residual"),
    (Residual, "correct", "residual"),
    (KVSlab, "write", "write"),
    (Picker, "pick", "pick"),
    (SequenceState, "note_sensitivity", "sensitivity"),
    (Step, "run", "python"),
]


class StageClock:
    """Wraps the stages between `with` and its end; `seconds` holds each stage's own time.

    With more than one thread these are seconds of the wall clock.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        self._kept: list[tuple[object, str, Any]] = []

    def __enter__(self) -> Self:
        for owner, name, stage in STAGES:
            self._kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(getattr(owner, name), stage))
        return self

    def __exit__(self, *exc: object) -> None:
        while self._kept:
            setattr(*self._kept.pop())

    def reset(self) -> None:
        """Forget what was counted."""
        self.seconds.clear()

    def _timed(self, function: Any, stage: str) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **named)
            finally:
                took = time.perf_counter() - began
                self.seconds[stage] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed
