"""Two captures of one chunk made one."""

from __future__ import annotations

import pytest
import torch
from tiny_models import Bench, random_ids, tiny_model

from kvblend.engine.capture import payload_sensitivity, payload_tensors, tensor_bytes
from kvblend.engine.contrast import WARM_SHARE, contrast

HEADS, DIM, TOKENS = 2, 4, 5


def layer(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((2, HEADS, TOKENS, DIM), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k_and_v_are_the_weighted_mean(dtype: torch.dtype) -> None:
    warm, plain = layer(1, dtype), layer(2, dtype)
    mixed = contrast([tensor_bytes(warm)], [tensor_bytes(plain)], HEADS, DIM, dtype, 0.25)[0]
    k, v = payload_tensors(mixed, HEADS, DIM, dtype, TOKENS)
    torch.testing.assert_close(torch.stack((k, v)), 0.25 * warm + 0.75 * plain)


def test_sensitivity_is_the_squared_change_in_units_of_the_mean_square_of_the_chunk() -> None:
    warm, plain = layer(1), layer(2)
    mixed = contrast([tensor_bytes(warm)], [tensor_bytes(plain)], HEADS, DIM, torch.float32)[0]
    mean = WARM_SHARE * warm + (1 - WARM_SHARE) * plain
    wanted = torch.zeros(TOKENS)
    for part in (0, 1):
        unit = sum(float(mean[part, :, t].square().sum()) for t in range(TOKENS)) / TOKENS
        wanted += (warm - plain)[part].square().sum((0, 2)) / unit
    got = payload_sensitivity(mixed, HEADS, DIM, torch.float32, TOKENS)
    assert got is not None
    torch.testing.assert_close(got, wanted)


def test_a_plain_payload_has_no_sensitivity() -> None:
    assert payload_sensitivity(tensor_bytes(layer(1)), HEADS, DIM, torch.float32, TOKENS) is None


def test_equal_captures_give_themselves_and_no_sensitivity() -> None:
    payload = tensor_bytes(layer(1))
    mixed = contrast([payload], [payload], HEADS, DIM, torch.float32)[0]
    assert bytes(mixed[: len(payload)]) == bytes(payload)
    got = payload_sensitivity(mixed, HEADS, DIM, torch.float32, TOKENS)
    assert got is not None
    assert not got.any()


def test_layer_0_depends_on_no_context() -> None:
    model = tiny_model(dtype=torch.float64)
    bench, ids = Bench(model), random_ids(9, 3)
    warm, plain = bench.payloads(random_ids(12, 1), ids), bench.payloads(random_ids(4, 2), ids)
    heads, dim = model.config.num_kv_heads, model.config.head_dim
    layers = contrast(warm, plain, heads, dim, torch.float64)
    seen = [payload_sensitivity(payload, heads, dim, torch.float64, len(ids)) for payload in layers]
    assert float(torch.stack([s for s in seen if s is not None])[0].max()) < 1e-12
    assert float(torch.stack([s for s in seen if s is not None])[1:].min()) > 1e-6


def test_captures_of_different_sizes_are_refused() -> None:
    small = tensor_bytes(layer(1)[:, :, :3])
    with pytest.raises(ValueError, match="same layers and sizes"):
        contrast([tensor_bytes(layer(1))], [tensor_bytes(layer(1))], HEADS, DIM, torch.float32, echo=[small])
    with pytest.raises(ValueError, match="same layers and sizes"):
        contrast([tensor_bytes(layer(1))], [small], HEADS, DIM, torch.float32)
