"""Checks on a chunk that is handed in to be stored, before any work."""

from __future__ import annotations

from collections.abc import Sequence

from kvblend.store.format import HEADER_BYTES_MAX, Buffer, KVShape
from kvblend.store.keys import TOKEN_BYTES, ChunkKey, pack_ids, packed_digest

TOKENS_MAX = HEADER_BYTES_MAX // (2 * TOKEN_BYTES)
"""The longest chunk that is stored, in tokens: its ids take at most half of the longest header region."""
TEXT_BYTES_MAX = 65536
"""The longest fingerprint, in UTF-8 bytes."""


def check_ids(key: ChunkKey, token_ids: Sequence[int], fingerprint: str) -> bytes:
    """The packed token ids of a chunk of the model `fingerprint`.

    Raises ValueError for none or too many ids, ids that `key` does not name, and another model's or a long fingerprint.
    """
    if not 1 <= len(token_ids) <= TOKENS_MAX:
        raise ValueError(f"token_ids has {len(token_ids)} ids; a chunk has 1..{TOKENS_MAX}")
    if (size := len(key.fingerprint.encode())) > TEXT_BYTES_MAX:
        raise ValueError(f"key.fingerprint has {size} bytes; at most {TEXT_BYTES_MAX} are stored")
    if key.fingerprint != fingerprint:
        raise ValueError(f"key.fingerprint is {key.fingerprint!r}; this store holds {fingerprint!r}")
    packed_ids = pack_ids(token_ids)
    if packed_digest(packed_ids) != key.content:
        raise ValueError("key.content is not the digest of token_ids")
    return packed_ids


def check_layers(layers: Sequence[Buffer], shape: KVShape, num_tokens: int) -> list[memoryview]:
    """The payloads as flat bytes, not copied, all of one length that `KVShape.layer_lengths` allows; or ValueError."""
    if len(layers) != shape.num_layers:
        raise ValueError(f"layers has {len(layers)} entries; the model has {shape.num_layers} layers")
    allowed = shape.layer_lengths(num_tokens)
    views = [memoryview(layer) for layer in layers]
    # the first one says whether anything stands behind K and V; the others must agree
    if views[0].nbytes not in allowed:
        raise ValueError(f"layers[0] has {views[0].nbytes} bytes; it must have {' or '.join(map(str, allowed))}")
    wanted = views[0].nbytes
    for index, view in enumerate(views):
        if view.nbytes != wanted or not view.c_contiguous:
            raise ValueError(f"layers[{index}] has {view.nbytes} bytes; it must have {wanted}, without gaps")
    return [view.cast("B") for view in views]
