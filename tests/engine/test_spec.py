"""What can be asked of a selection: each wrong value is named with its limit, and what belongs together is replaced."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvblend.engine.selectors.spec import BadSelection, SelectorSpec, check_field

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"selector": "luck"}, "selector", "choose divergence, query, sensitive, union, product, random, sinks"),
    ({"selector": ["query"]}, "selector", "choose"),
    ({"divergence": "q"}, "divergence", "choose k, v, kv"),
    ({"chunk_budget": "even"}, "chunk_budget", "choose free, need, equal"),
    ({"residual": "sum"}, "residual", "choose none, mean"),
    ({"check_layers": (0, 1)}, "check_layers", "rising layers from 1 on"),
    ({"check_layers": (2, 2)}, "check_layers", "rising"),
    ({"check_layers": ()}, "check_layers", "rising"),
    ({"check_layers": [1]}, "check_layers", "list"),
    ({"check_layers": (1.0,)}, "check_layers", "rising"),
    ({"check_layers": (True,)}, "check_layers", "rising"),
    ({"check_layers": (1, 5000)}, "check_layers", "rising"),
    ({"check_layers": "all"}, "check_layers", "rising"),
    ({"score_layers": "some"}, "score_layers", "or 'all', or 'middle'"),
    ({"score_layers": (-1,)}, "score_layers", "rising layers from 0 on"),
    ({"recompute_ratios": (1.1,)}, "recompute_ratios", "ratios in 0..1"),
    ({"recompute_ratios": (float("nan"),)}, "recompute_ratios", "ratios in 0..1"),
    ({"recompute_ratios": (0.1, 0.2), "check_layers": (1, 2)}, "recompute_ratios", "none above the one before"),
    ({"recompute_ratios": (0.2, 0.1)}, "recompute_ratios", "one entry per check layer, 1, and has 2"),
    ({"recompute_ratios": (0.2,), "selector": "query"}, "recompute_ratios", "for the selector 'divergence'"),
    ({"thresholds": (-0.1,)}, "thresholds", "numbers from 0 on"),
    ({"thresholds": (float("inf"),)}, "thresholds", "numbers from 0 on"),
    ({"thresholds": ("1",)}, "thresholds", "numbers from 0 on"),
    ({"thresholds": (0.1,), "check_layers": (1, 2)}, "thresholds", "one entry per check layer, 2, and has 1"),
    ({"thresholds": (0.1,), "selector": "union"}, "thresholds", "for the selector 'divergence'"),
    ({"thresholds": (0.1,), "recompute_ratios": (0.1,)}, "thresholds", "either recompute_ratios or thresholds"),
    ({"sinks": -1}, "sinks", "0..4096"),
    ({"sinks": 1.0}, "sinks", "whole number"),
    ({"span": 0}, "span", "1..4096"),
    ({"probes": 1.01}, "probes", "0..1"),
    ({"probes": float("nan")}, "probes", "0..1"),
    ({"residual_fraction": 3}, "residual_fraction", "0..2"),
    ({"seed": -1}, "seed", "whole number"),
    ({"seed": 1 << 64}, "seed", "whole number"),
]


@pytest.mark.parametrize(("fields", "name", "limit"), BAD, ids=str)
def test_a_bad_value_is_named_with_its_limit(fields: dict[str, Any], name: str, limit: str) -> None:
    with pytest.raises(BadSelection) as caught:
        SelectorSpec(**fields)
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name} is ")
    assert limit in str(caught.value)


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(BadSelection) as caught:
        SelectorSpec("x" * 1000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(BadSelection, match="no such field; known: selector, check_layers"):
        check_field("ratio", 1)


def test_limits_themselves_are_taken() -> None:
    SelectorSpec(check_layers=(1, 1023), recompute_ratios=(1, 0.0), span=4096, probes=1, residual_fraction=2)
    SelectorSpec(thresholds=(0,), score_layers=(0, 7), sinks=4096, seed=(1 << 64) - 1)


@pytest.mark.parametrize(
    ("given", "has_ratio", "kept"),
    [
        ({}, False, True),
        ({"sinks": 2}, False, True),
        ({"selector": "divergence"}, False, True),
        ({}, True, False),
        ({"selector": "query"}, False, False),
        ({"thresholds": (0.5,)}, False, False),
        ({"recompute_ratios": ()}, False, False),
    ],
)
def test_lists_count_until_something_else_says_how_many(given: dict[str, Any], has_ratio: bool, kept: bool) -> None:
    merged = SelectorSpec(recompute_ratios=(0.3,)).overridden(given, has_ratio=has_ratio)
    assert merged.recompute_ratios == ((0.3,) if kept else ())
    assert all(getattr(merged, name) == value for name, value in given.items())


def test_a_merged_spec_is_checked_as_a_whole() -> None:
    with pytest.raises(BadSelection, match="one entry per check layer, 2"):
        SelectorSpec(recompute_ratios=(0.3,)).overridden({"check_layers": (1, 2)})


@pytest.mark.parametrize("name", ["check_layers", "score_layers"])
def test_layers_beyond_the_model_are_refused(name: str) -> None:
    spec = SelectorSpec(**{name: (1, 4)})  # type: ignore[arg-type]
    spec.check_model(5)
    with pytest.raises(BadSelection, match=rf"{name} is \(1, 4\); the model has layers 0\.\.3"):
        spec.check_model(4)


@pytest.mark.parametrize(
    ("layers", "scored"),
    [("all", None), ("middle", range(3, 8)), ((0, 9), (0, 9))],
)
def test_the_layers_that_are_scored(layers: Any, scored: Any) -> None:
    assert SelectorSpec("query", score_layers=layers).scored(10) == (None if scored is None else frozenset(scored))


def test_it_needs_no_torch() -> None:
    code = "import sys, kvblend.engine.selectors.spec; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
