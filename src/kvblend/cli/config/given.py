"""A value that somebody gave, and where. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvblend.cli.failures import BadInput

Source = Literal["flag", "environment", "file"]


@dataclass(frozen=True, slots=True)
class Given:
    """`label` is what the user called it, `place` where it stands, e.g. `kv.toml, line 3`, or ""."""

    value: Any
    source: Source
    label: str
    place: str = ""

    def complain(self, said: str) -> BadInput:
        """The error that names it as it was given."""
        return BadInput(f"{self.place}: {self.label} {said}" if self.place else f"{self.label} {said}")

    def origin(self) -> str:
        """Where it came from, for people."""
        return f"{self.source} {self.place or self.label}"
