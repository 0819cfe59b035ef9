from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings


def test_the_defaults_are_allowed() -> None:
    assert Settings().recompute_ratio == 0.15


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recompute_ratio", 1.5),
        ("recompute_ratio", float("nan")),
        ("recompute_ratio", "0.15"),
        ("check_layer", 0),
        ("host_bytes_budget", 5),
        ("max_num_seqs", True),
        ("prefetch_layers_max", 0),
        ("dtype", "float16"),
        ("attention", "flash"),
        ("conditioning", "none"),
        ("on_miss", ""),
        ("divergence", "q"),
    ],
)
def test_a_bad_value_is_an_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        Settings(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message
    assert str(value) in caught.value.message


def test_a_range_is_named_in_the_error() -> None:
    with pytest.raises(RequestError, match=r"0\.\.1"):
        Settings(recompute_ratio=-0.1)


def test_names_are_all_settings() -> None:
    assert set(Settings.names()) == {field.name for field in dataclasses.fields(Settings)}
