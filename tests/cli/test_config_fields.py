from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblend.cli.config.fields import OWNERS, BadValue, Field, default_of, known_fields, nearest
from kvblend.cli.options import SETTING_OPTIONS


def test_no_two_owners_have_a_field_of_one_name() -> None:
    assert len(known_fields()) == sum(len(fields(owner)) for owner in OWNERS)


def test_every_default_can_be_read_back() -> None:
    assert {name: known.read(known.default) for name, known in known_fields().items()} == {
        name: known.default for name, known in known_fields().items()
    }


def test_every_flag_is_of_a_setting() -> None:
    assert set(SETTING_OPTIONS) - {"blend"} <= set(known_fields())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("threads", "3", 3),
        ("gate_kl_max", "1e-1", 0.1),
        ("gate_kl_max", 1, 1.0),
        ("force_blend", "yes", True),
        ("force_blend", "off", False),
        ("force_blend", True, True),
        ("check_layers", "1, 8", (1, 8)),
        ("check_layers", "[1,8]", (1, 8)),
        ("check_layers", [2], (2,)),
        ("check_layers", 2, (2,)),
        ("thresholds", "", ()),
        ("score_layers", "middle", "middle"),
        ("score_layers", "1,2", (1, 2)),
        ("allow_origin", ["https://a", "https://b"], ("https://a", "https://b")),
        ("store", "/tmp/x", Path("/tmp/x")),
        ("store", None, None),
        ("dtype", "bfloat16", "bfloat16"),
        ("separator", " # ", " # "),
        ("drain_grace_s", 0, 0.0),
    ],
)
def test_values_are_read_as_their_field_holds_them(name: str, text: object, value: object) -> None:
    found = known_fields()[name].read(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("threads", "many", "must be a whole number; it is 'many'"),
        ("threads", 1.5, "must be a whole number; it is 1.5"),
        ("threads", True, "must be a whole number; it is True"),
        ("gate_kl_max", "high", "must be a number; it is 'high'"),
        ("gate_kl_max", 1 << 2000, "must be a number"),
        ("force_blend", "perhaps", "must be true or false; it is 'perhaps'"),
        ("force_blend", 2, "must be true or false"),
        ("dtype", "int4", "must be float32 or bfloat16; it is 'int4'"),
        ("check_layers", [1, "x"], "must be a list; each item must be a whole number"),
        ("score_layers", "some", "must be a list; each item must be a whole number, or all or middle"),
        ("system", 3, "must be text; it is 3"),
        ("store", 3, "must be a path"),
        ("port", 65536, "must lie in 0..65535"),
        ("lanes_max", 0, "must lie in 1.."),
        ("host", "", "must be an address"),
        ("stall_s", -1.0, "must lie in 0..1e+09"),
        ("stall_s", float("nan"), "must lie in 0.."),
        ("stall_s", "inf", "must lie in 0.."),
        ("threads", {"a": 1}, "must be a whole number"),
        ("threads", 1 << 64, "must be a whole number of at most 64 bits"),
        ("store", "a\0b", "must be a path"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(name: str, text: object, said: str) -> None:
    with pytest.raises(BadValue) as caught:
        known_fields()[name].read(text)
    assert said in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(known_fields())), value=JSON)
def test_any_value_is_read_or_refused(name: str, value: object) -> None:
    try:
        found = known_fields()[name].read(value)
    except BadValue:
        return
    assert not isinstance(found, dict | list)


def test_the_value_of_a_secret_is_not_quoted() -> None:
    with pytest.raises(BadValue) as caught:
        known_fields()["salt"].read(12345)
    assert "12345" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "secret"), [("salt", True), ("api_keys", True), ("kv_tokens_max", False), ("system", False)]
)
def test_secrets_are_known_by_name(name: str, secret: bool) -> None:
    assert Field(name, object, str, "").secret is secret


def test_the_store_is_in_the_users_cache_by_default(cache: Path) -> None:
    assert default_of(known_fields()["store"]) == cache / "store"


@pytest.mark.parametrize(("name", "said"), [("recompute_ration", "; did you mean recompute_ratio?"), ("qqq", "")])
def test_the_nearest_name_is_offered(name: str, said: str) -> None:
    known: Any = known_fields()
    assert nearest(name, known) == said


def test_a_number_without_text_is_refused_all_the_same() -> None:
    with pytest.raises(BadValue, match="it is a very large number"):
        known_fields()["threads"].read(1 << 20000)
