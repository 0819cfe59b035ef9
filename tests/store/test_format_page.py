"""docs/format.md is enough to read a chunk file: this reader follows that page and uses no code of the store."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from blake3 import blake3

from kvblend.store.keys import ChunkKey
from kvblend.store.store import ChunkStore, KVShape

if TYPE_CHECKING:
    from tests.store.conftest import Flip

L, H, T, D = 3, 2, 5, 4
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
KEYS = {
    "fingerprint": str,
    "tenant": str,
    "conditioning": bytes,
    "token_ids": bytes,
    "num_layers": int,
    "num_kv_heads": int,
    "head_dim": int,
    "dtype": str,
    "alignment": int,
    "layers": list,
}


class Unreadable(Exception):
    """The page says that this is no chunk file, or a damaged one."""


@dataclass
class Chunk:
    """What a stranger gets out of a file: `k[layer][head][token][channel]`, V alike, and the tokens' sensitivity."""

    header: dict[str, Any]
    token_ids: tuple[int, ...]
    k: list[list[list[list[float]]]]
    v: list[list[list[list[float]]]]
    sensitivity: list[tuple[float, ...] | None]


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Unreadable(what)


def up(count: int) -> int:
    return (count + 4095) // 4096 * 4096


def read_chunk(path: Path) -> Chunk:
    """Check everything that the page names, in its order, and take the layers apart."""
    raw = path.read_bytes()
    require(raw[:8] == bytes.fromhex("894B56424C454E44"), "magic")
    version, n = struct.unpack_from("<II", raw, 8)
    require(version in (1, 2), "version")
    data_start = up(48 + n)
    require(data_start <= 16 * 1024 * 1024, "header length")
    require(raw[16:48] == blake3(raw[0:16] + raw[48:data_start]).digest(), "header checksum")
    header = msgpack.unpackb(raw[48 : 48 + n])
    if version == 1:
        require(header.pop("salt", None) == "", "version")
        header["tenant"] = ""
    require({key: type(value) for key, value in header.items()} == KEYS, "keys")
    tokens = len(header["token_ids"]) // 4
    spans = check_layers(header, tokens)
    require(len(raw) == data_start + len(spans) * up(spans[0][1]), "size")
    require(path.name == chunk_id(header, tokens) + ".kvc", "name")
    layers = []
    for offset, length, checksum in spans:
        layer = raw[data_start + offset : data_start + offset + length]
        require(blake3(layer).digest() == checksum, "layer checksum")
        layers.append(read_layer(layer, header, tokens))
    ids = struct.unpack(f"<{tokens}I", header["token_ids"])
    k, v, sensitivity = zip(*layers, strict=True)
    return Chunk(header, ids, list(k), list(v), list(sensitivity))


def check_layers(header: dict[str, Any], tokens: int) -> list[tuple[int, int, bytes]]:
    heads, dim, size = header["num_kv_heads"], header["head_dim"], ELEMENT_BYTES[header["dtype"]]
    scales = 4 * heads * (dim + tokens) if header["dtype"] == "int8" else 0
    kv = 2 * heads * tokens * dim * size + scales
    require(len(header["layers"]) == header["num_layers"], "layer count")
    spans = [tuple(span) for span in header["layers"]]
    length = spans[0][1]
    require(length in (kv, kv + 4 * tokens), "layer length")
    for index, span in enumerate(spans):
        require(span[:2] == (index * up(length), length), "layer place")
    return spans


def chunk_id(header: dict[str, Any], tokens: int) -> str:
    content = blake3(struct.pack("<Q", tokens) + header["token_ids"]).digest()
    parts = [1, header["fingerprint"], header["tenant"], header["conditioning"], content]
    return blake3(msgpack.packb(parts)).hexdigest()


def read_layer(layer: bytes, header: dict[str, Any], tokens: int) -> tuple[Any, Any, tuple[float, ...] | None]:
    heads, dim, dtype = header["num_kv_heads"], header["head_dim"], header["dtype"]
    count = heads * tokens * dim
    size = ELEMENT_BYTES[dtype]
    k = shape_of(numbers(layer[: count * size], dtype), heads, tokens, dim)
    v = shape_of(numbers(layer[count * size : 2 * count * size], dtype), heads, tokens, dim)
    rest = layer[2 * count * size :]
    if dtype == "int8":
        k_scales = numbers(rest[: 4 * heads * dim], "float32")
        v_scales = numbers(rest[4 * heads * dim : 4 * heads * (dim + tokens)], "float32")
        rest = rest[4 * heads * (dim + tokens) :]
        for h in range(heads):
            for t in range(tokens):
                k[h][t] = [value * k_scales[h * dim + d] for d, value in enumerate(k[h][t])]
                v[h][t] = [value * v_scales[h * tokens + t] for value in v[h][t]]
    return k, v, numbers(rest, "float32") if rest else None


def numbers(raw: bytes, dtype: str) -> tuple[float, ...]:
    if dtype == "bfloat16":  # the upper half of a float32
        raw = b"".join(b"\0\0" + raw[at : at + 2] for at in range(0, len(raw), 2))
    code = {"float32": "f", "bfloat16": "f", "float16": "e", "int8": "b"}[dtype]
    return struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw)


def shape_of(flat: Sequence[float], heads: int, tokens: int, dim: int) -> list[list[list[float]]]:
    rows = [list(flat[at : at + dim]) for at in range(0, heads * tokens * dim, dim)]
    return [rows[h * tokens : (h + 1) * tokens] for h in range(heads)]


# ---- files of the real store ----

IDS = tuple(range(100, 100 + T))
KEY = ChunkKey.of("model-a", "ann", (7, 8), IDS)
PLAIN = [float(number % 61 - 30) / 4 for number in range(2 * H * T * D)]
SENSITIVE = [0.5 * token for token in range(T)]


def pack_floats(values: Sequence[float], dtype: str) -> bytes:
    if dtype == "bfloat16":
        raw = struct.pack(f"<{len(values)}f", *values)
        return b"".join(raw[at + 2 : at + 4] for at in range(0, len(raw), 4))
    return struct.pack(f"<{len(values)}{'f' if dtype == 'float32' else 'e'}", *values)


async def store_file(root: Path, dtype: str, layer: bytes) -> Path:
    shape = KVShape(L, H, D, dtype)
    async with await ChunkStore.open(root, shape, "model-a", 1 << 20) as store:
        await store.put(KEY, IDS, [bytearray(layer) for _ in range(L)])
    (path,) = (root / "chunks").rglob("*.kvc")
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_a_stranger_reads_what_was_stored(tmp_path: Path, dtype: str) -> None:
    chunk = read_chunk(await store_file(tmp_path, dtype, pack_floats(PLAIN, dtype)))
    assert (chunk.token_ids, chunk.header["fingerprint"], chunk.header["tenant"]) == (
        IDS,
        "model-a",
        blake3(b"ann").hexdigest(),
    )
    assert chunk.k == [shape_of(PLAIN[: H * T * D], H, T, D)] * L
    assert chunk.v == [shape_of(PLAIN[H * T * D :], H, T, D)] * L
    assert chunk.sensitivity == [None] * L


async def test_a_stranger_reads_the_sensitivity_of_tokens(tmp_path: Path) -> None:
    layer = pack_floats([*PLAIN, *SENSITIVE], "float32")
    chunk = read_chunk(await store_file(tmp_path, "float32", layer))
    assert chunk.sensitivity == [tuple(SENSITIVE)] * L
    assert chunk.v[0] == shape_of(PLAIN[H * T * D :], H, T, D)


async def test_a_stranger_reads_what_the_engine_made_int8(tmp_path: Path) -> None:
    import torch

    from kvblend.engine.precision import Precision

    plain = bytearray(pack_floats([*PLAIN, *SENSITIVE], "float32"))
    layer = Precision.of(torch.float32, "int8", H, D).encode(memoryview(plain), T)
    chunk = read_chunk(await store_file(tmp_path, "int8", bytes(layer)))
    assert chunk.sensitivity == [tuple(SENSITIVE)] * L
    found = [*flatten(chunk.k[0]), *flatten(chunk.v[0])]
    assert max(map(abs, found)) > 7
    assert all(math.isclose(one, other, abs_tol=7.5 / 127) for one, other in zip(found, PLAIN, strict=True))


def flatten(rows: list[list[list[float]]]) -> list[float]:
    return [value for head in rows for row in head for value in row]


@pytest.mark.parametrize(
    ("at", "what"),
    [(0, "magic"), (8, "version"), (15, "header length"), (16, "checksum"), (60, "checksum"), (4090, "checksum"),
     (4096, "layer checksum")],
)  # fmt: skip
async def test_a_stranger_notices_damage(tmp_path: Path, flip_byte: Flip, at: int, what: str) -> None:
    path = await store_file(tmp_path, "float32", pack_floats(PLAIN, "float32"))
    flip_byte(path, at)
    with pytest.raises(Unreadable, match=what):
        read_chunk(path)


async def test_a_stranger_notices_another_name_and_size(tmp_path: Path) -> None:
    path = await store_file(tmp_path, "float32", pack_floats(PLAIN, "float32"))
    other = path.rename(path.with_name("0" * 64 + ".kvc"))
    with pytest.raises(Unreadable, match="name"):
        read_chunk(other)
    other.write_bytes(other.read_bytes() + bytes(4096))
    with pytest.raises(Unreadable, match="size"):
        read_chunk(other)


async def test_the_folder_says_what_it_is(tmp_path: Path) -> None:
    path = await store_file(tmp_path, "float32", pack_floats(PLAIN, "float32"))
    assert json.loads((tmp_path / "kvblend-store.json").read_text()) == {"format": "kvblend-store", "version": 1}
    assert path.parent == tmp_path / "chunks" / path.name[:2]
