"""Names of stored chunks: hashes of what a chunk's KV was computed from. No I/O and no state."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack
from blake3 import blake3

FORMAT_VERSION = 2
"""Of the chunk files that are written."""
ID_VERSION = 1
DIGEST_BYTES = 32
TOKEN_BYTES = 4
TOKEN_ID_MAX = (1 << 32) - 1
TENANT_TAG_CHARS = 12

_is_tenant = re.compile(rf"(?:[0-9a-f]{{{2 * DIGEST_BYTES}}})?").fullmatch


def pack_ids(ids: Sequence[int]) -> bytes:
    """The token ids as little-endian uint32, 4 bytes each.

    Raises ValueError naming the first id that is no integer in 0..2**32-1.
    """
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        for index, token in enumerate(ids):
            if not isinstance(token, int) or not 0 <= token <= TOKEN_ID_MAX:
                raise ValueError(f"token id {index} is {token!r}; it must be an integer in 0..{TOKEN_ID_MAX}") from None
        raise ValueError("token ids must be integers") from None


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The token ids of `pack_ids`; ValueError when the length is no multiple of 4."""
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"{len(packed)} bytes of packed token ids; the length must be a multiple of {TOKEN_BYTES}")
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


def packed_digest(packed: bytes) -> bytes:
    """`ids_digest` of ids that are packed already."""
    return blake3(struct.pack("<Q", len(packed) // TOKEN_BYTES) + packed).digest()


def ids_digest(ids: Sequence[int]) -> bytes:
    """BLAKE3 (32 bytes) of the number of ids as a little-endian uint64, then the ids as little-endian uint32.

    Raises ValueError for an id outside 0..2**32-1.
    """
    return packed_digest(pack_ids(ids))


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """What one chunk's KV is: of which model and tenant, of which tokens, computed behind which tokens.

    `tenant` is a `tenant_of` value, `conditioning` and `content` are `ids_digest` values (32 bytes). Raises ValueError
    for others.
    """

    fingerprint: str
    tenant: str
    conditioning: bytes
    content: bytes
    digest: bytes = field(init=False, repr=False, compare=False)
    """BLAKE3 (32 bytes) of the msgpack array (id version, fingerprint, tenant, conditioning, content)."""

    def __post_init__(self) -> None:
        for name in ("conditioning", "content"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
                raise ValueError(f"{name} must be a digest of {DIGEST_BYTES} bytes, not {value!r}")
        if not isinstance(self.tenant, str) or not _is_tenant(self.tenant):
            raise ValueError(f"tenant is not empty and not {2 * DIGEST_BYTES} lower-case hex characters")
        # msgpack writes each field's type and length, so no text in a fingerprint can imitate another field
        parts = (ID_VERSION, self.fingerprint, self.tenant, self.conditioning, self.content)
        try:
            encoded: bytes = msgpack.packb(parts, use_bin_type=True)
        except UnicodeEncodeError:
            raise ValueError("fingerprint must be text that UTF-8 can hold") from None
        object.__setattr__(self, "digest", blake3(encoded).digest())

    @classmethod
    def of(cls, fingerprint: str, salt: str, conditioning_ids: Sequence[int], token_ids: Sequence[int]) -> ChunkKey:
        """The key of `token_ids` computed behind `conditioning_ids` (empty: bare). ValueError for ids out of range."""
        return cls(fingerprint, tenant_of(salt), ids_digest(conditioning_ids), ids_digest(token_ids))

    @property
    def id(self) -> str:
        """The digest as 64 lower-case hex characters: the public chunk id and the file's name."""
        return self.digest.hex()


def tenant_of(salt: str) -> str:
    """What stands for a salt wherever it is written down: BLAKE3 as 64 hex characters, or nothing for the empty salt.

    Raises ValueError for text that UTF-8 cannot hold.
    """
    try:
        return blake3(salt.encode()).hexdigest() if salt else ""
    except UnicodeEncodeError:
        raise ValueError("salt must be text that UTF-8 can hold") from None


def tag_of(tenant: str) -> str:
    """A short name of a tenant (a `tenant_of` value): 12 hex characters, or `-` for the empty salt's."""
    return tenant[:TENANT_TAG_CHARS] or "-"


def tenant_tag(salt: str) -> str:
    """`tag_of` the tenant with this salt, which it does not give away."""
    return tag_of(tenant_of(salt))


def id_digest(chunk_id: str) -> bytes | None:
    """The digest behind a public chunk id, or None where it is not 64 lower-case hex characters."""
    if len(chunk_id) != 2 * DIGEST_BYTES or not set(chunk_id) <= set("0123456789abcdef"):
        return None
    return bytes.fromhex(chunk_id)
