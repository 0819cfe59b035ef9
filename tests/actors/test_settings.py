from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings
from kvblend.engine.selectors.spec import SelectorSpec


def test_the_defaults_are_allowed() -> None:
    assert Settings().recompute_ratio == 0.15


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recompute_ratio", 1.5),
        ("recompute_ratio", float("nan")),
        ("recompute_ratio", "0.15"),
        ("check_layers", (0,)),
        ("check_layers", 1),
        ("recompute_ratios", (0.1, 0.2)),
        ("thresholds", (-1.0,)),
        ("score_layers", "some"),
        ("selector", "plain"),
        ("sinks", -1),
        ("span", 0),
        ("chunk_budget", "even"),
        ("probes", 1.5),
        ("residual", "sum"),
        ("residual_fraction", -0.1),
        ("seed", -1),
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


def test_the_selection_has_the_settings_values() -> None:
    settings = Settings(selector="union", check_layers=(1, 2), sinks=3, residual="ridge", seed=9)
    wanted = SelectorSpec("union", check_layers=(1, 2), sinks=3, residual="ridge", seed=9)
    assert settings.selection == wanted


def test_lists_of_another_length_than_the_check_layers_are_refused() -> None:
    with pytest.raises(RequestError, match="one entry per check layer, 1, and has 2") as caught:
        Settings(recompute_ratios=(0.2, 0.1))
    assert caught.value.param == "recompute_ratios"
