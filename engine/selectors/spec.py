"""What can be asked of a selection, with its limits. A torch-free leaf: requests and settings are checked with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, Self, get_args

SelectorName = Literal["divergence", "query", "sensitive", "union", "product", "random", "sinks"]
DivergenceOf = Literal["k", "v", "kv"]
ChunkBudget = Literal["free", "need", "equal"]
ResidualName = Literal["none", "mean", "distance", "ridge", "lowrank"]
NamedLayers = Literal["all", "middle"]

LAYERS_MAX = 1024
SEED_MAX = (1 << 64) - 1
KL_MAX_LIMIT = 1e3
KL_POSITIONS = 8
"""A request's KL is the mean over this many positions of the full prefill's greedy continuation."""
_CHOICES: dict[str, tuple[str, ...]] = {
    "selector": get_args(SelectorName),
    "divergence": get_args(DivergenceOf),
    "chunk_budget": get_args(ChunkBudget),
    "residual": get_args(ResidualName),
}
_WHOLE: dict[str, tuple[int, int]] = {"sinks": (0, 4096), "span": (1, 4096), "seed": (0, SEED_MAX)}
_NUMBERS: dict[str, tuple[float, float]] = {"probes": (0.0, 1.0), "residual_fraction": (0.0, 2.0)}
_SHARES = ("recompute_ratios", "thresholds")


class BadSelection(ValueError):
    """A field of a selection that cannot be; the message names field, value and limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        self.field = field
        self.said = f"is {shown if len(shown) <= 60 else shown[:57] + '...'}; {limit}"
        super().__init__(f"{field} {self.said}")


@dataclass(frozen=True, slots=True)
class SelectorSpec:
    """One way of choosing rows (docs/algorithm.md, "Choosing rows"). How many is not said here, but for two lists.

    `recompute_ratios` and `thresholds` have one entry per check layer and are for the selector "divergence"; at most
    one of them is given. `score_layers` is a tuple of layers or a name. Construction raises BadSelection.
    """

    selector: SelectorName = "divergence"
    check_layers: tuple[int, ...] = (1,)
    divergence: DivergenceOf = "k"
    recompute_ratios: tuple[float, ...] = ()
    thresholds: tuple[float, ...] = ()
    score_layers: tuple[int, ...] | NamedLayers = "all"
    sinks: int = 0
    span: int = 1
    chunk_budget: ChunkBudget = "free"
    probes: float = 0.0
    residual: ResidualName = "none"
    residual_fraction: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.names():
            check_field(name, getattr(self, name))
        for name in _SHARES:
            given = getattr(self, name)
            if not given:
                continue
            if self.selector != "divergence":
                raise BadSelection(name, given, f"it is for the selector 'divergence', not {self.selector!r}")
            if len(given) != len(self.check_layers):
                layers = len(self.check_layers)
                raise BadSelection(name, given, f"it needs one entry per check layer, {layers}, and has {len(given)}")
        if self.recompute_ratios and self.thresholds:
            raise BadSelection("thresholds", self.thresholds, "give either recompute_ratios or thresholds")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(field.name for field in fields(cls))

    def overridden(self, given: Mapping[str, Any], *, has_ratio: bool = False) -> Self:
        """This spec with a request's own fields; raises BadSelection.

        What says how many rows belongs together: with any of `recompute_ratios`, `thresholds`, a single ratio
        (`has_ratio`) or another selector given, the lists of this spec no longer count.
        """
        lists: dict[str, Any] = dict.fromkeys(_SHARES, ())
        other = given.get("selector", self.selector) != self.selector
        stale = lists if has_ratio or other or any(name in given for name in _SHARES) else {}
        return replace(self, **{**stale, **given})

    def check_model(self, num_layers: int) -> None:
        """Raise BadSelection where a layer is named that a model of `num_layers` layers does not have."""
        limit = f"the model has layers 0..{num_layers - 1}"
        if any(layer >= num_layers for layer in self.check_layers):
            raise BadSelection("check_layers", self.check_layers, limit)
        if not isinstance(self.score_layers, str) and any(layer >= num_layers for layer in self.score_layers):
            raise BadSelection("score_layers", self.score_layers, limit)

    def scored(self, num_layers: int) -> frozenset[int] | None:
        """The layers whose attention counts, None for all. "middle" leaves out the first third and the last fifth."""
        if self.score_layers == "all":
            return None
        if isinstance(self.score_layers, str):
            return frozenset(range(num_layers // 3, num_layers - num_layers // 5))
        return frozenset(self.score_layers)


def check_field(name: str, value: object) -> None:
    """Raise BadSelection for a value that a field can never have, whatever the others are."""
    if name in _CHOICES:
        if not isinstance(value, str) or value not in _CHOICES[name]:
            raise BadSelection(name, value, f"choose {', '.join(_CHOICES[name])}")
    elif name in _WHOLE:
        low, high = _WHOLE[name]
        if not _is_whole(value) or not low <= value <= high:  # type: ignore[operator]
            raise BadSelection(name, value, f"it must be a whole number in {low}..{high}")
    elif name in _NUMBERS:
        low_, high_ = _NUMBERS[name]
        if not _is_number(value) or not low_ <= value <= high_:  # type: ignore[operator]
            raise BadSelection(name, value, f"it must be a number in {low_:g}..{high_:g}")
    elif name in ("check_layers", "score_layers"):
        _check_layers(name, value)
    elif name in _SHARES:
        _check_shares(name, value)
    else:
        raise BadSelection(name, value, f"no such field; known: {', '.join(SelectorSpec.names())}")


def _check_layers(name: str, value: object) -> None:
    lowest = 1 if name == "check_layers" else 0
    named = get_args(NamedLayers) if name == "score_layers" else ()
    if isinstance(value, str) and value in named:
        return
    limit = f"it must be a list of rising layers from {lowest} on" + "".join(f", or {word!r}" for word in named)
    if not isinstance(value, tuple) or not 1 <= len(value) <= LAYERS_MAX or not all(map(_is_whole, value)):
        raise BadSelection(name, value, limit)
    if value[0] < lowest or value[-1] >= LAYERS_MAX or any(b <= a for a, b in pairwise(value)):
        # layer 0 depends on token and position alone: fresh and cached rows are equal there
        raise BadSelection(name, value, limit)


def _check_shares(name: str, value: object) -> None:
    ratios = name == "recompute_ratios"
    limit = (
        "it must be a list of ratios in 0..1, none above the one before"
        if ratios
        else "it must be a list of numbers from 0 on"
    )
    if not isinstance(value, tuple) or len(value) > LAYERS_MAX or not all(map(_is_number, value)):
        raise BadSelection(name, value, limit)
    if any(x < 0 or (ratios and x > 1) for x in value):
        raise BadSelection(name, value, limit)
    if ratios and any(b > a for a, b in pairwise(value)):
        raise BadSelection(name, value, limit)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    # an integer may be too large for math.isfinite
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))
