"""Typed fields of a `config.json`; what is missing or mistyped is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kvblend.engine.config import BadModelFile

T = TypeVar("T", int, float, str, bool)


def need(data: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """A field that must be there. Raises BadModelFile."""
    if data.get(name) is None:
        raise BadModelFile(f"{name} is missing")
    return get(data, name, kind, kind())


def get(data: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field, or `default` where it is missing or null. Whole numbers pass for float. Raises BadModelFile."""
    value = data.get(name)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise BadModelFile(f"{name} is {value!r}; it must be of type {kind.__name__}")
    return value


def maybe(data: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """A field, or None where it is missing or null. Raises BadModelFile."""
    return None if data.get(name) is None else need(data, name, kind)


def positive(data: Mapping[str, Any], name: str) -> float:
    """A number above 0 that must be there. Raises BadModelFile."""
    value = need(data, name, float)
    if not 0.0 < value < float("inf"):
        raise BadModelFile(f"{name} is {value}; it must be a positive number")
    return value


def mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object, empty where it is missing or null. Raises BadModelFile."""
    value = data.get(name) or {}
    if not isinstance(value, Mapping):
        raise BadModelFile(f"{name} is {value!r}; it must be an object")
    return value


def numbers(data: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """A list of numbers that must be there. Raises BadModelFile."""
    values = data.get(name)
    if not isinstance(values, list):
        raise BadModelFile(f"{name} is {values!r}; it must be a list of numbers")
    for value in values:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise BadModelFile(f"{name} holds {value!r}; it must be a list of numbers")
    return tuple(float(value) for value in values)
