from __future__ import annotations

import subprocess
import sys

import msgpack
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvblend.store.keys import ChunkKey, id_digest, ids_digest, pack_ids, unpack_ids

ids_lists = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def test_digest_is_blake3_of_length_and_little_endian_ids() -> None:
    raw = (2).to_bytes(8, "little") + (7).to_bytes(4, "little") + (0x01020304).to_bytes(4, "little")
    assert ids_digest([7, 0x01020304]) == blake3(raw).digest()


@given(ids_lists)
def test_packed_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)


@given(ids_lists, ids_lists)
def test_digests_differ_where_ids_do(a: list[int], b: list[int]) -> None:
    assert (ids_digest(a) == ids_digest(b)) == (a == b)


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_ids_outside_uint32_are_refused_by_position_and_value(bad: object) -> None:
    with pytest.raises(ValueError, match=f"token id 1 is {bad!r}"):
        pack_ids([1, bad])  # type: ignore[list-item]


def test_ids_of_odd_length_are_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_ids(b"12345")


def test_key_digest_is_what_the_format_page_says() -> None:
    key = ChunkKey.of("fp", "salt", [1], [2, 3])
    packed = msgpack.packb([1, "fp", blake3(b"salt").hexdigest(), ids_digest([1]), ids_digest([2, 3])])
    assert key.digest == blake3(packed).digest()
    assert key.id == key.digest.hex()


@pytest.mark.parametrize(
    "other",
    [
        ChunkKey.of("fp2", "s", [1], [2]),
        ChunkKey.of("fp", "s2", [1], [2]),
        ChunkKey.of("fp", "s", [], [2]),
        ChunkKey.of("fp", "s", [1], [3]),
        ChunkKey.of("fps", "", [1], [2]),
        ChunkKey.of("f", "ps", [1], [2]),
    ],
)
def test_every_part_of_the_key_counts(other: ChunkKey) -> None:
    key = ChunkKey.of("fp", "s", [1], [2])
    assert key != other
    assert key.digest != other.digest


@pytest.mark.parametrize("text", ["../../etc/passwd", "a/b\0c", "\x92\xc4", "x" * 1000, ""])
def test_odd_texts_only_enter_the_hash(text: str) -> None:
    assert id_digest(ChunkKey.of(text, text, [], [1]).id) is not None


def test_equal_keys_are_equal_and_hash_alike() -> None:
    assert len({ChunkKey.of("fp", "s", [1], [2]), ChunkKey.of("fp", "s", [1], [2])}) == 1


def test_parts_that_are_no_digests_are_refused() -> None:
    with pytest.raises(ValueError, match="conditioning"):
        ChunkKey("fp", "", b"short", bytes(32))


def test_text_that_utf8_cannot_hold_is_refused() -> None:
    for texts in (("fp", "\ud800"), ("\ud800", "s")):
        with pytest.raises(ValueError, match="UTF-8"):
            ChunkKey.of(*texts, (), ())


@pytest.mark.parametrize("tenant", ["s", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n", "-"])
def test_what_is_no_digest_of_a_salt_is_no_tenant(tenant: str) -> None:
    with pytest.raises(ValueError, match="tenant is"):
        ChunkKey("fp", tenant, bytes(32), bytes(32))


@pytest.mark.parametrize("bad", ["", "ab", "g" * 64, "A" * 64, "0" * 63, "0" * 65, "../" + "0" * 61, "٠" * 64])
def test_malformed_ids_have_no_digest(bad: str) -> None:
    assert id_digest(bad) is None


def test_keys_load_without_torch_or_aiofiles() -> None:
    code = "import sys, kvblend.store.keys; sys.exit(any(m in sys.modules for m in ('torch', 'aiofiles')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
