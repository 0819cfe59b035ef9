"""A request's own fields over the server's: what is merged, what is refused, how large the budget is."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from kvblend.actors.core.events import BlendShape
from kvblend.actors.errors import RequestError
from kvblend.actors.messages import BlendOptions, SelectionOptions
from kvblend.actors.selection import blend_shape, budget_ratio, check_settings_for, merge_selection
from kvblend.actors.settings import Settings
from kvblend.engine.selectors.spec import SelectorSpec


def blend(ratio: float | Literal["auto"] | None = None, **given: Any) -> BlendOptions:
    return BlendOptions(recompute_ratio=ratio, selection=SelectionOptions(**given))


def test_a_request_without_fields_takes_the_servers() -> None:
    settings = Settings(selector="query", sinks=3, residual="mean")
    assert merge_selection(settings, blend()) == settings.selection


def test_given_fields_win_and_the_others_stay() -> None:
    settings = Settings(selector="query", sinks=3, residual="mean")
    merged = merge_selection(settings, blend(sinks=0, score_layers="middle"))
    assert merged == SelectorSpec("query", residual="mean", score_layers="middle")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"selector": "plain"}, "blend.selector"),
        ({"sinks": -1}, "blend.sinks"),
        ({"recompute_ratios": (0.2, 0.1)}, "blend.recompute_ratios"),
        ({"selector": "query", "thresholds": (0.5,)}, "blend.thresholds"),
        ({"recompute_ratios": (0.2,), "thresholds": (0.5,)}, "blend.thresholds"),
        ({"ratio": 0.1, "recompute_ratios": (0.2,)}, "blend.recompute_ratios"),
        ({"ratio": 0.0, "thresholds": (0.2,)}, "blend.thresholds"),
    ],
)
def test_a_bad_field_is_refused_by_its_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        merge_selection(Settings(), blend(**given))
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
    assert param in caught.value.message


@pytest.mark.parametrize("given", [{"check_layers": (1, 4)}, {"score_layers": (4,)}])
def test_layers_are_compared_with_the_model(given: dict[str, Any]) -> None:
    assert merge_selection(Settings(), blend(**given), 5)
    with pytest.raises(RequestError, match=r"the model has layers 0\.\.3"):
        merge_selection(Settings(), blend(**given), 4)


@pytest.mark.parametrize(
    ("settings", "options", "ratio"),
    [
        ({}, blend(), 0.15),
        ({}, blend(0.0), 0.0),
        ({"recompute_ratios": (0.4,)}, blend(), 0.4),
        ({"recompute_ratios": (0.4,)}, blend(0.1), 0.1),
        ({"recompute_ratios": (0.4,)}, blend(recompute_ratios=(0.3,)), 0.3),
        ({"recompute_ratios": (0.4,)}, blend(recompute_ratios=()), 0.15),
        ({"recompute_ratios": (0.4,)}, blend(selector="query"), 0.15),
        ({"thresholds": (0.4,)}, blend(), 1.0),
        ({"thresholds": (0.4,)}, blend(recompute_ratios=(0.3,)), 0.3),
        ({"thresholds": (0.4,)}, blend(0.2), 0.2),
        ({}, blend("auto"), 0.15),
        ({"recompute_ratio": "auto"}, blend(), 0.15),
        ({"recompute_ratio": 0.3}, blend("auto"), 0.3),
        ({"recompute_ratio": "auto", "auto_ratio_floor": 0.2}, blend(), 0.2),
        ({"recompute_ratio": "auto", "auto_ratio_floor": 0.2}, blend(0.1), 0.1),
        ({"recompute_ratio": 0.3, "auto_ratio_floor": 0.2}, blend("auto"), 0.2),
        ({"recompute_ratio": 0.3, "auto_ratio_floor": 0.2}, blend(), 0.3),
    ],
)
def test_the_budget_follows_what_was_said_last(settings: dict[str, Any], options: BlendOptions, ratio: float) -> None:
    assert budget_ratio(Settings(**settings), options) == ratio


@pytest.mark.parametrize("name", ["check_layers", "score_layers"])
def test_a_servers_layers_are_compared_with_the_model(name: str) -> None:
    settings = Settings(**{name: (1, 4)})  # type: ignore[arg-type]
    check_settings_for(settings, 5)
    with pytest.raises(RequestError, match=rf"{name} is \(1, 4\); the model has layers 0\.\.3"):
        check_settings_for(settings, 4)


@pytest.mark.parametrize(
    ("settings", "options", "shape"),
    [
        ({}, blend(), BlendShape(2, False, False)),
        ({}, blend("auto", check_layers=(1, 4)), BlendShape(5, False, True)),
        ({"recompute_ratio": "auto"}, blend(), BlendShape(2, False, True)),
        ({"recompute_ratio": "auto"}, blend(0.2), BlendShape(2, False, False)),
        ({"recompute_ratio": "auto"}, blend(recompute_ratios=(0.2,)), BlendShape(2, False, False, True)),
        ({}, blend("auto", selector="query"), BlendShape(0, True, True)),
        ({}, blend("auto", selector="union"), BlendShape(2, True, True)),
        ({}, blend("auto", selector="random"), BlendShape(0, False, True)),
    ],
)
def test_what_loading_can_hide_follows_from_the_selector(
    settings: dict[str, Any], options: BlendOptions, shape: BlendShape
) -> None:
    assert blend_shape(Settings(**settings), options) == shape
