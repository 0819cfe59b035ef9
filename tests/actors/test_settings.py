from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings, tenant_salt
from kvblend.engine.selectors.spec import SelectorSpec


def test_the_defaults_are_allowed() -> None:
    assert Settings().recompute_ratio == 0.15


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recompute_ratio", 1.5),
        ("recompute_ratio", float("nan")),
        ("recompute_ratio", "0.15"),
        ("recompute_ratio", "automatic"),
        ("auto_ratio_floor", 1.5),
        ("auto_ratio_floor", "auto"),
        ("lookahead_requests_max", -1),
        ("slow_loads", "wait"),
        ("itl_ms_max", -1.0),
        ("policy", "lifo"),
        ("ratio_lever_floor", 1.5),
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
        ("device_pool_bytes", -1),
        ("device_pool_bytes", 1 << 20),
        ("device_pool_policy", "fifo"),
        ("host_bytes_budget", 5),
        ("host_policy", "fifo"),
        ("disk_bytes_budget", 0),
        ("disk_policy", ""),
        ("tenant_bytes_max", -1),
        ("remote_timeout_ms", 0),
        ("remote_ttl_s", -1),
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


def test_the_address_of_a_remote_tier_is_shown_nowhere() -> None:
    assert "hunter2" not in repr(Settings(remote="redis://:hunter2@h"))
    with pytest.raises(RequestError, match="redis://") as caught:
        Settings(remote="http://:hunter2@h")
    assert caught.value.param == "remote"
    assert "hunter2" not in caught.value.message


def test_a_range_is_named_in_the_error() -> None:
    with pytest.raises(RequestError, match=r"0\.\.1"):
        Settings(recompute_ratio=-0.1)


@pytest.mark.parametrize(
    ("values", "floor"),
    [
        ({}, 0.15),
        ({"recompute_ratio": 0.3, "auto_ratio_floor": 0.2}, 0.3),
        ({"recompute_ratio": "auto"}, 0.15),
        ({"recompute_ratio": "auto", "auto_ratio_floor": 0.2}, 0.2),
    ],
)
def test_the_ratio_where_nothing_else_is_said(values: dict[str, Any], floor: float) -> None:
    assert Settings(**values).ratio_floor == floor


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


def test_every_tenant_of_every_server_has_a_salt_of_its_own() -> None:
    salts = [tenant_salt(salt, tenant) for salt in ("", "s") for tenant in ("", "0" * 32, "1" * 32)]
    assert len(set(salts)) == len(salts)
    assert (tenant_salt("", ""), tenant_salt("s", "")) == ("", "s")
