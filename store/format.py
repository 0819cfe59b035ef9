"""The chunk file, format version 2 (docs/format.md): building its header, and reading one without trusting it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
from blake3 import blake3

from kvblend.store.errors import ChunkDamaged, ForeignFile, OldFile
from kvblend.store.keys import DIGEST_BYTES, FORMAT_VERSION, TOKEN_BYTES, ChunkKey, packed_digest, unpack_ids

Buffer = bytes | bytearray | memoryview

MAGIC = b"\x89KVBLEND"
ALIGNMENT_BYTES = 4096
HEADER_BYTES_MAX = 16 << 20
"""The longest header region that is read or written: room for about four million tokens."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALED_DTYPES = frozenset({"int8"})
"""Those with float32 scales behind K and V: of K per head and channel, of V per head and token."""
SCALE_BYTES = 4
TOKEN_FLOAT_BYTES = 4
SHAPE_MAX = {"num_layers": 4096, "num_kv_heads": 65536, "head_dim": 65536}

OLD_VERSION = 1
"""It had the salt itself in place of `tenant`. Without a salt nothing else differs, the id neither."""

_WHOSE = {OLD_VERSION: "salt", FORMAT_VERSION: "tenant"}
_VERSIONS = frozenset(_WHOSE)
_PREAMBLE = struct.Struct("<8sII")
_HEADER_START = _PREAMBLE.size + DIGEST_BYTES
_FIELDS = (
    "fingerprint", "tenant", "conditioning", "token_ids", "num_layers", "num_kv_heads", "head_dim", "dtype",
    "alignment", "layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KVShape:
    """The stored KV of one model: `dtype` is one of `DTYPE_BYTES`. ValueError names a field out of its range."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name, limit in SHAPE_MAX.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"{name} is {value!r}; it must be an integer in 1..{limit}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; choose {', '.join(DTYPE_BYTES)}")

    def layer_bytes(self, num_tokens: int) -> int:
        """Bytes of one layer's payload: K then V, each `[num_kv_heads, num_tokens, head_dim]`, then scales, if any."""
        numbers = 2 * self.num_kv_heads * num_tokens * self.head_dim * DTYPE_BYTES[self.dtype]
        scales = self.num_kv_heads * (self.head_dim + num_tokens) if self.dtype in SCALED_DTYPES else 0
        return numbers + SCALE_BYTES * scales

    def layer_lengths(self, num_tokens: int) -> tuple[int, int, int]:
        """The lengths that a layer may have: K and V alone, or with one float32 per token behind them, or with those
        and K and V a second time.
        """
        kv, floats = self.layer_bytes(num_tokens), TOKEN_FLOAT_BYTES * num_tokens
        return kv, kv + floats, 2 * kv + floats


class LayerSpan(NamedTuple):
    """One layer's payload: `offset` bytes from the start of the data, `length` bytes, BLAKE3 `checksum` (32 bytes)."""

    offset: int
    length: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Everything a chunk file says about itself. The data starts at byte `data_start` of the file."""

    key: ChunkKey
    packed_ids: bytes
    shape: KVShape
    layers: tuple[LayerSpan, ...]
    data_start: int

    @property
    def num_tokens(self) -> int:
        """How many tokens the chunk has."""
        return len(self.packed_ids) // TOKEN_BYTES

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The chunk's token ids."""
        return unpack_ids(self.packed_ids)

    @property
    def data_bytes(self) -> int:
        """Bytes from the start of the data to the end of the file, padding included."""
        last = self.layers[-1]
        return align(last.offset + last.length)

    @property
    def file_bytes(self) -> int:
        """The size that the file must have."""
        return self.data_start + self.data_bytes


def align(count: int) -> int:
    """`count` bytes rounded up to the alignment."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def checksum(data: Buffer) -> bytes:
    """BLAKE3 of the bytes (32 bytes)."""
    return blake3(data).digest()


def build_header(
    key: ChunkKey, packed_ids: bytes, shape: KVShape, checksums: Sequence[bytes], length: int | None = None
) -> tuple[ChunkHeader, bytes]:
    """The header of a new chunk, and the bytes of its header region (a multiple of the alignment).

    `checksums[i]` is the `checksum` of layer i's payload of `length` bytes (None: K and V alone). Raises ValueError for
    a count of checksums that is not the number of layers, for no tokens, for a length that a layer cannot have, and for
    a header above `HEADER_BYTES_MAX`.
    """
    if len(checksums) != shape.num_layers:
        raise ValueError(f"{len(checksums)} checksums for {shape.num_layers} layers")
    if not packed_ids:
        raise ValueError("a chunk has at least one token")
    allowed = shape.layer_lengths(len(packed_ids) // TOKEN_BYTES)
    length = allowed[0] if length is None else length
    if length not in allowed:
        raise ValueError(f"a layer has {length} bytes; it must have {' or '.join(map(str, allowed))}")
    spans = tuple(LayerSpan(index * align(length), length, value) for index, value in enumerate(checksums))
    values = (
        key.fingerprint, key.tenant, key.conditioning, packed_ids, shape.num_layers, shape.num_kv_heads, shape.head_dim,
        shape.dtype, ALIGNMENT_BYTES, spans,
    )  # fmt: skip
    packed: bytes = msgpack.packb(dict(zip(_FIELDS, values, strict=True)), use_bin_type=True)
    data_start = align(_HEADER_START + len(packed))
    if data_start > HEADER_BYTES_MAX:
        raise ValueError(f"the chunk's header takes {data_start} bytes; at most {HEADER_BYTES_MAX} are allowed")
    preamble = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(packed))
    body = packed.ljust(data_start - _HEADER_START, b"\0")
    return ChunkHeader(key, packed_ids, shape, spans, data_start), preamble + checksum(preamble + body) + body


def header_region_bytes(first: bytes) -> int:
    """How long the header region of a file that starts with `first` claims to be.

    Raises ForeignFile for another magic or version, ChunkDamaged for a file cut before that or an impossible length.
    """
    if not first.startswith(MAGIC[: len(first)]):
        raise ForeignFile("it does not start with the magic of a chunk file")
    if len(first) < _PREAMBLE.size:
        raise ChunkDamaged(f"it is cut short after {len(first)} bytes")
    _, version, length = _PREAMBLE.unpack_from(first)
    if version not in _VERSIONS:
        raise ForeignFile(f"its format version is {version}, this program reads {OLD_VERSION} and {FORMAT_VERSION}")
    region = align(_HEADER_START + length)
    if region > HEADER_BYTES_MAX:
        raise ChunkDamaged(f"its header claims {region} bytes; at most {HEADER_BYTES_MAX} are allowed")
    return region


def parse_header(region: bytes, file_bytes: int) -> ChunkHeader:
    """The header in a file's first bytes; `file_bytes` is the file's size. `region` may be longer than needed.

    Raises ForeignFile for another magic or version, OldFile for version 1 with a salt, and ChunkDamaged for anything
    else that is not as `build_header` writes it: checksum, types, ranges, offsets, and the file's size.
    """
    size = header_region_bytes(region)
    if len(region) < size:
        raise ChunkDamaged(f"its header is cut short: {len(region)} of {size} bytes")
    preamble, body = region[: _PREAMBLE.size], region[_HEADER_START:size]
    if checksum(preamble + body) != region[_PREAMBLE.size : _HEADER_START]:
        raise ChunkDamaged("its header's checksum does not match")
    _, version, length = _PREAMBLE.unpack(preamble)
    fields = _unpack_fields(body[:length], _WHOSE[version])
    if version == OLD_VERSION and fields["tenant"]:
        reason = f"it is of format version {OLD_VERSION} and holds a salt in clear; its chunk has another id by now"
        raise OldFile(reason, OLD_VERSION)
    header = _build_from(fields, size)
    if header.file_bytes != file_bytes:
        raise ChunkDamaged(f"the file has {file_bytes} bytes; its header asks for {header.file_bytes}")
    return header


def _unpack_fields(packed: bytes, whose: str) -> dict[str, Any]:
    """The header's map with exactly the known fields, each of its type; `whose` is the name that `tenant` has in it."""
    try:
        fields = msgpack.unpackb(packed, raw=False, use_list=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ChunkDamaged(f"its header is not msgpack: {error}") from None
    if not isinstance(fields, dict) or set(fields) != {*_FIELDS[:1], whose, *_FIELDS[2:]}:
        raise ChunkDamaged("its header does not hold the fields of its format version")
    fields["tenant"] = fields.pop(whose)
    for name, kind in (("fingerprint", str), ("tenant", str), ("conditioning", bytes), ("token_ids", bytes)):
        if type(fields[name]) is not kind:
            raise ChunkDamaged(f"its header's {name} is not {kind.__name__}")
    if type(fields["alignment"]) is not int or fields["alignment"] != ALIGNMENT_BYTES:
        raise ChunkDamaged(f"its header's alignment is not {ALIGNMENT_BYTES}")
    if not fields["token_ids"]:
        raise ChunkDamaged("its header holds no token ids")
    return fields


def _build_from(fields: dict[str, Any], data_start: int) -> ChunkHeader:
    packed_ids: bytes = fields["token_ids"]
    if len(packed_ids) % TOKEN_BYTES:
        raise ChunkDamaged(f"its header's token_ids are no multiple of {TOKEN_BYTES} bytes")
    try:
        key = ChunkKey(fields["fingerprint"], fields["tenant"], fields["conditioning"], packed_digest(packed_ids))
        shape = KVShape(*(fields[name] for name in ("num_layers", "num_kv_heads", "head_dim", "dtype")))
    except ValueError as error:
        raise ChunkDamaged(f"its header is wrong: {error}") from None
    rows = fields["layers"]
    if type(rows) is not list or len(rows) != shape.num_layers:
        raise ChunkDamaged(f"its header does not list {shape.num_layers} layers")
    length = _read_length(rows[0], shape.layer_lengths(len(packed_ids) // TOKEN_BYTES))
    spans = tuple(_read_span(row, index, length) for index, row in enumerate(rows))
    return ChunkHeader(key, packed_ids, shape, spans, data_start)


def _read_length(first: object, allowed: Sequence[int]) -> int:
    """The length of all layers, as the first one's entry has it."""
    length = first[1] if type(first) is list and len(first) == 3 else None
    if type(length) is not int or length not in allowed:
        raise ChunkDamaged(f"layer 0 does not have {' or '.join(map(str, allowed))} bytes")
    return length


def _read_span(row: object, index: int, length: int) -> LayerSpan:
    """One layer's entry; layers lie gapless in order, so overlaps and holes are one comparison."""
    if type(row) is not list or len(row) != 3:
        raise ChunkDamaged(f"layer {index} is not [offset, length, checksum]")
    offset, size, value = row
    if type(offset) is not int or offset != index * align(length):
        raise ChunkDamaged(f"layer {index} does not start at byte {index * align(length)} of the data")
    if type(size) is not int or size != length:
        raise ChunkDamaged(f"layer {index} does not have {length} bytes")
    if type(value) is not bytes or len(value) != DIGEST_BYTES:
        raise ChunkDamaged(f"layer {index} has no checksum of {DIGEST_BYTES} bytes")
    return LayerSpan(offset, size, value)
