"""Shipped estimates."""

from __future__ import annotations

from dataclasses import replace

from kvblend.engine.bound import Shown
from kvblend.engine.kl_models import _SHIPPED, SHAPE, shipped_model
from kvblend.engine.selectors.spec import SelectorSpec


def test_more_change_means_more_kl() -> None:
    changes = (0.001, 0.01, 0.1, 1.0)
    expected = [SHAPE.expect(Shown(0.15, 0.0, change, 1.0)) for change in changes]
    assert expected == sorted(expected)


def test_an_estimate_is_for_one_model_and_one_way_of_blending() -> None:
    (fingerprint, conditioning, kind), model = next(iter(_SHIPPED.items()))
    assert shipped_model(fingerprint, conditioning, kind) == model
    assert shipped_model("0" * 64, conditioning, kind) is None
    assert shipped_model(fingerprint, "system", kind) is None
    assert shipped_model(fingerprint, conditioning, SelectorSpec()) is None


def test_shipped_estimates_have_the_shape_that_is_calibrated() -> None:
    for model in _SHIPPED.values():
        own = replace(SHAPE, level=model.level, margin=model.margin, spread=model.spread, samples=model.samples)
        assert replace(own, centre=model.centre, width=model.width) == model
        assert model.margin > model.spread > 0.0
