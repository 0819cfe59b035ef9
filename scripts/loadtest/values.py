"""How the values of options are read; each says what is wrong with the one it refuses."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")


def number(text: str) -> float:
    """A number, `inf` included."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if math.isnan(value):
        raise argparse.ArgumentTypeError("nan is not a number")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    if (value := number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def not_negative(text: str) -> float:
    """A finite number from 0."""
    if not 0 <= (value := number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number from 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= (value := number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def whole(text: str, least: int = 0) -> int:
    """A whole number from `least`."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return value


def count(text: str) -> int:
    """A whole number from 1."""
    return whole(text, 1)


def span(text: str) -> tuple[int, int]:
    """`6`, or `4-8` for every number from 4 to 8."""
    low, dash, high = text.partition("-")
    first = whole(low)
    last = whole(high) if dash else first
    if last < first:
        raise argparse.ArgumentTypeError(f"{text}: {last} is below {first}")
    return first, last


def rates(text: str) -> tuple[float, ...]:
    """`0.5,1,inf`: requests per second, each above 0."""
    values = tuple(positive(part.strip()) for part in text.split(","))
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text} names a rate twice")
    return values


def percentiles(text: str) -> tuple[float, ...]:
    """`50,99,99.9`."""
    values = tuple(number(part.strip()) for part in text.split(","))
    if bad := [value for value in values if not 0 <= value <= 100]:
        raise argparse.ArgumentTypeError(f"{bad[0]:g} is not a percentile from 0 to 100")
    return values


def metrics(text: str) -> tuple[str, ...]:
    """Some of `ttft,tpot,itl,e2el`."""
    names = tuple(part.strip() for part in text.split(","))
    if bad := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r} is not one of {', '.join(METRICS)}")
    return names


def goal(text: str) -> tuple[str, float]:
    """`ttft:500`: a time in ms that a good request stays within."""
    name, _, value = text.partition(":")
    if name not in GOALS:
        raise argparse.ArgumentTypeError(f"{text!r}: {name!r} is not one of {', '.join(GOALS)}; write ttft:500")
    return name, not_negative(value)


def pair(text: str) -> tuple[str, str]:
    """`KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def mapping(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("is no JSON object")
    return value
