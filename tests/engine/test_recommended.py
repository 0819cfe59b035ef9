from __future__ import annotations

import pytest

from kvblend.engine.recommended import recommended
from kvblend.engine.selectors.build import build_selector


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.05, 0.15, 1.0])
def test_there_is_a_setting_for_every_ratio(ratio: float) -> None:
    build_selector(recommended(ratio).spec)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_other_ratios_are_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"it must lie in 0\.\.1"):
        recommended(ratio)
