"""Stored forms of KV: sizes, error bounds, refusals, and the same slots whichever way they are filled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvblend.engine.capture import tensor_bytes
from kvblend.engine.precision import INT8_MAX, Precision, UnstorableKV, store_fingerprint
from kvblend.engine.rope import rotate
from kvblend.store.format import KVShape

HEADS, DIM, TOKENS = 2, 6, 5
NARROW = ("bfloat16", "int8")
numbers = st.floats(-1e4, 1e4, width=32)


def precision(stored: str, compute: torch.dtype = torch.float32, heads: int = HEADS, dim: int = DIM) -> Precision:
    return Precision.of(compute, stored, heads, dim)


def layer(seed: int = 0, heads: int = HEADS, tokens: int = TOKENS, dim: int = DIM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, heads, tokens, dim), generator=generator)


def with_sensitivity(kv: torch.Tensor, values: torch.Tensor) -> memoryview:
    return tensor_bytes(torch.cat([part.flatten().view(torch.uint8) for part in (kv, values)]))


@given(st.lists(numbers, min_size=24, max_size=24), st.sampled_from(["float32", *NARROW]))
def test_what_comes_back_is_within_half_a_step(values: list[float], stored: str) -> None:
    kv = torch.tensor(values).view(2, 2, 3, 2)
    form = precision(stored, dim=2)
    k, v = form.decode(form.encode(tensor_bytes(kv), 3), 3)
    for given_, got, dim in ((kv[0], k, 1), (kv[1], v, 2)):
        largest = given_.abs().amax(dim, keepdim=True)
        step = {"float32": 0.0 * largest, "bfloat16": given_.abs() * 2.0**-7, "int8": largest / INT8_MAX}[stored]
        # a few units in the last place on top: the step itself is rounded to float32
        assert bool(((got - given_).abs() <= 0.5 * step * (1 + 1e-5) + 1e-40).all())


@given(st.integers(1, 3), st.integers(1, 9), st.sampled_from([2, 4, 6]), st.integers(0, 2), st.sampled_from(NARROW))
def test_a_payload_has_a_length_that_the_store_takes(
    heads: int, tokens: int, dim: int, behind: int, stored: str
) -> None:
    kv = layer(heads=heads, tokens=tokens, dim=dim)
    parts = [kv, torch.rand(tokens), kv][: behind + 1]
    payload = tensor_bytes(torch.cat([part.flatten().view(torch.uint8) for part in parts]))
    form = precision(stored, heads=heads, dim=dim)
    assert len(form.encode(payload, tokens)) == KVShape(1, heads, dim, stored).layer_lengths(tokens)[behind]
    assert form.kv_bytes(tokens) == KVShape(1, heads, dim, stored).layer_bytes(tokens)


def test_bfloat16_takes_half_the_bytes_and_int8_a_quarter_and_scales() -> None:
    sizes = [precision(stored, heads=3, dim=64).kv_bytes(512) for stored in ("float32", *NARROW)]
    assert sizes[0] == 2 * sizes[1]
    assert sizes[2] == sizes[0] // 4 + 4 * 3 * (64 + 512)


def test_bfloat16_rounds_to_the_nearest_even() -> None:
    halfway, above = 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8
    kv = torch.tensor([halfway, above, -halfway, 1.0]).view(2, 1, 1, 2)
    form = precision("bfloat16", heads=1, dim=2)
    k, v = form.decode(form.encode(tensor_bytes(kv), 1), 1)
    assert [*k.flatten().tolist(), *v.flatten().tolist()] == [1.0, 1.0 + 2.0**-6, -1.0, 1.0]


def test_int8_is_laid_out_as_the_format_page_says() -> None:
    kv = torch.tensor([[[[1.0, 10.0], [2.0, -20.0]]], [[[3.0, 0.0], [0.0, -0.5]]]])
    raw = precision("int8", heads=1, dim=2).encode(tensor_bytes(kv), 2)
    numbers = torch.frombuffer(bytearray(raw[:8]), dtype=torch.int8).tolist()
    assert numbers == [64, 64, 127, -127, 127, 0, 0, -127]
    scales = torch.frombuffer(bytearray(raw[8:]), dtype=torch.float32)
    assert torch.equal(scales, torch.tensor([2.0, 20.0, 3.0, 0.5]) / 127)


def test_an_outlier_costs_only_those_that_share_its_scale() -> None:
    kv = layer()
    kv[0, 0, :, 3] *= 1e4  # a channel of K
    kv[1, 0, 2] *= 1e4  # a token of V
    form = precision("int8")
    k, v = form.decode(form.encode(tensor_bytes(kv), TOKENS), TOKENS)
    wrong_k, wrong_v = (k - kv[0]).abs(), (v - kv[1]).abs()
    assert wrong_k[:, :, [0, 1, 2, 4, 5]].max() < 0.02
    assert wrong_v[:, [0, 1, 3, 4]].max() < 0.02


@pytest.mark.parametrize("stored", NARROW)
def test_zeros_stay_zeros(stored: str) -> None:
    form = precision(stored)
    k, v = form.decode(form.encode(tensor_bytes(torch.zeros(2, HEADS, TOKENS, DIM)), TOKENS), TOKENS)
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize("stored", NARROW)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_numbers_that_are_not_finite_are_refused(stored: str, bad: float, which: int) -> None:
    kv = layer()
    kv[which, 1, 2, 3] = bad
    with pytest.raises(UnstorableKV, match=rf"numbers that {stored} cannot: not finite"):
        precision(stored).encode(tensor_bytes(kv), TOKENS)


def test_a_number_that_rounds_to_infinity_is_refused() -> None:
    kv = layer()
    kv[0, 0, 0, 0] = torch.finfo(torch.float32).max
    for stored in NARROW:
        with pytest.raises(UnstorableKV, match="too large"):
            precision(stored).encode(tensor_bytes(kv), TOKENS)


def test_the_compute_dtype_is_stored_without_a_copy() -> None:
    payload = tensor_bytes(layer())
    form = precision("float32")
    assert form.encode(payload, TOKENS) is payload
    assert not form.is_narrow


@pytest.mark.parametrize("stored", ["float32", *NARROW])
def test_sensitivity_behind_the_numbers_is_kept(stored: str) -> None:
    values = torch.rand(TOKENS)
    form = precision(stored)
    behind = form.sensitivity(form.encode(with_sensitivity(layer(), values), TOKENS), TOKENS)
    assert behind is not None
    assert torch.equal(behind, values)
    assert form.sensitivity(form.encode(tensor_bytes(layer()), TOKENS), TOKENS) is None


@pytest.mark.parametrize("stored", ["float32", *NARROW])
def test_a_second_k_and_v_have_the_form_of_the_first(stored: str) -> None:
    first, second, values = layer(1), layer(2), torch.rand(TOKENS)
    whole = torch.cat([part.flatten().view(torch.uint8) for part in (first, values, second)])
    form = precision(stored)
    raw = form.encode(tensor_bytes(whole), TOKENS)
    assert len(raw) == KVShape(1, HEADS, DIM, stored).layer_lengths(TOKENS)[2]
    assert bytes(form.encode(tensor_bytes(first), TOKENS)) == bytes(raw[: form.kv_bytes(TOKENS)])
    echo = form.echo(raw, TOKENS)
    assert echo is not None
    assert bytes(echo) == bytes(form.encode(tensor_bytes(second), TOKENS))
    behind = form.sensitivity(raw, TOKENS)
    assert behind is not None
    assert torch.equal(behind, values)
    assert form.echo(form.encode(with_sensitivity(first, values), TOKENS), TOKENS) is None


@pytest.mark.parametrize("stored", ["float32", *NARROW])
@pytest.mark.parametrize("width", [DIM, 4])
def test_slots_get_the_decoded_numbers_with_k_turned(stored: str, width: int) -> None:
    form = precision(stored)
    raw = form.encode(with_sensitivity(layer(1), torch.rand(TOKENS)), TOKENS)
    cos, sin = torch.rand(TOKENS, width), torch.rand(TOKENS, width)
    slab = torch.full((2, HEADS, TOKENS + 4, DIM), math.nan)
    slots = slab[0, :, 3 : 3 + TOKENS], slab[1, :, 3 : 3 + TOKENS]
    form.decode_into([(0, TOKENS, raw)], slots, (cos, sin))
    k, v = form.decode(raw, TOKENS)
    torch.testing.assert_close(slots[0], rotate(k, cos, sin))
    assert torch.equal(slots[1], v)
    assert int(slab.isnan().sum()) == 2 * HEADS * 4 * DIM


@given(st.integers(0, 1 << 20), st.sampled_from(NARROW))
def test_what_rounding_does_behind_a_rotation_stays_below_its_limit(seed: int, stored: str) -> None:
    form, kv = precision(stored), layer(seed)
    angle = torch.randn(TOKENS, DIM // 2).repeat(1, 2)
    turn = angle.cos(), torch.cat((-angle.sin()[:, : DIM // 2], angle.sin()[:, DIM // 2 :]), dim=1)
    slots = torch.empty_like(kv[0]), torch.empty_like(kv[1])
    form.decode_into([(0, TOKENS, form.encode(tensor_bytes(kv), TOKENS))], slots, turn)
    for got, wanted in zip(slots, (rotate(kv[0], *turn), kv[1]), strict=True):
        assert float((got - wanted).abs().max()) <= form.rounding_max * float(kv.abs().max())
    assert precision("float32").rounding_max == 0.0


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float64])
def test_other_compute_dtypes_get_their_own_numbers(compute: torch.dtype) -> None:
    kv = layer().to(compute)
    form = precision("int8", compute)
    raw = form.encode(tensor_bytes(kv), TOKENS)
    slots = torch.empty(HEADS, TOKENS, DIM, dtype=compute), torch.empty(HEADS, TOKENS, DIM, dtype=compute)
    table = torch.float64 if compute == torch.float64 else torch.float32
    turn = torch.ones(TOKENS, DIM, dtype=table), torch.zeros(TOKENS, DIM, dtype=table)
    form.decode_into([(0, TOKENS, raw)], slots, turn)
    limit = 2 * form.rounding_max * float(kv.abs().max())
    assert float((slots[0] - kv[0]).abs().max()) < limit
    assert float((slots[1] - kv[1]).abs().max()) < limit


@pytest.mark.parametrize(
    ("compute", "stored", "said"),
    [
        (torch.float32, "int4", "store_dtype is 'int4'; choose float32, bfloat16, int8"),
        (torch.bfloat16, "float32", "no narrower than bfloat16"),
        (torch.bfloat16, "float16", "no narrower than bfloat16"),
    ],
)
def test_a_stored_dtype_that_is_unknown_or_wider_is_refused(compute: torch.dtype, stored: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        precision(stored, compute)


def test_every_pair_of_dtypes_has_a_name_of_its_own() -> None:
    pairs = [("float32", "float32"), ("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "bfloat16")]
    pairs.append(("bfloat16", "int8"))
    assert len({store_fingerprint("f", *pair) for pair in pairs}) == len(pairs)
    assert store_fingerprint("f", "float32", "float32") == "f"


@pytest.mark.parametrize("stored", ["float32", *NARROW])
def test_an_echo_is_stored_in_the_form_of_the_first_kv(stored: str) -> None:
    kv, echo, floats = layer(1), layer(2), torch.rand(TOKENS)
    form = precision(stored)
    parts = [part.flatten().view(torch.uint8) for part in (kv, floats, echo)]
    payload = form.encode(tensor_bytes(torch.cat(parts)), TOKENS)
    found = form.echo(payload, TOKENS)
    assert found is not None
    for one, other in ((found, echo), (payload, kv)):
        wanted = form.decode(form.encode(tensor_bytes(other), TOKENS), TOKENS)
        torch.testing.assert_close(form.decode(one, TOKENS), wanted, rtol=0, atol=0)
    assert torch.equal(form.sensitivity(payload, TOKENS), floats)  # type: ignore[arg-type]


def test_without_a_second_kv_there_is_no_echo() -> None:
    form = precision("int8")
    assert form.echo(form.encode(tensor_bytes(layer()), TOKENS), TOKENS) is None
    payload = form.encode(with_sensitivity(layer(), torch.rand(TOKENS)), TOKENS)
    assert form.echo(payload, TOKENS) is None


def placed(form: Precision, starts: list[int]) -> tuple[list[tuple[int, int, memoryview]], int]:
    """Encoded segments at these positions, and how many positions there are."""
    raws = [form.encode(tensor_bytes(layer(start)), TOKENS) for start in starts]
    return [(start, start + TOKENS, raw) for start, raw in zip(starts, raws, strict=True)], starts[-1] + TOKENS + 2


@pytest.mark.parametrize("stored", ["float32", *NARROW])
@pytest.mark.parametrize("starts", [[1, 1 + TOKENS, 1 + 2 * TOKENS], [0, TOKENS + 3], [2, 2 + TOKENS, 4 + 2 * TOKENS]])
def test_segments_are_decoded_together_as_each_alone(stored: str, starts: list[int]) -> None:
    form = precision(stored)
    parts, length = placed(form, starts)
    turn = torch.rand(length, DIM), torch.rand(length, DIM)
    together, alone = (torch.zeros(2, HEADS, length, DIM) for _ in range(2))
    form.decode_into(parts, (together[0], together[1]), turn)
    for part in parts:
        form.decode_into([part], (alone[0], alone[1]), turn)
    torch.testing.assert_close(together, alone)
    assert not bool((together == 0).all(dim=-1).all(dim=0).all(dim=0)[starts[0] : starts[0] + TOKENS].any())


@pytest.mark.parametrize("stored", ["float32", *NARROW])
def test_some_rows_are_decoded_as_all_would_be(stored: str) -> None:
    form = precision(stored)
    parts, length = placed(form, [0, TOKENS + 1])
    angles = torch.rand(length, DIM)
    turn = (angles.cos(), angles.sin())
    whole, some = [(torch.zeros(HEADS, length, DIM), torch.zeros(HEADS, length, DIM)) for _ in range(2)]
    form.decode_into(parts, whole, turn)
    rows = torch.tensor([1, 4]), torch.tensor([0, 2, 3])
    form.decode_rows_into([(*part, some_rows) for part, some_rows in zip(parts, rows, strict=True)], some, turn)
    at = [1, 4, TOKENS + 1, TOKENS + 3, TOKENS + 4]
    for all_rows, few in zip(whole, some, strict=True):
        wanted = torch.zeros_like(all_rows)
        wanted[:, at] = all_rows[:, at]
        torch.testing.assert_close(few, wanted)
