"""Chunk files written straight into a folder, for tests of what works on files alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import msgpack

from kvblend.store.files import write_whole
from kvblend.store.format import KVShape, align, build_header, checksum
from kvblend.store.keys import ChunkKey, pack_ids
from kvblend.store.root import claim_root, release_root

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32")


@dataclass(frozen=True)
class ChunkFile:
    """One chunk and the bytes that its file has."""

    key: ChunkKey
    ids: tuple[int, ...]
    shape: KVShape
    layers: tuple[bytes, ...]
    raw: bytes

    @classmethod
    def make(
        cls, number: int = 0, *, tokens: int = 5, fingerprint: str = "model-a", salt: str = "", shape: KVShape = SHAPE
    ) -> ChunkFile:
        """A chunk whose bytes follow from its number."""
        source = random.Random(number)
        ids = tuple(range(number, number + tokens))
        key = ChunkKey.of(fingerprint, salt, (), ids)
        layers = tuple(source.randbytes(shape.layer_lengths(tokens)[0]) for _ in range(shape.num_layers))
        _, region = build_header(key, pack_ids(ids), shape, [checksum(layer) for layer in layers])
        return cls(
            key, ids, shape, layers, region + b"".join(layer.ljust(align(len(layer)), b"\0") for layer in layers)
        )

    def path(self, root: Path) -> Path:
        """Where its file belongs."""
        return root / "chunks" / self.key.id[:2] / f"{self.key.id}.kvc"

    def write(self, root: Path) -> ChunkFile:
        """Write its file; itself."""
        path = self.path(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [self.raw])
        return self


def make_store(root: Path, *chunks: ChunkFile) -> Path:
    """A store folder with these chunks, as its files alone say; the folder."""
    release_root(claim_root(root))
    for chunk in chunks:
        chunk.write(root)
    return root


def write_old(root: Path, chunk: ChunkFile, salt: str = "ann") -> Path:
    """Write a chunk as format version 1 did, with the salt in clear; its file, named by that."""
    size = int.from_bytes(chunk.raw[12:16], "little")
    fields = msgpack.unpackb(chunk.raw[48 : 48 + size])
    del fields["tenant"]
    packed = msgpack.packb({**fields, "salt": salt})
    body = packed.ljust(align(48 + len(packed)) - 48, b"\0")
    preamble = chunk.raw[:8] + (1).to_bytes(4, "little") + len(packed).to_bytes(4, "little")
    layers = chunk.raw[align(48 + size) :]
    name = checksum(preamble + body).hex()
    path = root / "chunks" / name[:2] / f"{name}.kvc"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [preamble + checksum(preamble + body) + body + layers])
    return path


def flip_byte(path: Path, at: int) -> None:
    """Damage the byte of a file at an offset."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)
