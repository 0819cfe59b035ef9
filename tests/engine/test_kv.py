"""KV slots: what is written where, and what the pool counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_config

from kvblend.engine.kv import PAGE_TOKENS, KVExhausted, KVSlab, SlabPool, pages_of

CPU = torch.device("cpu")


def pool(tokens_max: int = 64) -> SlabPool:
    return SlabPool(tiny_config(), tokens_max, torch.float32, CPU)


def write(slab: KVSlab, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(len(positions), 2, 8) for _ in range(2))
    slab.write(1, torch.tensor(positions), torch.tensor(positions), k, v)
    return k, v


@pytest.mark.parametrize("positions", [[0, 1, 2], [5, 6], [1, 4, 5, 30], [31], [0, 2]])
def test_rows_land_in_the_slots_of_their_positions(positions: list[int]) -> None:
    slab = pool().reserve(32)
    k, v = write(slab, positions)
    for row, position in enumerate(positions):
        assert torch.equal(slab.k[1, :, position], k[row])
        assert torch.equal(slab.v[1, :, position], v[row])


@pytest.mark.parametrize("positions", [[3, 4, 5], [3, 9]])
def test_a_write_touches_nothing_else(positions: list[int]) -> None:
    slab = pool().reserve(16)
    slab.k.fill_(7.0)
    slab.v.fill_(7.0)
    write(slab, positions)
    others = [p for p in range(16) if p not in positions]
    assert bool((slab.k[1][:, others] == 7.0).all())
    assert bool((slab.k[[0, 2, 3]] == 7.0).all())


def test_a_view_is_the_slab_itself() -> None:
    slab = pool().reserve(16)
    k, v = slab.view(2, 5)
    k.fill_(1.0)
    v.fill_(2.0)
    assert k.shape == (2, 5, 8)
    assert bool((slab.k[2, :, :5] == 1.0).all())
    assert bool((slab.v[2, :, :5] == 2.0).all())


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (PAGE_TOKENS, 1), (PAGE_TOKENS + 1, 2)])
def test_a_slab_is_whole_pages(tokens: int, pages: int) -> None:
    slab = pool().reserve(tokens)
    assert (pages_of(tokens), slab.pages, slab.capacity) == (pages, pages, pages * PAGE_TOKENS)


def test_a_slab_has_the_models_shape_and_dtype() -> None:
    slab = SlabPool(tiny_config(), 64, torch.bfloat16, CPU).reserve(16)
    assert slab.k.shape == slab.v.shape == (4, 2, 16, 8)
    assert slab.k.dtype == slab.v.dtype == torch.bfloat16


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    full = pool(64)
    full.reserve(40)
    with pytest.raises(KVExhausted, match="17 tokens do not fit beside 48 of 64"):
        full.reserve(17)


def test_a_refusal_reserves_nothing() -> None:
    full = pool(64)
    with pytest.raises(KVExhausted):
        full.reserve(65)
    assert full.tokens_used == 0


def test_a_second_release_is_an_error() -> None:
    shared = pool()
    slab = shared.reserve(8)
    shared.release(slab)
    with pytest.raises(ValueError, match="not held"):
        shared.release(slab)


def test_a_slab_of_another_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="not held"):
        pool().release(pool().reserve(8))


@given(st.lists(st.integers(1, 60), max_size=12))
def test_the_count_returns_to_zero(sizes: list[int]) -> None:
    shared = pool(400)
    held = []
    for size in sizes:
        try:
            held.append(shared.reserve(size))
        except KVExhausted:
            assert shared.tokens_used + pages_of(size) * PAGE_TOKENS > 400
    assert shared.tokens_used == sum(slab.capacity for slab in held)
    for slab in sorted(held, key=lambda slab: slab.pages):
        shared.release(slab)
    assert shared.tokens_used == 0


def test_a_released_slab_serves_the_next_sequence_of_a_like_size() -> None:
    slots = pool(256)
    first = slots.reserve(64)
    memory = first.k.data_ptr()
    slots.release(first)
    second = slots.reserve(64)
    assert second.k.data_ptr() == memory
    assert (second.pages, slots.tokens_used) == (4, 64)


def test_a_kept_slab_that_is_much_too_large_is_not_used() -> None:
    slots = pool(256)
    first = slots.reserve(128)
    slots.release(first)
    assert slots.reserve(64).capacity == 64


def test_memory_in_use_exceeds_what_was_asked_for_by_a_quarter_at_most() -> None:
    slots = pool(1024)
    slots.release(slots.reserve(640))
    for tokens in (320, 640):
        slots.reserve(tokens)
        assert slots.tokens_allocated <= 1.25 * slots.tokens_max
    slots.release(slots.reserve(64))
    assert slots.tokens_allocated <= 1024


def test_kept_slabs_make_room_for_new_ones() -> None:
    slots = pool(96)
    for tokens in (96, 16, 80):
        slots.release(slots.reserve(tokens))
        assert slots.tokens_allocated <= 96


def test_a_slab_that_is_in_use_again_cannot_be_released_by_its_former_holder() -> None:
    slots = pool()
    first = slots.reserve(16)
    slots.release(first)
    slots.reserve(16)
    with pytest.raises(ValueError, match="not held"):
        slots.release(first)
