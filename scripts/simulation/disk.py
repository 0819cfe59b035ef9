"""A store without contents: which layers lie in memory, which chunks below it, and how long reads and writes take."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvblend.actors.core.speeds import TierMeter, TierSpeed
from kvblend.store.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class DiskCosts:
    """Bytes per second and seconds before the first byte of reads, bytes per second of writes, seconds of a look-up."""

    read_bytes_per_s: float = 1.5e9
    latency_s: float = 2e-4
    write_bytes_per_s: float = 6e8
    lookup_s: float = 3e-4
    host_bytes: int = 2 << 30


@dataclass(slots=True)
class ModelStore:
    """Memory above a disk, by least recent use. `layer_token_bytes` are those of one token's KV in one layer."""

    costs: DiskCosts
    num_layers: int
    layer_token_bytes: int
    disk: set[ChunkKey] = field(default_factory=set)
    host: OrderedDict[ChunkKey, int] = field(default_factory=OrderedDict)
    sizes: dict[ChunkKey, int] = field(default_factory=dict)
    meter: TierMeter = field(default_factory=TierMeter)
    host_used: int = 0
    bytes_read: int = 0
    _free_s: float = 0.0

    def keep(self, key: ChunkKey, tokens: int, *, in_memory: bool = True) -> None:
        """A chunk is durable, and in memory too where nothing else is said."""
        self.disk.add(key)
        self.sizes[key] = tokens * self.layer_token_bytes
        if in_memory:
            self._put(key, (1 << self.num_layers) - 1)

    def look_up(self, key: ChunkKey) -> str | None:
        """The tier a chunk is found in; None for a miss. It counts as used."""
        if key not in self.disk:
            return None
        whole = not self.missing(key)
        if key in self.host:
            self.host.move_to_end(key)
        return "host" if whole else "disk"

    def missing(self, key: ChunkKey) -> list[int]:
        """Layers of a chunk that are not in memory."""
        mask = self.host.get(key, 0)
        if mask == (1 << self.num_layers) - 1:
            return []
        return [layer for layer in range(self.num_layers) if not mask >> layer & 1]

    def read(self, key: ChunkKey, first: int, stop: int, at_s: float) -> float:
        """When a read of these layers that is asked for now will be done: one after another at the disk's speed."""
        self.meter.begin(at_s)
        num_bytes = (stop - first) * self.sizes[key]
        self._free_s = max(self._free_s, at_s) + num_bytes / self.costs.read_bytes_per_s
        return self._free_s + self.costs.latency_s

    def read_done(self, key: ChunkKey, first: int, stop: int, at_s: float) -> None:
        """The layers are in memory."""
        count = (stop - first) * self.sizes[key]
        self.meter.end(count, at_s)
        self.bytes_read += count
        self._put(key, self.host.get(key, 0) | (1 << stop) - (1 << first))

    def write_s(self, tokens: int) -> float:
        """Seconds to write a chunk."""
        return tokens * self.layer_token_bytes * self.num_layers / self.costs.write_bytes_per_s

    def speeds(self) -> dict[str, TierSpeed]:
        """What is known of the disk, for the loading controller."""
        return {"disk": self.meter.speed} if self.meter.speed is not None else {}

    def _put(self, key: ChunkKey, mask: int) -> None:
        before = self.host.get(key, 0)
        self.host_used += (mask.bit_count() - before.bit_count()) * self.sizes[key]
        self.host[key] = mask
        self.host.move_to_end(key)
        while self.host_used > self.costs.host_bytes and len(self.host) > 1:
            oldest, layers = self.host.popitem(last=False)
            self.host_used -= layers.bit_count() * self.sizes[oldest]
