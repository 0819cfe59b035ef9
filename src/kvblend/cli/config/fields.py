"""All that can be set, read off the dataclasses that hold it: name, type, default, and how a value is read."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvblend.actors.settings import Settings
from kvblend.api.server.limits import ApiLimits
from kvblend.cli.config.server_options import ServerOptions
from kvblend.cli.folders import default_store_folder

OWNERS = (Settings, ServerOptions, ApiLimits)
_WHOLE_MAX = (1 << 63) - 1
# those of Settings it checks itself; all other numbers are limits of the wire
_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "requests_per_minute_max": (0, 1e9),
    "requests_running_max": (0, 1e9),
}
_RANGE_OF_LIMITS: dict[Any, tuple[float, float]] = {int: (1, _WHOLE_MAX), float: (0, 1e9)}
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_SECRETS = ("salt",)
_SECRET_ENDS = ("_key", "_keys", "_password", "_secret")


class BadValue(ValueError):
    """A value that its field cannot hold: the message goes on after the field's name."""


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that can be set. `owner` is the dataclass that it belongs to, `hint` its type there."""

    name: str
    owner: type
    hint: Any
    default: Any

    @property
    def secret(self) -> bool:
        """Whether its value is for nobody's eyes."""
        return self.name in _SECRETS or self.name.endswith(_SECRET_ENDS)

    def read(self, value: object) -> Any:
        """The value as the field holds it; text is read as the field's type. Raises BadValue."""
        try:
            out = _read(self.hint, value)
            span = _RANGES.get(self.name) or _RANGE_OF_LIMITS.get(self.hint)
            if span and self.owner in (ServerOptions, ApiLimits) and not span[0] <= out <= span[1]:
                raise BadValue(f"must lie in {span[0]:g}..{span[1]:g}")
            if self.name == "host" and not out.strip():
                raise BadValue("must be an address")
        except BadValue as error:
            shown = "" if self.secret else f"; it is {_shorten(value)}"
            raise BadValue(f"{error}{shown}") from None
        return out


@functools.cache
def known_fields() -> Mapping[str, Field]:
    """All fields by name, in the order they are shown in."""
    found: dict[str, Field] = {}
    for owner in OWNERS:
        hints = get_type_hints(owner)
        for field in fields(owner):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            found[field.name] = Field(field.name, owner, hints[field.name], default)
    return found


def default_of(field: Field) -> Any:
    """The default of the command line, which keeps chunks in the user's cache folder."""
    return default_store_folder() if field.name == "store" else field.default


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"`, or "" where nothing is near."""
    found = get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _shorten(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        # whole numbers beyond 4,300 digits have no text
        return "a very large number"
    return text if len(text) <= 60 else text[:57] + "..."


def _read(hint: Any, value: object) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _read_any(get_args(hint), value)
    if origin is Literal:
        return _choose(get_args(hint), value)
    if origin is tuple:
        return _read_list(get_args(hint)[0], value)
    return _READERS[hint](value)


def _read_any(hints: tuple[Any, ...], value: object) -> Any:
    said: list[str] = []
    for hint in hints:
        if hint is type(None):
            if value is None or value in ("", "none"):
                return None
            continue
        try:
            return _read(hint, value)
        except BadValue as error:
            said.append(str(error))
    raise BadValue(", or ".join([said[0], *(text.removeprefix("must be ") for text in said[1:])]))


def _choose(allowed: tuple[Any, ...], value: object) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise BadValue(f"must be {' or '.join(allowed)}")
    return value


def _read_list(hint: Any, value: object) -> tuple[Any, ...]:
    if isinstance(value, str):
        inner = value.strip().removeprefix("[").removesuffix("]")
        value = [part.strip() for part in inner.split(",")] if inner.strip() else []
    items = list(value) if isinstance(value, list | tuple) else [value]
    try:
        return tuple(_read(hint, item) for item in items)
    except BadValue as error:
        raise BadValue(f"must be a list; each item {error}") from None


def _read_bool(value: object) -> bool:
    word = value.strip().lower() if isinstance(value, str) else value
    if word is True or word in _YES:
        return True
    if word is False or word in _NO:
        return False
    raise BadValue("must be true or false")


def _read_int(value: object) -> int:
    with contextlib.suppress(ValueError):
        value = int(value) if isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValue("must be a whole number")
    if not -_WHOLE_MAX <= value <= _WHOLE_MAX:
        raise BadValue("must be a whole number of at most 64 bits")
    return value


def _read_float(value: object) -> float:
    try:
        if isinstance(value, str):
            return float(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise BadValue("must be a number")


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise BadValue("must be text")
    return value


def _read_path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise BadValue("must be a path")
    return Path(value).expanduser()


_READERS: dict[Any, Callable[[object], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_text,
    Path: _read_path,
}
