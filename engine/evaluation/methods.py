"""Methods as a user writes them, `[warm:|system:|bare:]selector[,field=value...]`, and the runs they stand for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from kvblend.engine.recommended import Conditioning, recommended
from kvblend.engine.selectors.spec import BadSelection, SelectorName, SelectorSpec

DEFAULT_RATIOS = (0.0, 0.05, 0.08, 0.15)
_FULL, _REUSE, _RECOMMENDED = "full", "reuse", "recommended"
_CONDITIONINGS: tuple[Conditioning, ...] = get_args(Conditioning)
_KNOWN = (_FULL, _REUSE, _RECOMMENDED, *get_args(SelectorName))
_WHOLE_LISTS, _NUMBER_LISTS = ("check_layers", "score_layers"), ("recompute_ratios", "thresholds")


class BadMethod(ValueError):
    """A method or a ratio that cannot be run; the message names it and what is possible."""


@dataclass(frozen=True, slots=True)
class Run:
    """One method at one ratio. `spec` None: nothing is chosen, a plain pass. `conditioning` None: a full prefill.

    `ratio` is None for a method whose thresholds alone say how many rows are chosen. `plan_ratio` is the largest share
    of the cached rows it may choose.
    """

    method: str
    ratio: float | None
    conditioning: Conditioning | None
    spec: SelectorSpec | None
    recommended: bool = False

    @property
    def plan_ratio(self) -> float:
        """The budget to plan with."""
        return 1.0 if self.ratio is None else self.ratio

    @property
    def work(self) -> tuple[object, ...]:
        """Equal for runs that compute the same."""
        return (self.conditioning, self.spec, self.plan_ratio if self.spec is not None else 0.0)


BASELINE = Run(_REUSE, 0.0, "system", None)
FULL = Run(_FULL, 1.0, None, None)


def plan_runs(methods: Sequence[str] = (), ratios: Sequence[float] = ()) -> list[Run]:
    """The runs of these methods at these ratios, without repetitions; of the default ones where both are empty.

    By default: full, plain reuse, divergence above ratio 0 (at 0 it is plain reuse) and the recommended setting at
    every ratio. Methods that take no ratio run once. Raises BadMethod.
    """
    for ratio in ratios:
        if not (math.isfinite(ratio) and 0.0 <= ratio <= 1.0):
            raise BadMethod(f"ratio is {ratio}; it must lie in 0..1")
    steps = tuple(ratios) or DEFAULT_RATIOS
    runs: dict[tuple[str, float | None], Run] = {}
    for text in methods or (_FULL, _REUSE, "divergence", _RECOMMENDED):
        above = [ratio for ratio in steps if ratio > 0.0]
        for run in _runs_of(text, above if text == "divergence" and not methods else steps):
            runs.setdefault((run.method, run.ratio), run)
    return list(runs.values())


def split_methods(texts: Iterable[str]) -> list[str]:
    """Single methods out of comma-separated lists of them: a `field=value` belongs to the method before it."""
    found: list[str] = []
    for text in texts:
        first = True
        for piece in (part.strip() for part in text.split(",")):
            if "=" in piece and not first:
                found[-1] += f",{piece}"
            else:
                found.append(piece)
            first = False
    return found


def _runs_of(text: str, ratios: Sequence[float]) -> list[Run]:
    prefix, colon, rest = text.rpartition(":")
    name, *options = rest.split(",")
    if colon and prefix not in _CONDITIONINGS:
        raise BadMethod(f"method {text!r}: conditioning is {prefix!r}; choose {', '.join(_CONDITIONINGS)}")
    if name not in _KNOWN:
        raise BadMethod(f"method {text!r}: {name!r} is not known; choose {', '.join(_KNOWN)}")
    if (name in (_FULL, _REUSE, _RECOMMENDED) and options) or (name in (_FULL, _RECOMMENDED) and colon):
        taken = "a conditioning only" if name == _REUSE else "neither a conditioning nor fields"
        raise BadMethod(f"method {text!r}: {name} takes {taken}")
    if name == _FULL:
        return [FULL]
    if name == _RECOMMENDED:
        return [_recommended(ratio) for ratio in ratios]
    conditioning: Conditioning = next((known for known in _CONDITIONINGS if known == prefix), "system")
    if name == _REUSE:
        return [Run(text, 0.0, conditioning, None)]
    spec = _parse_spec(text, name, options)
    if spec.thresholds:
        return [Run(text, None, conditioning, spec)]
    if spec.recompute_ratios:
        return [Run(text, spec.recompute_ratios[0], conditioning, spec)]
    return [Run(text, ratio, conditioning, spec if ratio > 0.0 else None) for ratio in ratios]


def _recommended(ratio: float) -> Run:
    given = recommended(ratio)
    return Run(_RECOMMENDED, ratio, given.conditioning, given.spec if ratio > 0.0 else None, recommended=True)


def _parse_spec(text: str, name: str, options: Sequence[str]) -> SelectorSpec:
    fields: dict[str, Any] = {}
    for option in options:
        field, equals, value = option.partition("=")
        if not equals or field == "selector" or field not in SelectorSpec.names():
            known = ", ".join(known for known in SelectorSpec.names() if known != "selector")
            raise BadMethod(f"method {text!r}: {option!r} is no field=value of a selection; fields: {known}")
        if field in fields:
            raise BadMethod(f"method {text!r}: {field} is given twice")
        fields[field] = _parse_value(text, field, value)
    try:
        return SelectorSpec(selector=name, **fields)  # type: ignore[arg-type]
    except BadSelection as error:
        raise BadMethod(f"method {text!r}: {error}") from None


def _parse_value(text: str, field: str, value: str) -> object:
    """A value in the type its field's default has; lists are written with `+` between the entries."""
    default = getattr(SelectorSpec(), field)
    try:
        if field in _NUMBER_LISTS:
            return tuple(float(part) for part in value.split("+"))
        if field in _WHOLE_LISTS:
            return value if value.isalpha() else tuple(int(part) for part in value.split("+"))
        return type(default)(value)
    except ValueError:
        wanted = "numbers joined by +" if field in (*_NUMBER_LISTS, *_WHOLE_LISTS) else "a number"
        raise BadMethod(f"method {text!r}: {field} is {value!r}; it must be {wanted}") from None
