"""Fields of a configuration: typed, and named where they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvblend.engine.config import BadModelFile
from kvblend.engine.loaders.fields import get, mapping, maybe, need, numbers, positive

DATA: dict[str, Any] = {"whole": 3, "number": 1.5, "flag": True, "none": None, "list": [1, 2.5], "object": {"a": 1}}


def test_a_field_is_given_with_its_type() -> None:
    assert (need(DATA, "whole", int), get(DATA, "number", float, 0.0), maybe(DATA, "flag", bool)) == (3, 1.5, True)


def test_a_whole_number_passes_for_a_number() -> None:
    assert isinstance(need(DATA, "whole", float), float)


@pytest.mark.parametrize("name", ["none", "absent"])
def test_a_null_field_counts_as_missing(name: str) -> None:
    assert get(DATA, name, int, 7) == 7
    assert maybe(DATA, name, int) is None
    assert mapping(DATA, name) == {}


def test_lists_and_objects_are_read() -> None:
    assert numbers(DATA, "list") == (1.0, 2.5)
    assert mapping(DATA, "object") == {"a": 1}


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda: need(DATA, "none", int), "none is missing"),
        (lambda: need(DATA, "flag", int), "flag is True; it must be of type int"),
        (lambda: get(DATA, "number", int, 1), "number is 1.5; it must be of type int"),
        (lambda: get(DATA, "whole", bool, False), "whole is 3; it must be of type bool"),
        (lambda: positive({"x": 0}, "x"), "x is 0.0; it must be a positive number"),
        (lambda: positive({"x": float("inf")}, "x"), "x is inf"),
        (lambda: mapping(DATA, "whole"), "whole is 3; it must be an object"),
        (lambda: numbers(DATA, "absent"), "absent is None; it must be a list of numbers"),
        (lambda: numbers({"x": [1, "2"]}, "x"), "x holds '2'"),
    ],
)
def test_a_bad_field_is_named(read: Callable[[], object], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        read()
