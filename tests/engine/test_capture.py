"""Captured KV: whole spans in any slicing, nothing incomplete handed out, bytes that read back as they were."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.capture import DTYPE_NAMES, DTYPES, Capture, payload_tensors, tensor_bytes

LAYERS, HEADS, DIM, TOKENS = 2, 3, 4, 20


def computed(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[layers, tokens, heads, dim]` of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn((LAYERS, TOKENS, HEADS, DIM), generator=generator).to(dtype) for _ in range(2))
    return k, v


def record(capture: Capture, rows: torch.Tensor, layers: range = range(LAYERS)) -> None:
    k, v = computed()
    for layer in layers:
        capture.record(layer, rows, k[layer][rows], v[layer][rows])


def capture_of(*spans: tuple[int, int]) -> Capture:
    return Capture(spans, LAYERS, HEADS, DIM, torch.float32)


@given(st.sets(st.integers(1, TOKENS - 1), max_size=6))
def test_any_slicing_captures_the_same(cuts: set[int]) -> None:
    capture = capture_of((3, 9), (12, 20))
    for start, end in pairwise([0, *sorted(cuts), TOKENS]):
        record(capture, torch.arange(start, end))
    k, v = computed()
    for index, (start, end) in enumerate(capture.spans):
        for layer, payload in enumerate(capture.payloads(index)):
            got_k, got_v = payload_tensors(payload, HEADS, DIM, torch.float32)
            assert torch.equal(got_k, k[layer, start:end].transpose(0, 1))
            assert torch.equal(got_v, v[layer, start:end].transpose(0, 1))


def test_a_payload_is_k_then_v() -> None:
    capture = capture_of((0, 1))
    record(capture, torch.arange(1))
    k, v = computed()
    flat = torch.frombuffer(capture.payloads(0)[1], dtype=torch.float32)
    assert torch.equal(flat, torch.cat((k[1, 0].flatten(), v[1, 0].flatten())))


def test_a_span_is_complete_after_its_last_layer() -> None:
    capture = capture_of((2, 6))
    record(capture, torch.arange(TOKENS), range(LAYERS - 1))
    assert not capture.complete(0)
    record(capture, torch.arange(TOKENS), range(LAYERS - 1, LAYERS))
    assert capture.complete(0)


def test_an_incomplete_span_is_not_handed_out() -> None:
    capture = capture_of((2, 6))
    record(capture, torch.arange(2, 5))
    with pytest.raises(ValueError, match=r"span \(2, 6\) is not complete: 1 rows are missing"):
        capture.payloads(0)


def test_rows_seen_twice_do_not_stand_for_missing_ones() -> None:
    capture = capture_of((2, 6))
    record(capture, torch.arange(2, 4))
    record(capture, torch.arange(2, 4))
    assert not capture.complete(0)


def test_rows_seen_twice_leave_a_complete_span_complete() -> None:
    capture = capture_of((2, 6))
    record(capture, torch.arange(TOKENS))
    record(capture, torch.arange(4, TOKENS))
    assert capture.complete(0)


def test_spans_complete_one_by_one() -> None:
    capture = capture_of((0, 4), (4, 8))
    record(capture, torch.arange(0, 6))
    assert [capture.complete(0), capture.complete(1)] == [True, False]


def test_rows_outside_the_spans_are_left_alone() -> None:
    capture = capture_of((5, 8))
    record(capture, torch.tensor([0, 2, 9, 19]))
    assert not capture.complete(0)


def test_gappy_rows_in_a_span_are_refused() -> None:
    with pytest.raises(ValueError, match="only whole stretches can be captured"):
        record(capture_of((2, 8)), torch.tensor([2, 3, 5]))


def test_gaps_outside_a_span_do_not_matter() -> None:
    capture = capture_of((4, 6))
    record(capture, torch.tensor([0, 4, 5, 9]))
    assert capture.complete(0)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_bytes_read_back_in_every_dtype(dtype: torch.dtype) -> None:
    k, v = (tensor[0].transpose(0, 1) for tensor in computed(dtype=dtype))
    payload = tensor_bytes(torch.stack((k, v)))
    assert len(payload) == 2 * k.numel() * dtype.itemsize
    got_k, got_v = payload_tensors(payload, HEADS, DIM, dtype)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)


def test_payloads_are_views_of_the_captured_memory() -> None:
    capture = capture_of((0, 2))
    record(capture, torch.arange(2))
    first, again = capture.payloads(0)[0], capture.payloads(0)[0]
    first[:] = bytes(len(first))
    assert bytes(again) == bytes(len(again))


def test_dtype_names_are_torchs_own() -> None:
    assert all(getattr(torch, name) is dtype for name, dtype in DTYPES.items())
