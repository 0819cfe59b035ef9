"""Rows of the catalog as bytes of one length each, so that a hundred thousand are taken apart in a few whole steps."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from kvblend.store.format import HEADER_BYTES_MAX, KVShape, align
from kvblend.store.index import IndexRow, collector_paused
from kvblend.store.keys import DIGEST_BYTES

_TAG_BYTES = 16
# in this machine's own byte order, as which whole columns are read; of another one no value would make sense
_ROW = struct.Struct(f"={DIGEST_BYTES}sQQQddd{_TAG_BYTES}s")
_WORDS = _ROW.size // 8
_NUMBERS_AT = DIGEST_BYTES // 8
_TAG_AT = _ROW.size - _TAG_BYTES


def pack_row(digest: bytes, row: IndexRow) -> bytes:
    """A chunk's digest and row. struct.error for numbers beyond 64 bits."""
    numbers = (row.num_tokens, row.file_bytes, row.hits, row.cost_s, row.created_s, row.used_s)
    return _ROW.pack(digest, *numbers, row.tenant.encode())


def unpack_rows(packed: Sequence[bytes], shape: KVShape) -> dict[bytes, IndexRow]:
    """Rows by digest. Raises ValueError where a value cannot be right, so that nothing damaged is believed."""
    if not packed:
        return {}
    if set(map(type, packed)) != {bytes} or set(map(len, packed)) != {_ROW.size}:
        raise ValueError("a row is not of the length that it must have")
    whole = b"".join(packed)
    del packed  # where the caller has not kept it, that is memory for what follows
    integers, floats = memoryview(whole).cast("Q"), memoryview(whole).cast("d")
    tokens, sizes, hits = (integers[_NUMBERS_AT + at :: _WORDS].tolist() for at in range(3))
    costs_s, created_s, used_s = (floats[_NUMBERS_AT + at :: _WORDS].tolist() for at in range(3, 6))
    if min(tokens) < 1 or min(sizes) < 1:
        raise ValueError("a row holds values out of range")
    # few pairs differ; ascending, so that each length keeps its largest file
    largest = dict(sorted(set(zip(tokens, sizes, strict=True))))
    if any(size > _file_bytes_max(shape, count) for count, size in largest.items()):
        # believed, it would have the whole store evicted to make room
        raise ValueError("a row holds a size that no file of its tokens has")
    if min(costs_s) < 0.0 or not all(math.isfinite(sum(column)) for column in (costs_s, created_s, used_s)):
        raise ValueError("a row holds a cost or a time out of range")
    raw_tags = [whole[at : at + _TAG_BYTES] for at in range(_TAG_AT, len(whole), _ROW.size)]
    # one text for all chunks of a tenant
    tags = {raw: raw.rstrip(b"\0").decode("ascii") for raw in set(raw_tags)}
    digests = [whole[at : at + DIGEST_BYTES] for at in range(0, len(whole), _ROW.size)]
    columns = (tokens, sizes, map(tags.__getitem__, raw_tags), costs_s, hits, created_s, used_s)
    with collector_paused():
        return dict(zip(digests, map(IndexRow, *columns), strict=True))


def _file_bytes_max(shape: KVShape, num_tokens: int) -> int:
    return HEADER_BYTES_MAX + shape.num_layers * align(max(shape.layer_lengths(num_tokens)))
