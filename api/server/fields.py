"""Reading the fields of an object from outside: each wrong one is an error with its path, its value and the limit."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from kvblend.actors.errors import RequestError

_SHOWN_CHARS = 60


def invalid(path: str, message: str) -> RequestError:
    """The error of a field: the message begins with its path, which is also the `param`."""
    return RequestError("invalid_request", f"{path}: {message}" if path else message, path or None)


def show(value: object) -> str:
    """A short repr of a value from outside."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def check_text(value: object, path: str, *, chars_max: int | None = None, blank: bool = False) -> str:
    """A string that can be written as UTF-8, not longer than `chars_max`, and not blank unless `blank`."""
    if not isinstance(value, str):
        raise invalid(path, f"must be a string, not {show(value)}")
    if chars_max is not None and len(value) > chars_max:
        raise invalid(path, f"has {len(value)} characters; the limit is {chars_max}")
    if not blank and not value.strip():
        raise invalid(path, "is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(path, f"holds a lone surrogate at character {error.start}: not valid text") from error
    return value


PREVIOUS = "previous_response_id"
Places = Sequence[tuple[str, str]]
"""Pairs of paths: the engine's, and the sender's of the same thing."""


def relocate(error: RequestError, places: Places) -> RequestError:
    """The error with its path as the sender knows it, where the engine calls the field something else."""
    param = error.param
    if param is None:
        return error
    for ours, theirs in sorted(places, key=lambda pair: -len(pair[0])):
        rest = param.removeprefix(ours)
        if param.startswith(ours) and rest[:1] in ("", ".", "["):
            # a part of a message has no fields of its own, nor has what an earlier response brings
            there = theirs if theirs.endswith((".text", PREVIOUS)) else theirs + rest
            message = error.message.replace(param, there)
            return RequestError(error.code, message, there, error.retry_after_s)
    return error


class Fields:
    """One object from outside. A field that is absent or null reads as None; unknown names are refused at once."""

    def __init__(self, value: object, path: str, known: Collection[str]) -> None:
        if not isinstance(value, dict):
            raise invalid(path, f"must be an object, not {show(value)}")
        for name in value:
            if name not in known:
                where = self._join(path, name if isinstance(name, str) else repr(name))
                raise invalid(where, f"is not a known field; known: {', '.join(sorted(known))}")
        self._values = value
        self._path = path

    @staticmethod
    def _join(path: str, name: str) -> str:
        return f"{path}.{name}" if path else name[:_SHOWN_CHARS]

    def path(self, name: str) -> str:
        """The path of a field, for messages."""
        return self._join(self._path, name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        """The value as it came."""
        return self._values.get(name)

    def text(self, name: str, *, chars_max: int | None = None, blank: bool = False) -> str | None:
        """A string; see `check_text`."""
        value = self._values.get(name)
        return None if value is None else check_text(value, self.path(name), chars_max=chars_max, blank=blank)

    def flag(self, name: str) -> bool | None:
        """A boolean."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(self.path(name), f"must be true or false, not {show(value)}")
        return value

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A finite number in `low..high`; `above` excludes `low` itself."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(self.path(name), f"must be a number, not {show(value)}")
        # compared before it is converted: an integer from outside may be too large for a float
        if (
            (isinstance(value, float) and not math.isfinite(value))
            or not low <= value <= high
            or (above and value == low)
        ):
            span = f"above {low:g} and at most {high:g}" if above else f"in {low:g}..{high:g}"
            raise invalid(self.path(name), f"is {show(value)}; it must be a finite number {span}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in `low..high`."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(self.path(name), f"must be a whole number, not {show(value)}")
        if not low <= value <= high:
            raise invalid(self.path(name), f"is {show(value)}; it must lie in {low}..{high}")
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        """One of the allowed words."""
        value = self._values.get(name)
        if value is not None and (not isinstance(value, str) or value not in allowed):
            raise invalid(self.path(name), f"is {show(value)}; choose one of {', '.join(allowed)}")
        return value

    def array(self, name: str, items_max: int) -> list[object] | None:
        """A list of at most `items_max` items."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise invalid(self.path(name), f"must be a list, not {show(value)}")
        if len(value) > items_max:
            raise invalid(self.path(name), f"has {len(value)} items; the limit is {items_max}")
        return value
