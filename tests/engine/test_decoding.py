"""Rows behind their prompts, packed: which they are, and that each gets what it would get alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from blends import QUESTION, A, B, C, D, assert_equal, prompt
from tiny_models import Bench, Run, random_ids, tiny_config, tiny_model

from kvblend.engine.config import RopeConfig
from kvblend.engine.decoding import DecodeRows, is_decode_row
from kvblend.engine.layout import Reuse
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.step import WorkItem

MIXED: dict[str, Any] = {"sliding_window": 12, "windowed_layers": (True, True, False, True)}
LONG = RopeConfig(
    1e4, "longrope", 4.0, original_context=40, short_factors=(1.0, 1.1, 1.2, 1.3), long_factors=(1.0, 2.0, 4.0, 9.0)
)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head per kv head": {"num_heads": 2},
    "windows": MIXED,
    "one key": {"sliding_window": 1},
    "two ropes, normed": {**MIXED, "rope_local": RopeConfig(100.0), "qk_norm": True, "post_norms": True},
    "part of a head": {**MIXED, "rope": RopeConfig(rotary_fraction=0.5)},
    "two tables at once": {"rope": LONG, **MIXED},
}
LAYOUTS = [prompt([A, B, C, D]), prompt([B], QUESTION[:1]), prompt([C])]
TOKENS = random_ids(3, 8)


@pytest.fixture(params=MODELS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(tiny_model(tiny_config(**MODELS[request.param])))


def logits_of(bench: Bench, hidden: torch.Tensor | None) -> torch.Tensor:
    assert hidden is not None
    with torch.inference_mode():
        return bench.model.logits(hidden[None])[0]


def decode(bench: Bench, runs: Sequence[Run], tokens: Sequence[int]) -> list[torch.Tensor]:
    """Logits after the last of `tokens`, all sequences in the same ticks."""
    outcomes = []
    for token in tokens:
        for run in runs:
            run.sequence.append_token(token)
        outcomes = bench.step.run([WorkItem(run.sequence, 1) for run in runs])
        assert [outcome.status for outcome in outcomes] == ["last_row"] * len(runs)
    return [logits_of(bench, outcome.hidden) for outcome in outcomes]


def test_packed_rows_give_what_each_gives_alone(bench: Bench) -> None:
    alone = [decode(bench, [bench.full(layout)], TOKENS)[0] for layout in LAYOUTS]
    packed = decode(bench, [bench.full(layout) for layout in LAYOUTS], TOKENS)
    for got, want in zip(packed, alone, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layers_max", [None, 1])
def test_a_row_equals_the_last_one_of_a_longer_prompt(layers_max: int | None) -> None:
    """Whole it is packed; cut by layers it is a slice like any other."""
    bench = Bench(tiny_model(tiny_config(**MODELS["windows"])))
    run = bench.full(prompt([A, B]))
    run.sequence.append_token(5)
    for _ in range(bench.model.num_layers):
        (outcome,) = bench.step.run([WorkItem(run.sequence, 1, layers_max)])
        if outcome.status == "last_row":
            break
    want = bench.full(prompt([A, B], (*QUESTION, 5)))
    count = want.sequence.num_computed_tokens
    slab = run.sequence.slab
    got = Run(logits_of(bench, outcome.hidden), run.sequence, slab.k[:, :, :count], slab.v[:, :, :count])
    assert_equal(got, want)


def test_a_row_beside_the_slices_of_a_prompt_changes_neither() -> None:
    bench, layout = Bench(tiny_model()), prompt([A, B])
    want = decode(bench, [bench.full(LAYOUTS[0])], TOKENS)[0]
    run = bench.full(LAYOUTS[0])
    beside = bench.start(layout, [Reuse.FRESH] * 4, 0.0, PlainSelector())
    for token in TOKENS:
        run.sequence.append_token(token)
        first, second = bench.step.run([WorkItem(run.sequence, 1), WorkItem(beside, 9)])
        assert (first.rows, first.row_layers) == (1, bench.model.num_layers)
        assert second.rows == 9
    assert torch.allclose(logits_of(bench, first.hidden), want, rtol=0, atol=1e-9)
    assert_equal(bench.finish(beside), bench.full(layout))


def test_slots_behind_the_rows_are_not_touched() -> None:
    bench = Bench(tiny_model())
    runs = [bench.full(layout) for layout in LAYOUTS]
    for run in runs:
        run.sequence.slab.k[:, :, run.sequence.num_computed_tokens :] = torch.nan
        run.sequence.slab.v[:, :, run.sequence.num_computed_tokens :] = torch.nan
    assert all(bool(logits.isfinite().all()) for logits in decode(bench, runs, TOKENS))
    for run in runs:
        rest = run.sequence.slab.k[:, :, run.sequence.num_computed_tokens :]
        assert bool(rest.isnan().all())


def test_a_row_whose_sequence_is_cancelled_meanwhile_is_not_handed_out() -> None:
    bench = Bench(tiny_model())
    runs = [bench.full(layout) for layout in LAYOUTS[:2]]
    for run in runs:
        run.sequence.append_token(1)
    real, seen = bench.model.finish, runs[0].sequence

    def finish(layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        seen.cancelled = True
        return real(layer, hidden, attended)

    bench.model.finish = finish  # type: ignore[method-assign]
    outcomes = bench.step.run([WorkItem(run.sequence, 1) for run in runs])
    assert [(o.status, o.hidden is None) for o in outcomes] == [("cancelled", True), ("last_row", False)]


def test_tables_of_several_prompt_lengths_turn_their_own_rows() -> None:
    bench = Bench(tiny_model(tiny_config(**MODELS["two tables at once"])))
    runs = [bench.full(layout) for layout in LAYOUTS]
    for run in runs:
        run.sequence.append_token(1)
    rows = DecodeRows(bench.model, [run.sequence for run in runs])
    cos, _ = rows.turns(0)
    for index, run in enumerate(runs):
        assert run.sequence.ropes is not None
        assert torch.equal(cos[index, 0], run.sequence.ropes[1].cos[run.sequence.num_computed_tokens])
    assert runs[0].sequence.ropes is not None
    assert runs[1].sequence.ropes is not None
    assert runs[0].sequence.ropes[0] is not runs[1].sequence.ropes[0]


def test_which_rows_are_packed() -> None:
    bench, layout = Bench(tiny_model()), prompt([A])
    prefilling = bench.start(layout, [Reuse.FRESH] * 3, 0.0, PlainSelector())
    decoding = bench.full(layout).sequence
    assert not is_decode_row(decoding, None)  # it waits for a token
    decoding.append_token(1)
    assert [is_decode_row(decoding, most) for most in (None, 4, 3)] == [True, True, False]
    assert not is_decode_row(prefilling, None)
    bench.step.run([WorkItem(decoding, 1, 2)])
    assert not is_decode_row(decoding, None)  # its slice is on its way
