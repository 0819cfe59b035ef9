from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvblend.store.format import KVShape
from kvblend.store.incoming import TEXT_BYTES_MAX, TOKENS_MAX, check_ids, check_layers
from kvblend.store.keys import ChunkKey, pack_ids

if TYPE_CHECKING:
    from tests.store.conftest import Make


def test_right_ids_come_back_packed() -> None:
    assert check_ids(ChunkKey.of("fp", "", (), (1, 2)), (1, 2), "fp") == pack_ids((1, 2))


def test_no_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="token_ids has 0 ids"):
        check_ids(ChunkKey.of("fp", "", (), ()), (), "fp")


def test_too_many_ids_are_refused_before_they_are_hashed() -> None:
    with pytest.raises(ValueError, match=f"a chunk has 1..{TOKENS_MAX}"):
        check_ids(ChunkKey.of("fp", "", (), ()), range(TOKENS_MAX + 1), "fp")


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"key\.fingerprint is 'fp'"):
        check_ids(ChunkKey.of("fp", "", (), (1,)), (1,), "other")


def test_ids_that_the_key_does_not_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"key\.content"):
        check_ids(ChunkKey.of("fp", "", (), (1,)), (2,), "fp")


def test_a_long_fingerprint_is_refused() -> None:
    long = "x" * (TEXT_BYTES_MAX + 1)
    with pytest.raises(ValueError, match=r"key\.fingerprint has 65537 bytes"):
        check_ids(ChunkKey.of(long, "", (), (1,)), (1,), long)


def test_layers_are_seen_as_flat_bytes_without_a_copy(sample: Make, shape: KVShape) -> None:
    layers = sample().layers
    views = check_layers([memoryview(layer).cast("B", (4, 80)) for layer in layers], shape, 5)
    assert all(view.obj is layer and view.ndim == 1 for view, layer in zip(views, layers, strict=True))


def test_a_wrong_number_of_layers_is_refused(sample: Make, shape: KVShape) -> None:
    with pytest.raises(ValueError, match="layers has 3 entries"):
        check_layers(sample().layers[:3], shape, 5)


def test_a_layer_of_wrong_size_is_refused(sample: Make, shape: KVShape) -> None:
    layers = sample().layers
    with pytest.raises(ValueError, match=r"layers\[2\] has 319 bytes; it must have 320"):
        check_layers([*layers[:2], layers[2][:-1], layers[3]], shape, 5)


def test_layers_may_have_a_float_per_token_behind_k_and_v(sample: Make, shape: KVShape) -> None:
    layers = [layer + bytes(20) for layer in sample().layers]
    assert [view.nbytes for view in check_layers(layers, shape, 5)] == [340] * 4


def test_all_layers_or_none_have_a_float_per_token(sample: Make, shape: KVShape) -> None:
    layers = sample().layers
    with pytest.raises(ValueError, match=r"layers\[1\] has 340 bytes; it must have 320"):
        check_layers([layers[0], layers[1] + bytes(20), *layers[2:]], shape, 5)


@pytest.mark.parametrize("size", [319, 321, 324, 339, 341, 0])
def test_a_length_that_no_layer_has_is_refused_with_both_that_one_may_have(shape: KVShape, size: int) -> None:
    with pytest.raises(ValueError, match=rf"layers\[0\] has {size} bytes; it must have 320 or 340"):
        check_layers([bytes(size)] * 4, shape, 5)


def test_a_layer_with_gaps_is_refused(sample: Make, shape: KVShape) -> None:
    gappy = memoryview(bytearray(640))[::2]
    with pytest.raises(ValueError, match="without gaps"):
        check_layers([*sample().layers[:3], gappy], shape, 5)
