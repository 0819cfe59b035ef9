"""How one request's rows are chosen: its own fields over the server's, merged and checked in one place."""

from __future__ import annotations

import math

from kvblend.actors.core.events import BlendShape
from kvblend.actors.errors import RequestError
from kvblend.actors.messages import BlendOptions
from kvblend.actors.settings import Settings
from kvblend.engine.selectors.spec import KL_MAX_LIMIT, BadSelection, SelectorSpec

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
    if blend.recompute_ratio == "auto" and settings.auto_ratio_floor is not None:
        return settings.auto_ratio_floor
    if blend.recompute_ratio is None or blend.recompute_ratio == "auto":
        return settings.ratio_floor
    return blend.recompute_ratio


def blend_shape(settings: Settings, blend: BlendOptions) -> BlendShape:
    """What of a request's computing can go on while its layers load, and whether its ratio may be raised meanwhile."""
    spec = merge_selection(settings, blend)
    named = settings.recompute_ratio if blend.recompute_ratio is None else blend.recompute_ratio
    checks = spec.selector in ("divergence", "union", "product")
    return BlendShape(
        full_layers=spec.check_layers[-1] + 1 if checks else 0,
        waits=spec.selector in ("query", "sensitive", "union", "product"),
        auto_ratio=named == "auto" and not spec.recompute_ratios and not spec.thresholds,
        fixed_ratio=bool(spec.recompute_ratios or spec.thresholds),
    )


def kl_bound(settings: Settings, blend: BlendOptions) -> float | None:
    """What the request's KL must not exceed, None where nothing is asked. RequestError for one that cannot be kept."""
    limit = settings.max_kl if blend.max_kl is None else blend.max_kl
    if limit is None or blend.mode != "blend":
        return None
    if not (math.isfinite(limit) and 0.0 <= limit <= KL_MAX_LIMIT):
        text = f"blend.max_kl is {limit!r}; it must lie in 0..{KL_MAX_LIMIT:g}"
        raise RequestError("invalid_request", text, "blend.max_kl")
    if merge_selection(settings, blend).thresholds:
        text = "blend.max_kl: thresholds say themselves how many rows are recomputed; give one of the two"
        raise RequestError("invalid_request", text, "blend.max_kl")
    return limit


def check_settings_for(settings: Settings, num_layers: int) -> None:
    """Raise RequestError where the settings name a layer that the model does not have."""
    try:
        settings.selection.check_model(num_layers)
    except BadSelection as error:
        raise RequestError("invalid_request", str(error), error.field) from None
