from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvblend.store.errors import ChunkDamaged, ChunkError, ForeignFile
from kvblend.store.format import (
    HEADER_BYTES_MAX,
    MAGIC,
    ChunkHeader,
    KVShape,
    align,
    build_header,
    checksum,
    header_region_bytes,
    parse_header,
)
from kvblend.store.keys import ChunkKey, ids_digest, pack_ids

SHAPE = KVShape(3, 2, 4, "float32")
IDS = (5, 6, 70000)
KEY = ChunkKey.of("fp", "salt", (1,), IDS)
# BLAKE3 of a file of format version 2
PLAIN_FILE = "323d4c6bb7a1cfbee7b6646045ab10417bc2db236e599e7c14c4a4829beb9ec4"
PAYLOADS = [bytes([index]) * SHAPE.layer_bytes(len(IDS)) for index in range(3)]


def build(ids: tuple[int, ...] = IDS, shape: KVShape = SHAPE) -> tuple[ChunkHeader, bytes]:
    key = ChunkKey.of("fp", "salt", (1,), ids)
    return build_header(key, pack_ids(ids), shape, [checksum(b"")] * shape.num_layers)


def whole_file() -> bytes:
    _, region = build_header(KEY, pack_ids(IDS), SHAPE, [checksum(payload) for payload in PAYLOADS])
    return region + b"".join(payload.ljust(align(len(payload)), b"\0") for payload in PAYLOADS)


def forge(fields: object, version: int = 2) -> bytes:
    """A header region with a right checksum around any content."""
    packed: bytes = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    preamble = struct.pack("<8sII", MAGIC, version, len(packed))
    body = packed.ljust(align(48 + len(packed)) - 48, b"\0")
    return preamble + blake3(preamble + body).digest() + body


def good_fields() -> dict[str, Any]:
    region = whole_file()[: header_region_bytes(whole_file())]
    fields: dict[str, Any] = msgpack.unpackb(region[48 : 48 + struct.unpack_from("<I", region, 12)[0]])
    return fields


def test_header_comes_back() -> None:
    built, region = build_header(KEY, pack_ids(IDS), SHAPE, [checksum(payload) for payload in PAYLOADS])
    assert parse_header(region, built.file_bytes) == built
    assert (built.key, built.token_ids, built.num_tokens, built.shape) == (KEY, IDS, 3, SHAPE)


def test_a_stranger_can_read_a_file_by_the_page() -> None:
    raw = whole_file()
    assert raw[:8] == b"\x89KVBLEND"
    version, length = struct.unpack_from("<II", raw, 8)
    data_start = -(-(48 + length) // 4096) * 4096
    assert version == 2
    assert raw[16:48] == blake3(raw[:16] + raw[48:data_start]).digest()
    header = msgpack.unpackb(raw[48 : 48 + length])
    assert struct.unpack("<3I", header["token_ids"]) == IDS
    for (offset, size, digest), payload in zip(header["layers"], PAYLOADS, strict=True):
        assert raw[data_start + offset :][:size] == payload
        assert blake3(payload).digest() == digest
        assert offset % header["alignment"] == 0


def test_layer_bytes_are_k_and_v() -> None:
    assert KVShape(30, 3, 64, "bfloat16").layer_bytes(512) == 2 * 3 * 512 * 64 * 2


def test_layer_bytes_of_int8_hold_scales_of_channels_and_of_tokens() -> None:
    shape = KVShape(30, 3, 64, "int8")
    kv = 2 * 3 * 512 * 64 + 4 * 3 * (64 + 512)
    assert shape.layer_lengths(512)[:2] == (kv, kv + 4 * 512)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=2000), st.integers(1, 200))
def test_any_chunk_length_and_layer_count_comes_back(ids: list[int], num_layers: int) -> None:
    built, region = build(tuple(ids), KVShape(num_layers, 1, 2, "bfloat16"))
    assert parse_header(region, built.file_bytes) == built
    assert len(region) == built.data_start == header_region_bytes(region[:4096])


def test_every_flipped_byte_of_the_header_region_is_noticed() -> None:
    built, region = build()
    for at in range(len(region)):
        broken = bytearray(region)
        broken[at] ^= 1 << (at % 8)
        with pytest.raises(ChunkError):
            parse_header(bytes(broken), built.file_bytes)


def test_every_truncation_is_noticed() -> None:
    raw = whole_file()
    for size in range(len(raw)):
        with pytest.raises(ChunkDamaged):
            parse_header(raw[:size], size)


def test_a_longer_file_is_noticed() -> None:
    raw = whole_file()
    with pytest.raises(ChunkDamaged, match=f"the file has {len(raw) + 1} bytes"):
        parse_header(raw, len(raw) + 1)


@pytest.mark.parametrize("raw", [b"PK\x03\x04" + bytes(100), b"\x89PNG", b"{}"])
def test_other_kinds_of_file_are_foreign(raw: bytes) -> None:
    with pytest.raises(ForeignFile, match="magic"):
        parse_header(raw, len(raw))


def test_another_version_is_foreign() -> None:
    raw = MAGIC + struct.pack("<II", 3, 10) + bytes(4096)
    with pytest.raises(ForeignFile, match="version is 3"):
        parse_header(raw, len(raw))


def test_a_huge_header_is_refused_before_it_is_read() -> None:
    with pytest.raises(ChunkDamaged, match=str(HEADER_BYTES_MAX)):
        header_region_bytes(MAGIC + struct.pack("<II", 1, 2**32 - 1))


def wrong_values() -> list[tuple[str, object]]:
    span = [0, SHAPE.layer_bytes(3), bytes(32)]
    return [
        ("fingerprint", b"bytes"), ("tenant", 3), ("tenant", "ab"), ("tenant", "G" * 64),
        ("conditioning", bytes(31)), ("conditioning", "x" * 32),
        ("token_ids", b""), ("token_ids", b"123"), ("token_ids", [1, 2]), ("num_layers", 0), ("num_layers", True),
        ("num_layers", 2), ("num_layers", 2**40), ("num_kv_heads", -1), ("head_dim", 4.0), ("dtype", "float64"),
        ("dtype", ["float32"]), ("alignment", 1), ("alignment", 4096.0), ("layers", {}), ("layers", []),
        ("layers", [span, span, span]), ("layers", [span, [4096, 1, bytes(32)], [8192, 1, bytes(32)]]),
        ("layers", [span, [4096, span[1], b"short"], [8192, span[1], bytes(32)]]),
        ("layers", [span, [2**62, span[1], bytes(32)], [8192, span[1], bytes(32)]]),
        ("layers", [span[:2], span, span]), ("layers", [[-4096, *span[1:]], span, span]), ("layers", [7, 7, 7]),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), wrong_values())
def test_wrong_values_under_a_right_checksum_are_refused(name: str, value: object) -> None:
    fields = good_fields()
    fields[name] = value
    with pytest.raises(ChunkDamaged):
        parse_header(forge(fields), len(whole_file()))


def old_fields(salt: str) -> dict[str, Any]:
    """The fields of a header of version 1."""
    fields = good_fields()
    del fields["tenant"]
    return {**fields, "salt": salt}


def test_a_file_of_version_1_without_a_salt_is_read_under_its_old_id() -> None:
    key = parse_header(forge(old_fields(""), version=1), len(whole_file())).key
    assert key == ChunkKey.of("fp", "", (1,), IDS)
    assert key.digest == blake3(msgpack.packb([1, "fp", "", ids_digest([1]), ids_digest(IDS)])).digest()


def test_a_file_of_version_1_with_its_salt_in_clear_is_left_alone() -> None:
    with pytest.raises(ForeignFile, match="salt in clear"):
        parse_header(forge(old_fields("ann"), version=1), len(whole_file()))


@pytest.mark.parametrize("version", [1, 2])
def test_the_fields_of_the_other_version_are_damage(version: int) -> None:
    fields = good_fields() if version == 1 else old_fields("")
    with pytest.raises(ChunkDamaged, match="fields of its format version"):
        parse_header(forge(fields, version), len(whole_file()))


def test_no_salt_stands_in_a_file() -> None:
    _, region = build_header(ChunkKey.of("fp", "a secret", (), IDS), pack_ids(IDS), SHAPE, [bytes(32)] * 3)
    assert b"a secret" not in region
    assert blake3(b"a secret").hexdigest().encode() in region


def test_the_forged_header_without_a_change_is_accepted() -> None:
    assert parse_header(forge(good_fields()), len(whole_file())).key == KEY


@pytest.mark.parametrize("name", sorted(good_fields()))
def test_missing_fields_are_refused(name: str) -> None:
    fields = good_fields()
    del fields[name]
    with pytest.raises(ChunkDamaged, match="fields"):
        parse_header(forge(fields), len(whole_file()))


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ChunkDamaged, match="fields"):
        parse_header(forge(good_fields() | {"more": 1}), len(whole_file()))


@given(st.binary(max_size=200))
def test_any_bytes_as_header_end_in_a_chunk_error(content: bytes) -> None:
    with pytest.raises(ChunkDamaged):
        parse_header(forge(content), 4096)


def test_deep_nesting_ends_in_a_chunk_error() -> None:
    with pytest.raises(ChunkDamaged):
        parse_header(forge(b"\x91" * 100_000 + b"\xc0"), 4096)


@pytest.mark.parametrize(
    "values", [(0, 1, 1, "float32"), (1, 0, 1, "float32"), (1, 1, 2**20, "float32"), (1, 1, 1, "int4"), (1.0, 1, 1, "")]
)
def test_impossible_shapes_are_refused(values: tuple[int, int, int, str]) -> None:
    with pytest.raises(ValueError, match=r"is .*; (it must be an integer in 1\.\.|choose)"):
        KVShape(*values)


def test_a_header_needs_one_checksum_per_layer() -> None:
    with pytest.raises(ValueError, match="2 checksums for 3 layers"):
        build_header(KEY, pack_ids(IDS), SHAPE, [bytes(32)] * 2)


def test_a_header_needs_tokens() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        build_header(KEY, b"", SHAPE, [bytes(32)] * 3)


def test_a_header_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=str(HEADER_BYTES_MAX)):
        build_header(KEY, bytes(HEADER_BYTES_MAX), SHAPE, [bytes(32)] * 3)


def weighted(length: int | None = None, tokens: int = len(IDS)) -> tuple[ChunkHeader, bytes]:
    """A header of layers with a float32 per token behind K and V, or of another length."""
    size = SHAPE.layer_bytes(tokens) + 4 * tokens if length is None else length
    return build_header(KEY, pack_ids(IDS), SHAPE, [checksum(b"")] * 3, size)


def test_a_layer_may_end_with_a_float_per_token() -> None:
    built, region = weighted()
    assert parse_header(region, built.file_bytes) == built
    assert {span.length for span in built.layers} == {SHAPE.layer_bytes(len(IDS)) + 4 * len(IDS)}


def test_without_such_floats_not_a_byte_of_the_header_changes() -> None:
    plain = build_header(KEY, pack_ids(IDS), SHAPE, [checksum(b"")] * 3)
    assert weighted(SHAPE.layer_bytes(len(IDS))) == plain


@pytest.mark.parametrize("off", [-4, 4, 1])
def test_any_other_length_is_refused(off: int) -> None:
    kv = SHAPE.layer_bytes(len(IDS))
    with pytest.raises(ValueError, match=f"it must have {kv} or {kv + 4 * len(IDS)}"):
        weighted(kv + off if off < 0 else kv + 4 * len(IDS) + off)


def test_a_file_of_k_and_v_alone_is_written_as_ever() -> None:
    assert checksum(whole_file()).hex() == PLAIN_FILE


def damaged(lengths: list[int]) -> str:
    """What reading says of a header under a right checksum whose layers claim these lengths, packed one by one."""
    fields, offset = good_fields(), 0
    fields["layers"] = []
    for length in lengths:
        fields["layers"].append([offset, length, bytes(32)])
        offset += align(length)
    region = forge(fields)
    with pytest.raises(ChunkDamaged) as caught:
        parse_header(region, len(region) + offset)
    return str(caught.value)


@pytest.mark.parametrize("more", [-1, 1, 4, 11, 13, 24])
def test_any_other_length_in_a_file_is_damage(more: int) -> None:
    kv = SHAPE.layer_bytes(len(IDS))
    assert damaged([kv + more] * 3) == f"layer 0 does not have {kv} or {kv + 12} or {2 * kv + 12} bytes"


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("longer", [True, False])
def test_layers_of_different_lengths_in_a_file_are_damage(layer: int, longer: bool) -> None:
    kv = SHAPE.layer_bytes(len(IDS))
    usual, odd = (kv, kv + 12) if longer else (kv + 12, kv)
    lengths = [odd if index == layer else usual for index in range(3)]
    assert damaged(lengths) == f"layer {layer} does not have {usual} bytes"
