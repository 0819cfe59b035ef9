"""Random attention cases for the tests of every backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from kvblend.engine.attention.base import AttentionBackend, reference_attention


@dataclass(frozen=True)
class Case:
    """Inputs of one `attend` call."""

    positions: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None = None

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        plan = backend.prepare(self.positions, self.q.device, self.q.dtype, self.window)
        return backend.attend(plan, self.q, self.k, self.v, self.scale)

    def reference(self) -> torch.Tensor:
        return reference_attention(self.positions, self.q, self.k, self.v, self.scale, self.window)


def make_case(
    positions: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    spare_keys: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> Case:
    """Keys and values are views of a slab with more slots than keys, as in a running sequence."""
    generator = torch.Generator().manual_seed(seed)
    keys = positions[-1] + 1 + spare_keys

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    k, v = (normal(kv_heads, keys + 5, head_dim)[:, :keys] for _ in range(2))
    q = 2.0 * normal(len(positions), heads, head_dim)
    return Case(torch.tensor(positions), q, k, v, head_dim**-0.5, window)


@st.composite
def row_positions(draw: st.DrawFn) -> list[int]:
    """From 0, behind a prefix, scattered, in runs, or a single row."""
    kind = draw(st.sampled_from(["from zero", "behind a prefix", "scattered", "runs", "single"]))
    if kind == "single":
        return [draw(st.integers(0, 90))]
    if kind == "from zero":
        return list(range(draw(st.integers(1, 70))))
    if kind == "behind a prefix":
        start = draw(st.integers(1, 40))
        return list(range(start, start + draw(st.integers(1, 60))))
    if kind == "scattered":
        return sorted(draw(st.sets(st.integers(0, 120), min_size=1, max_size=60)))
    positions: list[int] = []
    at = 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=5)):
        positions += range(at + gap, at + gap + length)
        at += gap + length
    return positions


@st.composite
def attention_cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Case:
    kv_heads = draw(st.integers(1, 3))
    return make_case(
        draw(row_positions()),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 8, 10, 16])),
        spare_keys=draw(st.sampled_from([0, 1, 7])),
        seed=draw(st.integers(0, 1 << 16)),
        dtype=dtype,
        window=draw(st.one_of(st.none(), st.integers(1, 130))),
    )


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert (got.double() - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))
