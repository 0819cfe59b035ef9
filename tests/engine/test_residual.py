"""Residual correction: what the chosen rows show is what the others get, in the un-rotated frame."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU, tiny_config

from kvblend.engine.kv import KVSlab, SlabPool
from kvblend.engine.residual import LOW_RANK, RESIDUALS, Residual, ResidualKind
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


MANY = torch.arange(4, 26, 2)


def spread(rope: RopeTable, kind: ResidualKind, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Un-rotated K and V by which `kind` moves a slab's rows, 11 of them chosen, with random changes."""
    slab, raw, v = filled(rope)
    generator = torch.Generator().manual_seed(seed)
    change = torch.randn(2, len(MANY), 2, 8, generator=generator, dtype=torch.float64)
    Residual(kind, 1.0, SPANS, MANY).correct(slab, 1, MANY, raw[MANY] + change[0], v[MANY] + change[1], rope)
    cos, sin = rope.span(0, TOKENS)
    after = rotate(slab.k[1, :, :TOKENS].transpose(0, 1), cos[:, None], -sin[:, None])
    return after - raw, slab.v[1, :, :TOKENS].transpose(0, 1) - v


def members(start: int, end: int) -> torch.Tensor:
    """Which of MANY lie in a chunk, as indices."""
    return torch.tensor([index for index, row in enumerate(MANY.tolist()) if start <= row < end])


def reduced(change: torch.Tensor, rank: int) -> torch.Tensor:
    """What of one head's K or V changes `[rows, dim]` is spread: limited, of rank `rank` around its chunk's mean."""
    length = change.norm(dim=1, keepdim=True)
    change = change * (length.median() / length).clamp_max(1.0)
    centre = torch.zeros_like(change)
    for start, end in SPANS:
        rows = members(start, end)
        centre[rows] = change[rows].mean(0)
    u, size, directions = torch.linalg.svd(change - centre, full_matrices=False)
    size[rank:] = 0.0
    small: torch.Tensor = centre + u @ torch.diag(size) @ directions
    return small


def test_lowrank_spreads_the_best_approximation_around_the_means_of_the_chunks(rope: RopeTable) -> None:
    generator = torch.Generator().manual_seed(5)
    change = torch.randn(2, len(MANY), 2, 8, generator=generator, dtype=torch.float64)
    for part, moved in zip(change, spread(rope, "lowrank"), strict=True):
        for head in range(2):
            small = reduced(part[:, head], LOW_RANK)
            for place in (5, 11, 15, 25):
                rows = members(*(SPANS[0] if place < 14 else SPANS[1]))
                near = torch.exp(-(MANY[rows] - place).abs().double() / 32.0)
                wanted = (near @ small[rows] + small[rows].mean(0)) / (near.sum() + 1.0)
                assert torch.allclose(moved[place, head], wanted, atol=1e-5)


def test_lowrank_leaves_directions_out_that_distance_spreads(rope: RopeTable) -> None:
    low, whole = (spread(rope, kind)[0] for kind in ("lowrank", "distance"))
    assert float((low - whole).abs().max()) > 0.01


def test_lowrank_is_distance_where_the_rows_span_no_more_directions(rope: RopeTable) -> None:
    # five rows around the means of two chunks span three
    change = torch.randn(2, 7, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, whole = (corrected(rope, kind, *change) for kind in ("lowrank", "distance"))
    torch.testing.assert_close(low, whole)


def test_lowrank_gives_the_same_bits_again(rope: RopeTable) -> None:
    once, again = spread(rope, "lowrank"), spread(rope, "lowrank")
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_do_not_stop_lowrank(rope: RopeTable, bad: float) -> None:
    change = torch.ones(7, 2, 8, dtype=torch.float64)
    change[3] = bad
    _, moved = corrected(rope, "lowrank", torch.zeros(7, 2, 8), change)
    assert not bool(moved[25].isfinite().all())


def test_lowrank_takes_narrow_numbers() -> None:
    config = tiny_config()
    rope = RopeTable(config, torch.bfloat16, CPU)
    slab = SlabPool(config, 64, torch.bfloat16, CPU).reserve(TOKENS)
    slab.k.zero_()
    slab.v.zero_()
    ones = torch.ones(7, 2, 8, dtype=torch.bfloat16)
    Residual("lowrank", 1.0, SPANS, CHOSEN).correct(slab, 1, ROWS, ones, ones, rope)
    torch.testing.assert_close(slab.v[1, :, 6], ones[0], rtol=0.02, atol=0.0)


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
    with pytest.raises(ValueError, match="'median'; choose mean, distance, ridge, lowrank"):
        Residual("median", 1.0, SPANS, CHOSEN)  # type: ignore[arg-type]
