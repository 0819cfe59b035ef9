"""Residual correction: what the chosen rows show is what the others get, in the un-rotated frame."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU, tiny_config

from kvblend.engine.kv import KVSlab, SlabPool
from kvblend.engine.residual import RESIDUALS, Residual, ResidualKind
from kvblend.engine.rope import RopeTable, rotate

SPANS = ((4, 14), (14, 26))
CHOSEN = torch.tensor([5, 9, 13, 15, 20])
ROWS = torch.tensor([5, 9, 13, 15, 20, 26, 27])
TOKENS = 28


@pytest.fixture
def rope() -> RopeTable:
    return RopeTable(tiny_config(), torch.float64, CPU)


def filled(rope: RopeTable, seed: int = 0) -> tuple[KVSlab, torch.Tensor, torch.Tensor]:
    """A slab whose layer 1 holds random cached KV; with its un-rotated K and V `[tokens, kv_heads, dim]`."""
    slab = SlabPool(tiny_config(), 64, torch.float64, CPU).reserve(TOKENS)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(TOKENS, 2, 8, generator=generator, dtype=torch.float64)
    v = torch.randn(TOKENS, 2, 8, generator=generator, dtype=torch.float64)
    cos, sin = rope.span(0, TOKENS)
    slab.k[1, :, :TOKENS] = rotate(raw, cos[:, None], sin[:, None]).transpose(0, 1)
    slab.v[1, :, :TOKENS] = v.transpose(0, 1)
    return slab, raw, v


def corrected(
    rope: RopeTable, kind: ResidualKind, change_k: torch.Tensor, change_v: torch.Tensor, fraction: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """How a correction moved un-rotated K and V `[tokens, kv_heads, dim]` for given changes of the chosen rows."""
    slab, raw, v = filled(rope)
    fresh_k, fresh_v = raw[ROWS] + change_k, v[ROWS] + change_v
    Residual(kind, fraction, SPANS, CHOSEN).correct(slab, 1, ROWS, fresh_k, fresh_v, rope)
    cos, sin = rope.span(0, TOKENS)
    after = rotate(slab.k[1, :, :TOKENS].transpose(0, 1), cos[:, None], -sin[:, None])
    return after - raw, slab.v[1, :, :TOKENS].transpose(0, 1) - v


@pytest.mark.parametrize("kind", RESIDUALS)
def test_a_change_common_to_all_chosen_rows_moves_every_other_cached_row(rope: RopeTable, kind: ResidualKind) -> None:
    shift_k, shift_v = torch.full((2, 8), 0.5, dtype=torch.float64), torch.full((2, 8), -2.0, dtype=torch.float64)
    moved_k, moved_v = corrected(rope, kind, shift_k.expand(7, 2, 8), shift_v.expand(7, 2, 8))
    others = [p for p in range(4, 26) if p not in CHOSEN.tolist()]
    assert torch.allclose(moved_k[others], shift_k.expand(len(others), 2, 8), atol=1e-6)
    assert torch.allclose(moved_v[others], shift_v.expand(len(others), 2, 8), atol=1e-6)


@pytest.mark.parametrize("kind", RESIDUALS)
def test_rows_that_are_computed_or_not_cached_stay_as_they_are(rope: RopeTable, kind: ResidualKind) -> None:
    moved_k, moved_v = corrected(rope, kind, torch.ones(7, 2, 8), torch.ones(7, 2, 8))
    still = [*range(4), *CHOSEN.tolist(), 26, 27]
    assert float(moved_k[still].abs().max()) < 1e-12
    assert float(moved_v[still].abs().max()) == 0.0


def test_the_fraction_scales_the_correction(rope: RopeTable) -> None:
    whole, _ = corrected(rope, "mean", torch.ones(7, 2, 8), torch.zeros(7, 2, 8))
    part, _ = corrected(rope, "mean", torch.ones(7, 2, 8), torch.zeros(7, 2, 8), fraction=0.25)
    assert torch.allclose(part, 0.25 * whole)


def test_the_mean_is_taken_per_chunk(rope: RopeTable) -> None:
    change = torch.zeros(7, 2, 8, dtype=torch.float64)
    change[:3], change[3:5] = 1.0, 3.0
    _, moved = corrected(rope, "mean", torch.zeros(7, 2, 8), change)
    assert torch.allclose(moved[4], torch.ones(2, 8, dtype=torch.float64))
    assert torch.allclose(moved[25], torch.full((2, 8), 3.0, dtype=torch.float64))


def test_a_chunk_without_chosen_rows_takes_the_mean_of_all(rope: RopeTable) -> None:
    slab, raw, v = filled(rope)
    chosen, rows = torch.tensor([5, 9]), torch.tensor([5, 9, 27])
    Residual("mean", 1.0, SPANS, chosen).correct(slab, 1, rows, raw[rows], v[rows] + 2.0, rope)
    assert torch.allclose(slab.v[1, :, 20] - v[20], torch.full((2, 8), 2.0, dtype=torch.float64))


def test_distance_follows_the_nearer_row(rope: RopeTable) -> None:
    change = torch.full((7, 2, 8), -1.0, dtype=torch.float64)
    change[0] = 1.0
    _, moved = corrected(rope, "distance", torch.zeros(7, 2, 8), change)
    assert float(moved[4].mean()) > float(moved[12].mean())


def test_distance_weighs_the_mean_of_the_chunk_like_one_row_at_hand(rope: RopeTable) -> None:
    change = torch.full((7, 2, 8), -1.0, dtype=torch.float64)
    change[0] = 1.0
    _, moved = corrected(rope, "distance", torch.zeros(7, 2, 8), change)
    near = torch.exp(-torch.tensor([1.0, 5.0, 9.0], dtype=torch.float64) / 32.0)
    own = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    expected = ((near * own).sum() + own.mean()) / (near.sum() + 1.0)
    assert torch.allclose(moved[4], expected.expand(2, 8), atol=1e-6)


def test_distance_lets_no_row_say_more_than_the_median(rope: RopeTable) -> None:
    change = torch.ones(7, 2, 8, dtype=torch.float64)
    change[1] = 100.0
    _, moved = corrected(rope, "distance", torch.zeros(7, 2, 8), change)
    assert torch.allclose(moved[10], torch.ones(2, 8, dtype=torch.float64), atol=1e-6)


def test_ridge_learns_a_linear_map_that_the_mean_cannot() -> None:
    config = tiny_config(context_length=512)
    rope = RopeTable(config, torch.float64, CPU)
    slab = SlabPool(config, 512, torch.float64, CPU).reserve(400)
    generator = torch.Generator().manual_seed(3)
    raw = torch.randn(400, 2, 8, generator=generator, dtype=torch.float64)
    cos, sin = rope.span(0, 400)
    slab.k[0, :, :400] = rotate(raw, cos[:, None], sin[:, None]).transpose(0, 1)
    slab.v[0].zero_()
    chosen = torch.arange(0, 400, 2)
    errors = {}
    kinds: tuple[ResidualKind, ...] = ("mean", "ridge")
    for kind in kinds:
        trial = KVSlab(slab.k.clone(), slab.v.clone(), slab.pages)
        residual = Residual(kind, 1.0, ((0, 400),), chosen)
        residual.correct(trial, 0, chosen, raw[chosen] * 1.5, trial.v[0, :, chosen].transpose(0, 1), rope)
        got = rotate(trial.k[0, :, :400].transpose(0, 1), cos[:, None], -sin[:, None])[1::2]
        errors[kind] = float((got - raw[1::2] * 1.5).norm())
    assert errors["ridge"] < 0.5 * errors["mean"]


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'median'; choose mean, distance, ridge"):
        Residual("median", 1.0, SPANS, CHOSEN)  # type: ignore[arg-type]
