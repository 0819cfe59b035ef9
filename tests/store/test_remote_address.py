from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.store.remote_address import RemoteAddress

parse = RemoteAddress.parse


def test_a_full_url() -> None:
    address = parse("redis://me:pw@example.org:7000/3?prefix=team.a")
    assert (address.host, address.port, address.database) == ("example.org", 7000, 3)
    assert (address.username, address.password, address.prefix) == ("me", "pw", "team.a")
    assert not address.is_tls


def test_what_is_left_out_has_defaults() -> None:
    address = parse("redis://h")
    assert (address.port, address.database, address.prefix, address.username, address.password) == (
        6379, 0, "kvblend", "", "",
    )  # fmt: skip


def test_a_unix_socket() -> None:
    address = parse("unix:///run/a%20b.sock?db=2")
    assert (address.path, address.database) == ("/run/a b.sock", 2)
    assert str(address) == "unix:///run/a b.sock?db=2"


def test_tls_with_its_files() -> None:
    address = parse("rediss://h?ssl_ca_certs=/ca.pem")
    assert address.is_tls
    assert address.tls_files == {"ssl_ca_certs": "/ca.pem"}


def test_valkey_is_another_word_for_redis() -> None:
    assert parse("valkey://h:1/2") == parse("redis://h:1/2")
    assert parse("valkeys://h") == parse("rediss://h")


def test_a_password_is_decoded() -> None:
    assert parse("redis://:a%2Fb%40c%3Fd%23@h").password == "a/b@c?d#"


def test_names_of_it_hold_no_password() -> None:
    address = parse("redis://me:hunter2@[::1]:1/0")
    assert str(address) == "redis://[::1]:1/0"
    assert "hunter2" not in repr(address)


def test_a_password_in_a_text_is_crossed_out() -> None:
    assert parse("redis://:hunter2@h").scrub("unknown command AUTH with 'hunter2'") == "unknown command AUTH with '***'"


def test_without_a_password_texts_stay() -> None:
    assert parse("redis://h").scrub("as it is") == "as it is"


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("", "redis://"),
        ("http://h", "redis://"),
        ("redis:h", "redis://"),
        ("redis://", "host"),
        ("redis://h:port", "port"),
        ("redis://h:70000", "port"),
        ("redis://h:0", "port"),
        ("redis://h/zero", "database"),
        ("redis://h/-1", "database"),
        ("redis://h?db=99999999", "database"),
        ("redis://h?decode_responses=true", "db, prefix"),
        ("redis://h?ssl_ca_certs=/x", "db, prefix"),
        ("redis://h?db=1&db=2", "twice"),
        ("redis://h?db", "name=value"),
        ("redis://h?prefix=a b", "prefix"),
        ("redis://h?prefix=" + 65 * "a", "prefix"),
        ("redis://h#x", "#"),
        ("redis://[::1", "URL"),
        ("unix://relative/path", "unix"),
        ("unix:///", "unix"),
    ],
)
def test_a_bad_url_is_refused_by_name(url: str, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        parse(url)


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12))
def test_no_error_quotes_a_password_that_is_written_wrong(password: str) -> None:
    said = ""
    try:
        said = str(parse(f"redis://user:S3{password}@host:1/0"))
    except ValueError as error:
        said = str(error)
    assert "S3" not in said
