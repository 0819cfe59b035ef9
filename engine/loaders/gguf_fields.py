"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvblend.engine.config import BadModelFile

T = TypeVar("T", int, float, str)


class Fields:
    """The metadata of the file at `path`; a missing or mistyped field is a BadModelFile that names it.

    `prefix` stands before the names that `need` and `get` are given.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def need(self, name: str, kind: type[T]) -> T:
        """The value of a field that must be there."""
        if self.prefix + name not in self.values:
            raise BadModelFile(f"{self.path}: the field {self.prefix}{name} is missing")
        return self.get(name, kind, kind())

    def get(self, name: str, kind: type[T], default: T) -> T:
        """The value of a field, `default` where it is not there."""
        value = self.values.get(self.prefix + name, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BadModelFile(
                f"{self.path}: the field {self.prefix}{name} is {value!r}; it must be of type {kind.__name__}"
            )
        return value
