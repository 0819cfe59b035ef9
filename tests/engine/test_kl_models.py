"""How KL is taken to grow."""

from __future__ import annotations

from kvblend.engine.bound import Shown
from kvblend.engine.kl_models import SHAPE


def test_more_change_means_more_kl() -> None:
    changes = (0.001, 0.01, 0.1, 1.0)
    expected = [SHAPE.expect(Shown(0.15, 0.0, change, 1.0)) for change in changes]
    assert expected == sorted(expected)
