"""The way of blending that the evaluation found best (docs/algorithm.md), for each share of rows recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvblend.engine.selectors.spec import SelectorSpec

Conditioning = Literal["bare", "system", "warm", "corpus"]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What chunks are computed behind, and how rows are chosen and the others corrected.

    "corpus" is "warm" with passages of the corpus in place of the shipped ones.
    """

    conditioning: Conditioning
    spec: SelectorSpec


def recommended(ratio: float) -> Recommendation:
    """The setting to use when `ratio` (0..1) of the cached rows are recomputed. ValueError outside of that."""
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"ratio is {ratio}; it must lie in 0..1")
    spec = SelectorSpec(selector="sensitive", score_layers="middle", probes=0.25, residual="distance")
    return Recommendation("corpus", spec)
