from __future__ import annotations

from kvblend.cli.config.given import Given


def test_a_complaint_names_the_value_as_it_was_given() -> None:
    assert Given(1, "flag", "--threads").complain("is 1").message == "--threads is 1"
    assert Given(1, "file", "threads", "a.toml, line 2").complain("is 1").message == "a.toml, line 2: threads is 1"


def test_the_origin_is_the_source_and_the_place_or_name() -> None:
    assert Given(1, "environment", "KVBLEND_THREADS").origin() == "environment KVBLEND_THREADS"
    assert Given(1, "file", "threads", "a.toml, line 2").origin() == "file a.toml, line 2"
