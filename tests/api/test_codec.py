from __future__ import annotations

import contextlib
import json
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.actors.errors import RequestError
from kvblend.api.server.codec import CODECS, PLAIN_JSON, Codec, check_depth, choose_codec
from kvblend.api.server.limits import ApiLimits

LIMITS = ApiLimits()
MSGPACK = CODECS["kvblend.v1.msgpack"]
JSON = CODECS["kvblend.v1.json"]
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("codec", [MSGPACK, JSON, PLAIN_JSON])
@given(event=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES, max_size=5))
def test_what_is_encoded_is_decoded_the_same(codec: Codec, event: dict[str, Any]) -> None:
    frame = codec.encode(event)
    assert isinstance(frame, bytes if codec.binary else str)
    assert codec.decode(frame, ApiLimits(depth_max=100)) == event


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(RequestError):
        MSGPACK.decode(data, LIMITS)


@given(st.text(max_size=100))
def test_any_text_decodes_or_is_refused(data: str) -> None:
    with contextlib.suppress(RequestError):
        JSON.decode(data, LIMITS)


def refusal(codec: Codec, data: bytes | str, limits: ApiLimits = LIMITS) -> str:
    with pytest.raises(RequestError) as caught:
        codec.decode(data, limits)
    return caught.value.message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (msgpack.packb(msgpack.ExtType(5, b"x")), "max_ext_len"),
        (msgpack.packb(msgpack.Timestamp(1)), "max_ext_len"),
        (msgpack.packb(b"bytes"), "max_bin_len"),
        (b"\xa3\xff\xfe\xfd", "not valid UTF-8"),
        (msgpack.packb([0] * (LIMITS.items_max + 1)), "max_array_len"),
        (msgpack.packb({str(i): 0 for i in range(LIMITS.items_max + 1)}), "max_map_len"),
        (msgpack.packb([[[]] * 4000] * 10), "lists and objects"),
        (b"\x91" * 3000, "not readable msgpack"),
        (b"\x81\x01\x02", "not readable msgpack"),
        (b"\xc0\xc0", "not readable msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not readable msgpack"),
    ],
)
def test_msgpack_beyond_its_limits_is_refused(data: bytes, message: str) -> None:
    assert message in refusal(MSGPACK, data)


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', "[" * 100_000, "", "9" * 5000, b"\xff"])
def test_unreadable_json_is_refused(text: str) -> None:
    assert "not readable JSON" in refusal(JSON, text)


@pytest.mark.parametrize("codec", [MSGPACK, JSON])
def test_nesting_has_a_limit(codec: Codec) -> None:
    value: list[Any] = []
    for _ in range(LIMITS.depth_max):
        value = [value]
    frame = json.dumps(value) if codec is JSON else msgpack.packb(value)
    assert f"limit of {LIMITS.depth_max} levels" in refusal(codec, frame)


def test_nesting_at_the_limit_is_taken() -> None:
    check_depth([[[]]], 3)
    check_depth({"a": {"b": 1}}, 2)


def test_the_first_known_subprotocol_is_chosen() -> None:
    assert choose_codec(["x", "kvblend.v1.json", "kvblend.v1.msgpack"]) == ("kvblend.v1.json", JSON)


def test_no_subprotocol_means_plain_json() -> None:
    assert choose_codec([]) == (None, PLAIN_JSON)


def test_only_unknown_subprotocols_are_refused() -> None:
    with pytest.raises(RequestError, match="known: kvblend"):
        choose_codec(["x"])


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\uDFFF": 1}', '["x\\udc00y"]'])
def test_json_with_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        JSON.decode(text, LIMITS)


def test_json_with_both_halves_of_a_character_is_taken() -> None:
    assert JSON.decode('"\\ud83d\\ude00"', LIMITS) == "\U0001f600"


def test_json_of_a_million_empty_lists_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(RequestError, match="lists and objects"):
        JSON.decode("[" + "[]," * 1_000_000 + "[]]", LIMITS)
