from __future__ import annotations

from typing import get_args

from kvblend.cli.config.fields import known_fields
from kvblend.cli.config.server_options import LogFormat, LogLevel, ServerOptions


def test_options_of_the_server_can_be_set_like_all_settings() -> None:
    assert known_fields()["port"].owner is ServerOptions
    assert [known_fields()["log_level"].read(word) for word in get_args(LogLevel)] == list(get_args(LogLevel))
    assert [known_fields()["log_format"].read(word) for word in get_args(LogFormat)] == ["text", "json"]
