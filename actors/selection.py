"""How one request's rows are chosen: its own fields over the server's, merged and checked in one place."""

from __future__ import annotations

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import BlendOptions
from kvblend.actors.settings import Settings
from kvblend.engine.selectors.spec import BadSelection, SelectorSpec

_HOW_MANY = ("recompute_ratio", "recompute_ratios", "thresholds")


def merge_selection(settings: Settings, blend: BlendOptions, num_layers: int | None = None) -> SelectorSpec:
    """The spec of a request. `num_layers` where the model is known. RequestError names the field as `blend.<field>`."""
    given = blend.selection.given()
    has_ratio = blend.recompute_ratio is not None
    named = [name for name in _HOW_MANY if given.get(name) or (has_ratio and name == "recompute_ratio")]
    if len(named) > 1:
        param = f"blend.{named[1]}"
        raise RequestError("invalid_request", f"{param}: give one of {' and '.join(named)}", param)
    try:
        spec = settings.selection.overridden(given, has_ratio=has_ratio)
        if num_layers is not None:
            spec.check_model(num_layers)
    except BadSelection as error:
        raise RequestError("invalid_request", f"blend.{error}", f"blend.{error.field}") from None
    return spec


def budget_ratio(settings: Settings, blend: BlendOptions) -> float:
    """The share of cached rows that a request may recompute: the largest of its sets; all, where thresholds decide."""
    spec = merge_selection(settings, blend)
    if spec.thresholds:
        return 1.0
    if spec.recompute_ratios:
        return spec.recompute_ratios[0]
    return settings.recompute_ratio if blend.recompute_ratio is None else blend.recompute_ratio


def check_settings_for(settings: Settings, num_layers: int) -> None:
    """Raise RequestError where the settings name a layer that the model does not have."""
    try:
        settings.selection.check_model(num_layers)
    except BadSelection as error:
        raise RequestError("invalid_request", str(error), error.field) from None
