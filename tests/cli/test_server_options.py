from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from kvblend.cli.config.fields import BadValue, known_fields
from kvblend.cli.config.server_options import LogFormat, LogLevel, ServerOptions


def test_options_of_the_server_can_be_set_like_all_settings() -> None:
    assert known_fields()["port"].owner is ServerOptions
    assert [known_fields()["log_level"].read(word) for word in get_args(LogLevel)] == list(get_args(LogLevel))
    assert [known_fields()["log_format"].read(word) for word in get_args(LogFormat)] == ["text", "json"]


def test_rates_lie_in_their_range() -> None:
    for name in ("requests_per_minute_max", "requests_running_max"):
        assert known_fields()[name].read("0") == 0
        with pytest.raises(BadValue, match=r"must lie in 0\.\.1e\+09; it is -1"):
            known_fields()[name].read(-1)


def test_the_file_of_keys_is_a_path_and_no_secret() -> None:
    assert known_fields()["keys_file"].read("a.toml") == Path("a.toml")
    assert not known_fields()["keys_file"].secret
