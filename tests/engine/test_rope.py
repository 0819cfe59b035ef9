"""Rotation: by position, relative, the same through every entrance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_config

from kvblend.engine.config import RopeConfig
from kvblend.engine.rope import TABLES_MAX, RopeBook, RopeTable, add_rotated, rotate, rotate_into

CPU = torch.device("cpu")
TABLE = RopeTable(tiny_config(), torch.float64, CPU)
ROWS = torch.randn(2, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def at(row: torch.Tensor, position: int) -> torch.Tensor:
    cos, sin = TABLE.gather(torch.tensor([position]))
    return rotate(row[None], cos, sin)[0]


def test_position_zero_changes_nothing() -> None:
    assert torch.equal(at(ROWS[0], 0), ROWS[0])


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255))
def test_scores_depend_on_distance_only(query: int, key: int, shift: int) -> None:
    before = at(ROWS[0], query) @ at(ROWS[1], key)
    after = at(ROWS[0], query + shift) @ at(ROWS[1], key + shift)
    assert float(before - after) == pytest.approx(0.0, abs=1e-5)


def test_rotation_equals_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    table = RopeTable(tiny_config(), torch.float32, CPU)
    angles = torch.outer(torch.arange(40.0), torch.tensor(RopeConfig().inverse_frequencies(8)))
    cos, sin = (torch.cat((f(angles), f(angles)), dim=1)[None] for f in (torch.cos, torch.sin))
    x = torch.randn(1, 3, 40, 8, generator=torch.Generator().manual_seed(4))
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin)
    assert torch.allclose(rotate(x, *table.span(0, 40)), theirs, atol=1e-5)


def test_a_span_equals_the_gathered_positions() -> None:
    for one, other in zip(TABLE.span(5, 9), TABLE.gather(torch.arange(5, 9)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotating_into_a_buffer_equals_rotating(dtype: torch.dtype) -> None:
    cos, sin = TABLE.gather(torch.tensor([3, 11]))
    x = ROWS.to(dtype)
    out = torch.empty_like(x)
    rotate_into(out, x, cos, sin)
    assert torch.allclose(out.double(), rotate(x, cos, sin).double(), atol=1e-12)


def test_narrow_rows_are_rotated_in_float32() -> None:
    table = RopeTable(tiny_config(), torch.bfloat16, CPU)
    cos, sin = table.gather(torch.tensor([200, 201]))
    assert cos.dtype == torch.float32
    wide = rotate(ROWS.to(torch.bfloat16).float(), cos, sin).to(torch.bfloat16)
    assert torch.equal(rotate(ROWS.to(torch.bfloat16), cos, sin), wide)


YARN = RopeConfig(1e4, "yarn", 4.0, original_context=32)
LONG = RopeConfig(
    1e4, "longrope", 4.0, original_context=32, rotary_fraction=0.5, short_factors=(1.0, 1.2), long_factors=(1.0, 9.0)
)


@pytest.mark.parametrize("rope", [RopeConfig(), YARN, LONG, RopeConfig(rotary_fraction=0.25)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_inverse_undoes_a_rotation(rope: RopeConfig, dtype: torch.dtype) -> None:
    table = RopeTable(tiny_config(rope=rope), dtype, CPU)
    positions = torch.tensor([40, 200])
    turned = rotate(ROWS.to(dtype), *table.gather(positions))
    assert torch.allclose(rotate(turned, *table.gather_inverse(positions)), ROWS.to(dtype), atol=1e-5)


def test_the_magnitude_multiplies_what_is_rotated() -> None:
    table = RopeTable(tiny_config(rope=YARN), torch.float64, CPU)
    turned = rotate(ROWS, *table.gather(torch.tensor([0, 9])))
    assert torch.allclose(turned.norm(dim=1), ROWS.norm(dim=1) * YARN.magnitude)
    assert YARN.magnitude > 1.1


@pytest.mark.parametrize("into", [False, True])
def test_what_is_behind_the_rotated_part_of_a_head_stays(into: bool) -> None:
    table = RopeTable(tiny_config(rope=LONG), torch.float64, CPU)
    cos, sin = table.gather(torch.tensor([7, 30]))
    turned = torch.empty_like(ROWS) if into else rotate(ROWS, cos, sin)
    if into:
        rotate_into(turned, ROWS, cos, sin)
    assert torch.equal(turned[:, 4:], ROWS[:, 4:])
    assert not torch.allclose(turned[:, :4], ROWS[:, :4])
    assert torch.allclose(turned[:, :4], rotate(ROWS[:, :4], cos, sin))


def test_a_book_builds_no_longer_table_than_needed() -> None:
    book = RopeBook(tiny_config(context_length=1 << 20), torch.float32, CPU)
    assert [book.tables(10, length)[0].length for length in (10, 2048, 2049)] == [2048, 2048, 4096]


def test_a_book_keeps_within_the_context_but_for_what_is_asked() -> None:
    book = RopeBook(tiny_config(context_length=512), torch.float32, CPU)
    assert [book.tables(10, length)[0].length for length in (10, 520)] == [512, 520]


def test_a_table_is_built_once() -> None:
    book = RopeBook(tiny_config(), torch.float32, CPU)
    assert book.tables(10, 20)[0] is book.tables(300, 400)[0]


def test_windowed_layers_share_the_table_unless_they_have_their_own() -> None:
    one, other = RopeBook(tiny_config(), torch.float32, CPU).tables(9, 9)
    assert one is other
    local = tiny_config(rope_local=RopeConfig(100.0))
    one, other = RopeBook(local, torch.float32, CPU).tables(9, 9)
    assert torch.equal(other.cos, RopeTable(tiny_config(rope=RopeConfig(100.0)), torch.float32, CPU).cos)
    assert not torch.equal(one.cos, other.cos)


def test_the_length_of_the_prompt_chooses_the_table_and_not_the_positions() -> None:
    book = RopeBook(tiny_config(rope=LONG), torch.float32, CPU)
    short, long = book.tables(32, 400)[0], book.tables(33, 400)[0]
    assert not torch.equal(short.cos, long.cos)
    assert book.tables(1, 20)[0] is short
    assert book.tables(300, 400)[0] is long


def test_few_tables_of_a_rope_by_length_are_kept() -> None:
    book = RopeBook(tiny_config(rope=RopeConfig(kind="dynamic", factor=4.0, original_context=32)), torch.float32, CPU)
    first = book.tables(33, 100)[0]
    assert book.tables(33, 100)[0] is first
    for length in range(34, 34 + TABLES_MAX):
        book.tables(length, 100)
    assert book.tables(33, 100)[0] is not first


@pytest.mark.parametrize(("width", "dtype"), [(8, torch.float32), (4, torch.float32), (8, torch.bfloat16)])
def test_an_added_rotation_is_the_rotation_added(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, out = (torch.randn(2, 5, 8, generator=generator).to(dtype) for _ in range(2))
    angles = torch.randn(5, width // 2, generator=generator)
    cos, sin = torch.cat([angles.cos()] * 2, dim=1), torch.cat((-angles.sin(), angles.sin()), dim=1)
    want = out.float() + rotate(x.float(), cos, sin)
    add_rotated(out, x, cos, sin)
    assert torch.allclose(out.float(), want, atol=1e-6 if dtype == torch.float32 else 0.05)
