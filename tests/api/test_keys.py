from __future__ import annotations

import base64
import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblend.api.server import keys as module
from kvblend.api.server.keys import (
    BEARER_SUBPROTOCOL,
    BadKeys,
    KeyRing,
    digest_of,
    issue,
    parse_keys,
    read_token,
)


def test_what_is_issued_is_found_again_in_its_file() -> None:
    pairs = [issue("alice"), issue("bob", operator=True)]
    text = "# comment\n" + "\n".join(tenant.entry for tenant, _ in pairs)
    ring = KeyRing(parse_keys(text))
    assert [ring.find(key) for _, key in pairs] == [tenant for tenant, _ in pairs]


def test_the_file_does_not_hold_the_key() -> None:
    tenant, key = issue("alice")
    assert key not in tenant.entry
    assert key not in repr(tenant)
    assert tenant.id not in repr(tenant)


def test_keys_are_long_and_never_the_same() -> None:
    issued = {issue("a")[1] for _ in range(50)}
    assert len(issued) == 50
    assert min(map(len, issued)) >= 43


def test_an_unknown_key_is_nobodys() -> None:
    assert KeyRing([issue("alice")[0]]).find("kvb_other") is None


@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_every_entry_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, place: int | None) -> None:
    pairs = [issue(name) for name in "abc"]
    ring, compared = KeyRing(tenant for tenant, _ in pairs), list[bytes]()

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(module, "hmac", type("Spy", (), {"compare_digest": staticmethod(compare)}))
    ring.find("none of them" if place is None else pairs[place][1])
    assert compared == [tenant.digest for tenant, _ in pairs]


def test_replaced_keys_are_gone() -> None:
    (old, old_key), (new, new_key) = issue("alice"), issue("alice")
    ring = KeyRing([old])
    ring.replace([new])
    assert (ring.find(old_key), ring.find(new_key), old in ring) == (None, new, False)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a/b", "ä", "x" * 65])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"1\.\.64 letters"):
        issue(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice", "is no TOML"),
        ("alice = 1", "entry 'alice' is not"),
        ("alice = 'plain:hunter2'", "entry 'alice' is not"),
        ("[alice]\nkey = 'x'", "entry 'alice' is not"),
        (f"'a b' = 'blake2b:{'0' * 64}:{'0' * 32}'", "entry 'a b' is not"),
        (f"a = 'blake2b:{'0' * 64}:{'0' * 32}'\nb = 'blake2b:{'0' * 64}:{'1' * 32}'", "has the key of another"),
        (f"a = 'blake2b:{'0' * 64}:{'0' * 32}'\nb = 'blake2b:{'1' * 64}:{'0' * 32}'", "has the tenant of another"),
    ],
)
def test_a_bad_file_is_refused_without_showing_what_it_holds(text: str, message: str) -> None:
    with pytest.raises(BadKeys, match=message) as caught:
        parse_keys(text)
    assert "hunter2" not in str(caught.value)


def encoded(key: str) -> str:
    return BEARER_SUBPROTOCOL + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


@pytest.mark.parametrize("header", ["Bearer k", "bearer k", "BEARER  k "])
def test_the_key_stands_in_the_header(header: str) -> None:
    assert read_token([header]) == "k"


@pytest.mark.parametrize("headers", [[], ["Basic k"], ["k"], ["Bearer"], ["Bearer "], ["Bearer k", "Bearer k"]])
def test_other_headers_hold_no_key(headers: list[str]) -> None:
    assert read_token(headers) is None


def test_a_header_counts_before_a_subprotocol() -> None:
    assert read_token(["Bearer one"], [encoded("two")]) == "one"
    assert read_token(["Basic one"], [encoded("two")]) is None


@pytest.mark.parametrize("key", ["k", "kvb_-abc", "ke", "key"])
def test_the_key_stands_in_the_subprotocols(key: str) -> None:
    assert read_token([], ["kvblend.v1.json", encoded(key)]) == key


@pytest.mark.parametrize(
    "offered",
    [
        [BEARER_SUBPROTOCOL],
        [BEARER_SUBPROTOCOL + "***"],
        [BEARER_SUBPROTOCOL + "_w"],
        [BEARER_SUBPROTOCOL + "A" * 2000],
        [encoded("a"), encoded("b")],
    ],
)
def test_other_subprotocols_hold_no_key(offered: list[str]) -> None:
    assert read_token([], offered) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(), max_size=2), st.lists(st.text().map(lambda text: BEARER_SUBPROTOCOL + text), max_size=2))
def test_nothing_that_is_sent_breaks_it(headers: list[str], offered: list[str]) -> None:
    token = read_token(headers, offered)
    assert KeyRing([issue("alice")[0]]).find(token or "") is None
    assert len(digest_of(token or "")) == 32
