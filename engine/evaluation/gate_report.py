"""What the gate of a model found: checks with value, limit and reason, and how they are written down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One check: `value` must not exceed `limit`. `reason` says what was compared, and is never empty."""

    name: str
    value: float
    limit: float
    passed: bool
    reason: str

    @classmethod
    def of(cls, name: str, value: float, limit: float, compared: str) -> Self:
        """Judge a value; one that is no number does not pass."""
        return cls(name, value, limit, value <= limit, f"{compared}: {value:.3g} (at most {limit:.3g})")


@dataclass(frozen=True, slots=True)
class GateReport:
    """All checks of one model at one setting."""

    checks: tuple[GateCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether there are checks and all passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What failed, in words, with the check's name."""
        return tuple(f"{check.name}: {check.reason}" for check in self.checks if not check.passed)

    def to_fields(self) -> list[dict[str, Any]]:
        """Plain values, for a file; values that are no finite number become None."""
        fields = [asdict(check) for check in self.checks]
        return [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in check.items()}
            for check in fields
        ]

    @classmethod
    def from_fields(cls, fields: Sequence[Mapping[str, Any]]) -> Self:
        """The report of `to_fields`. Raises KeyError, TypeError or ValueError for anything else."""
        checks = []
        for one in fields:
            value, limit = (math.inf if one[key] is None else float(one[key]) for key in ("value", "limit"))
            checks.append(GateCheck(str(one["name"]), value, limit, one["passed"] is True, str(one["reason"])))
        return cls(tuple(checks))
