from __future__ import annotations

import math
from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.api.server.fields import Fields, check_text, show

KNOWN = ("a", "b")


def fields(**values: Any) -> Fields:
    return Fields(values, "top", KNOWN)


@pytest.mark.parametrize("value", ["1", True, None, [], math.nan, math.inf, -0.1, 1.1, 10**400, -(10**400)])
def test_numbers_must_be_finite_and_in_range(value: object) -> None:
    if value is None:
        assert fields(a=value).number("a", 0, 1) is None
        return
    with pytest.raises(RequestError, match=r"^top\.a: ") as caught:
        fields(a=value).number("a", 0, 1)
    assert caught.value.param == "top.a"


@pytest.mark.parametrize("value", [0, 1, 0.5])
def test_numbers_in_range_are_floats(value: float) -> None:
    assert fields(a=value).number("a", 0, 1) == value


def test_a_lower_end_can_be_excluded() -> None:
    with pytest.raises(RequestError, match="above 0 and at most 1"):
        fields(a=0).number("a", 0, 1, above=True)


@pytest.mark.parametrize("value", ["1", True, 1.0, 0, 11, 10**400])
def test_integers_must_be_whole_and_in_range(value: object) -> None:
    with pytest.raises(RequestError, match=r"^top\.a: "):
        fields(a=value).integer("a", 1, 10)


@pytest.mark.parametrize("value", [1, b"x", "", "  ", "abcd", "\ud800"])
def test_texts_must_be_writable_short_and_not_blank(value: object) -> None:
    with pytest.raises(RequestError, match=r"^here: "):
        check_text(value, "here", chars_max=3)


@pytest.mark.parametrize("value", [0, "true", [], 1])
def test_flags_must_be_booleans(value: object) -> None:
    with pytest.raises(RequestError, match="must be true or false"):
        fields(a=value).flag("a")


@pytest.mark.parametrize("value", ["z", 1, ["x"], ""])
def test_choices_name_what_is_allowed(value: object) -> None:
    with pytest.raises(RequestError, match="choose one of x, y"):
        fields(a=value).choice("a", ("x", "y"))


def test_lists_have_a_limit() -> None:
    with pytest.raises(RequestError, match="has 3 items; the limit is 2"):
        fields(a=[1, 2, 3]).array("a", 2)
    with pytest.raises(RequestError, match="must be a list"):
        fields(a="abc").array("a", 2)


def test_an_unknown_field_is_named_with_its_path() -> None:
    with pytest.raises(RequestError, match="known: a, b") as caught:
        fields(c=1)
    assert caught.value.param == "top.c"


@pytest.mark.parametrize("value", [[], "x", None, 3])
def test_only_objects_have_fields(value: object) -> None:
    with pytest.raises(RequestError, match="must be an object"):
        Fields(value, "top", KNOWN)


def test_null_reads_as_absent() -> None:
    assert not fields(a=None).has("a")
    assert fields(a=None).text("a") is None


def test_long_values_are_shown_shortened() -> None:
    assert len(show("x" * 10_000)) == 60
