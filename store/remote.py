"""The remote tier: chunks as hashes on a Redis or Valkey server, shared by all who have the same model.

One hash per chunk, under the key `<prefix>:<digest hex>`: field `header` is the header region of the chunk file
(docs/format.md), `size` that file's size in decimal digits, and `0`, `1`, ... are the layers' payloads. A hash is
filled under a name of its own and renamed when all is there, so nobody sees a part of a chunk, and a server that needs
room lets go of whole chunks.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Self

from kvblend.store.errors import ChunkDamaged, ForeignFile
from kvblend.store.files import AiofilesIO
from kvblend.store.format import ChunkHeader, KVShape, LayerSpan, build_header, checksum, parse_header
from kvblend.store.keys import ChunkKey
from kvblend.store.remote_address import RemoteAddress
from kvblend.store.remote_link import Command, RedisLink, RemoteRefused, RemoteSkipped, RemoteUnavailable
from kvblend.store.remote_stats import RemoteCounts, RemoteFigures, RemoteState
from kvblend.store.tiers import LayerRun, read_side_by_side

log = logging.getLogger("kvblend.store")

HEADER_FIELD = "header"
SIZE_FIELD = "size"
RUN_BYTES_MAX = 4 << 20
"""Layers are read and written in runs of at most so many bytes (or one layer), each within the time limit."""
UNFINISHED_TTL_S = 60
"""What a writer that died has left is gone after so long."""
TIMEOUT_RANGE_S = (0.001, 600.0)
TTL_MAX_S = 10 * 366 * 86400


class RemoteTier:
    """Chunks of one model on one server; a `LowerTier`.

    A chunk that is not as it was written is removed there. While the server fails, it is left alone and asked again
    after growing pauses, with one warning about it.
    """

    def __init__(self, link: RedisLink, shape: KVShape, fingerprint: str, ttl_s: int = 0) -> None:
        """Takes `link` over. Chunks stay for `ttl_s` seconds after they were written, or (0) while there is room."""
        self._link = link
        self._shape = shape
        self._fingerprint = fingerprint
        self._ttl_s = ttl_s
        self._work = AiofilesIO()
        self._counts = RemoteCounts()
        self._said: set[str] = set()

    @classmethod
    async def open(cls, url: str, shape: KVShape, fingerprint: str, *, timeout_s: float = 1.0, ttl_s: int = 0) -> Self:
        """A tier on the server at `url` (see `RemoteAddress.parse`), which is not contacted yet.

        `timeout_s` limits each operation. Raises ValueError for a bad URL, limit or time to live.
        """
        low, high = TIMEOUT_RANGE_S
        if not low <= timeout_s <= high:
            raise ValueError(f"timeout_s is {timeout_s}; it must lie in {low}..{high}")
        if not 0 <= ttl_s <= TTL_MAX_S:
            raise ValueError(f"ttl_s is {ttl_s}; it must lie in 0..{TTL_MAX_S}")
        return cls(RedisLink(RemoteAddress.parse(url), timeout_s), shape, fingerprint, ttl_s)

    def __str__(self) -> str:
        return str(self._link.address)

    async def fetch_header(self, digest: bytes, *, counted: bool = True) -> ChunkHeader | None:
        """The header of a chunk, or None for a miss, whatever the reason; not `counted`, it is neither hit nor miss."""
        try:
            answer = await self._link.read("HMGET", self._key(digest), HEADER_FIELD, SIZE_FIELD)
            self._counts.note_lookup(answer.seconds)
            header = await self._work.compute(self._parse, digest, answer.value)
        except RemoteUnavailable as error:
            self._note(error)
            return None
        except ForeignFile as error:
            self._warn("foreign", f"chunk {digest.hex()} is not for this program and is left alone: {error}")
            self._counts.misses += counted
            return None
        except (ChunkDamaged, RemoteRefused) as error:
            await self._discard(digest, str(error))
            return None
        if header is None:
            self._counts.misses += counted
        else:
            self._counts.hits += counted
        return header

    async def read_layers(self, header: ChunkHeader, data: memoryview, first: int, stop: int) -> None:
        """Read layers `first..stop-1` into their places in `data` (`header.data_bytes` long) and verify them.

        Raises ChunkDamaged when they are not as they were written, and RemoteUnavailable when they cannot be had.
        """
        digest = header.key.digest
        try:
            for begin, end in _runs(header.layers, first, stop):
                fields = [str(index) for index in range(begin, end)]
                answer = await self._link.read("HMGET", self._key(digest), *fields)
                got = await self._work.compute(_place, answer.value, header.layers[begin:end], data, begin)
                self._counts.note_read(got, answer.seconds)
        except RemoteUnavailable as error:
            self._note(error)
            raise
        except (ChunkDamaged, RemoteRefused) as error:
            if not await self._is_still(header):
                raise RemoteUnavailable("it was stored anew while it was read") from None
            await self._discard(digest, str(error))
            raise ChunkDamaged(str(error)) from None

    async def read_runs(self, runs: Sequence[LayerRun]) -> list[Exception | None]:
        """`read_layers` for each run, side by side; what went wrong with each, None for nothing."""
        return await read_side_by_side(self, runs)

    async def write(self, key: ChunkKey, packed_ids: bytes, layers: Sequence[memoryview]) -> None:
        """Store a chunk in place of an older one. `layers` are payloads of one of `KVShape.layer_lengths`.

        Raises RemoteUnavailable, or RemoteRefused when the server does not take it.
        """
        try:
            # first of all, as it also tells whether the server is there
            await self._look_at_memory(sum(layer.nbytes for layer in layers))
            sums = await self._work.compute(_checksum_all, layers)
            header, region = build_header(key, packed_ids, self._shape, sums, len(layers[0]))
            await self._write(header, region, layers)
        except (RemoteUnavailable, RemoteRefused) as error:
            self._note(error)
            self._counts.writes_failed += 1
            raise
        self._said.discard("refused")
        self._counts.writes += 1

    async def remove(self, digest: bytes) -> bool:
        """Remove a chunk; False when there was none. Raises RemoteUnavailable or RemoteRefused."""
        try:
            (count,) = await self._link.write([("UNLINK", self._key(digest))])
        except (RemoteUnavailable, RemoteRefused) as error:
            self._note(error)
            raise
        self._counts.removed += count == 1
        return bool(count == 1)

    def figures(self) -> RemoteFigures:
        """The state of this moment and the counts since `open`."""
        return self._counts.figures(self._state())

    async def close(self) -> None:
        """Close the connections; what is under way fails, and so does what comes later."""
        await self._link.close()
        await self._work.close()

    def _state(self) -> RemoteState:
        if self._link.closed:
            return "closed"
        if self._link.is_down:
            return "down"
        return "up" if self._link.answered else "idle"

    def _key(self, digest: bytes) -> str:
        return f"{self._link.address.prefix}:{digest.hex()}"

    def _parse(self, digest: bytes, fields: Any) -> ChunkHeader | None:
        """The header in an answer to `fetch_header`'s command, None where there is no chunk. Trusts nothing."""
        if type(fields) is not list or len(fields) != 2:
            raise ChunkDamaged("the server's answer is not two fields")
        region, size = fields
        if region is None and size is None:
            return None
        if type(region) is not bytes or type(size) is not bytes or not size.isdigit() or len(size) > 19:
            raise ChunkDamaged("its header or size is missing")
        header = parse_header(region, int(size))
        if header.key.digest != digest:
            raise ChunkDamaged("its key is not the digest of its content")
        if header.key.fingerprint != self._fingerprint:
            raise ChunkDamaged("it was computed with another model")
        if header.shape != self._shape:
            raise ChunkDamaged(f"its shape is {header.shape}; this store holds {self._shape}")
        return header

    async def _write(self, header: ChunkHeader, region: bytes, layers: Sequence[memoryview]) -> None:
        """Fill a hash that nobody looks for, header first, and rename it.

        The server may let go of the unfinished hash at any moment. What is written after that makes a new one, whose
        number of fields is then too small; without anything written after that, there is nothing to rename.
        """
        key = self._key(header.key.digest)
        unfinished = f"{key}:{secrets.token_hex(8)}"
        batch: list[Command] = [
            ("HSET", unfinished, HEADER_FIELD, region, SIZE_FIELD, str(header.file_bytes)),
            ("EXPIRE", unfinished, UNFINISHED_TTL_S),
        ]
        count = 2
        for begin, end in _runs(header.layers, 0, len(layers)):
            batch += [("HSET", unfinished, str(index), layers[index]) for index in range(begin, end)]
            count += end - begin
            answers = await self._link.write([*batch, ("EXPIRE", unfinished, UNFINISHED_TTL_S), ("HLEN", unfinished)])
            if answers[-1] != count:
                raise RemoteRefused("it let go of a chunk that was being written")
            self._counts.bytes_written += sum(layers[index].nbytes for index in range(begin, end))
            batch = []
        keep: Command = ("EXPIRE", unfinished, self._ttl_s) if self._ttl_s else ("PERSIST", unfinished)
        await self._link.write([keep, ("RENAME", unfinished, key)], is_atomic=True)

    async def _look_at_memory(self, num_bytes: int) -> None:
        """Ask for the server's own byte budget. Raises RemoteRefused where the chunk alone is larger."""
        (info,) = await self._link.write([("INFO", "memory")])
        numbers = info if isinstance(info, dict) else {}
        budget, used = numbers.get("maxmemory"), numbers.get("used_memory")
        self._counts.bytes_budget = budget if type(budget) is int and budget > 0 else 0
        self._counts.bytes_used = used if type(used) is int and used > 0 else 0
        if 0 < self._counts.bytes_budget < num_bytes:
            raise RemoteRefused(f"a chunk has {num_bytes} bytes; its maxmemory is {self._counts.bytes_budget}")

    async def _is_still(self, header: ChunkHeader) -> bool:
        """Whether the server still has the chunk that `header` came with, and not one stored anew meanwhile."""
        try:
            answer = await self._link.read("HMGET", self._key(header.key.digest), HEADER_FIELD, SIZE_FIELD)
            return await self._work.compute(self._parse, header.key.digest, answer.value) == header
        except RemoteUnavailable:
            return False
        except (ChunkDamaged, ForeignFile, RemoteRefused):
            return True

    async def _discard(self, digest: bytes, reason: str) -> None:
        self._counts.damaged += 1
        self._warn("damaged", f"chunk {digest.hex()} is removed there: {reason}")
        with contextlib.suppress(RemoteUnavailable, RemoteRefused):
            await self.remove(digest)

    def _note(self, error: RemoteUnavailable | RemoteRefused) -> None:
        if isinstance(error, RemoteSkipped):
            self._counts.skipped += 1
            return
        self._counts.errors += 1
        if isinstance(error, RemoteRefused):
            self._warn("refused", f"does not take or remove chunks: {error}")

    def _warn(self, kind: str, text: str) -> None:
        """One warning of each kind; the rest is for who looks closely."""
        level = logging.DEBUG if kind in self._said else logging.WARNING
        self._said.add(kind)
        log.log(level, "remote tier %s: %s", self, text)


def _runs(spans: Sequence[LayerSpan], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Layers `first..stop-1` as `(begin, end)` runs of at most `RUN_BYTES_MAX` bytes, or of one layer."""
    step = max(1, RUN_BYTES_MAX // spans[0].length)
    for begin in range(first, stop, step):
        yield begin, min(begin + step, stop)


def _place(values: Any, spans: Sequence[LayerSpan], data: memoryview, first: int) -> int:
    """Copy the payloads of layers `first..` to their places and verify them; their bytes. Raises ChunkDamaged."""
    if type(values) is not list or len(values) != len(spans):
        raise ChunkDamaged(f"the server's answer is not {len(spans)} layers")
    for index, (value, span) in enumerate(zip(values, spans, strict=True), start=first):
        if type(value) is not bytes or len(value) != span.length:
            raise ChunkDamaged(f"layer {index} does not have {span.length} bytes")
        place = data[span.offset : span.offset + span.length]
        place[:] = value
        if checksum(place) != span.checksum:
            raise ChunkDamaged(f"the checksum of layer {index} does not match")
    return sum(span.length for span in spans)


def _checksum_all(layers: Sequence[memoryview]) -> list[bytes]:
    return [checksum(layer) for layer in layers]
