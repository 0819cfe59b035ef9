"""What `gpu_check.py` finds: one line per check, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass
class Check:
    """One line of the table. `error` is relative; `limit` is what it may be, or must exceed for a "differs" check."""

    name: str
    backend: str
    dtype: str
    error: float
    limit: float
    ok: bool


def print_table(checks: Sequence[Check], facts: Mapping[str, str], timings: Mapping[str, float]) -> None:
    """What was found, for a person."""
    for name, fact in facts.items():
        print(f"{name:<9} {fact}")
    print(f"\n{'check':<22} {'backend':<9} {'dtype':<9} {'error':>9} {'limit':>9}")
    for c in checks:
        print(f"{c.name:<22} {c.backend:<9} {c.dtype:<9} {c.error:>9.1e} {c.limit:>9.1e}  {'ok' if c.ok else 'FAILED'}")
    print("\n" + "   ".join(f"{name}: {ms:.1f} ms" for name, ms in timings.items()))
    failed = sum(not check.ok for check in checks)
    print(f"{failed} of {len(checks)} checks FAILED" if failed else f"all {len(checks)} checks passed")
