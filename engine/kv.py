"""KV slots of running sequences: contiguous slabs behind one pool interface, accounted in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvblend.engine.config import ModelConfig

PAGE_TOKENS = 16


class KVExhausted(RuntimeError):
    """A reservation exceeds what the pool has left; admission should have prevented it."""


@dataclass(slots=True, eq=False)
class KVSlab:
    """KV slots of one sequence: `k` and `v` are `[num_layers, num_kv_heads, capacity, head_dim]`, k rotated."""

    k: torch.Tensor
    v: torch.Tensor
    pages: int

    @property
    def capacity(self) -> int:
        """Token slots."""
        return self.k.shape[2]

    def view(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v `[num_kv_heads, num_tokens, head_dim]` of one layer; views, nothing is copied."""
        return self.k[layer, :, :num_tokens], self.v[layer, :, :num_tokens]

    def write(self, layer: int, positions: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put `k`, `v` `[rows, num_kv_heads, head_dim]` into the slots at `positions` (int64 `[rows]`, ascending).

        `positions` are on the CPU, `slots` the same numbers on the slab's device: no look at them waits for the device.
        """
        rows = positions.shape[0]
        first = int(positions[0])
        if int(positions[-1]) - first == rows - 1:
            self.k[layer, :, first : first + rows] = k.transpose(0, 1)
            self.v[layer, :, first : first + rows] = v.transpose(0, 1)
            return
        self.k[layer].index_copy_(1, slots, k.transpose(0, 1))
        self.v[layer].index_copy_(1, slots, v.transpose(0, 1))

    def copy_from(self, other: KVSlab, num_tokens: int) -> None:
        """Take over the first `num_tokens` tokens of all layers. Raises ValueError where one of both has no room."""
        if num_tokens > min(self.capacity, other.capacity):
            raise ValueError(f"{num_tokens} tokens do not fit into slabs of {self.capacity} and {other.capacity}")
        self.k[:, :, :num_tokens].copy_(other.k[:, :, :num_tokens])
        self.v[:, :, :num_tokens].copy_(other.v[:, :, :num_tokens])


class KVPool(Protocol):
    """Where sequences get their KV slots; one pool belongs to one device."""

    tokens_max: int

    def reserve(self, num_tokens: int) -> KVSlab:
        """Slots for `num_tokens` tokens. Raises KVExhausted."""
        ...

    def release(self, slab: KVSlab) -> None:
        """Give a slab back; a second release of the same slab is an error (ValueError)."""
        ...

    @property
    def tokens_used(self) -> int:
        """Token slots that are reserved, in whole pages."""
        ...


def pages_of(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


class SlabPool:
    """A KVPool of one contiguous slab per sequence.

    Released slabs are kept for the next sequence of a like size: touching fresh memory for the first time takes as long
    as a good part of a short blend. On a CPU only, where no caching allocator does the same. A slab may be up to a
    quarter larger than was asked for; apart from that, kept and reserved slabs together stay within `tokens_max`.
    """

    def __init__(self, config: ModelConfig, tokens_max: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tokens_max = tokens_max
        self._shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        self._dtype, self._device = dtype, device
        self._held: dict[int, KVSlab] = {}
        self._idle: list[KVSlab] = []
        self._pages_used = 0

    @property
    def tokens_used(self) -> int:
        """Token slots that are reserved, in whole pages."""
        return self._pages_used * PAGE_TOKENS

    @property
    def tokens_allocated(self) -> int:
        """Token slots that take up memory, kept ones included."""
        return sum(slab.capacity for slab in [*self._held.values(), *self._idle])

    def reserve(self, num_tokens: int) -> KVSlab:
        """A slab for `num_tokens` tokens. Raises KVExhausted."""
        pages = pages_of(num_tokens)
        if self._pages_used + pages > pages_of(self.tokens_max):
            raise KVExhausted(f"{num_tokens} tokens do not fit beside {self.tokens_used} of {self.tokens_max}")
        slab = self._take_idle(pages) or self._allocate(pages)
        self._pages_used += pages
        self._held[id(slab)] = slab
        return slab

    def release(self, slab: KVSlab) -> None:
        """Give a slab back. Raises ValueError where it is not held."""
        if self._held.pop(id(slab), None) is None:
            raise ValueError("this slab is not held by the pool")
        self._pages_used -= slab.pages
        # a new object: whoever still has the released one cannot release it a second time
        if self._device.type == "cpu":
            self._idle.append(KVSlab(slab.k, slab.v, slab.pages))

    def _take_idle(self, pages: int) -> KVSlab | None:
        """The smallest kept slab that is large enough, unless more than a fifth of it would lie fallow."""
        fits = [slab for slab in self._idle if pages <= slab.capacity // PAGE_TOKENS <= pages + pages // 4]
        if not fits:
            return None
        slab = min(fits, key=lambda kept: kept.capacity)
        self._idle.remove(slab)
        slab.pages = pages
        return slab

    def _allocate(self, pages: int) -> KVSlab:
        room = pages_of(self.tokens_max) * PAGE_TOKENS - pages * PAGE_TOKENS
        while self._idle and self.tokens_allocated > room:
            self._idle.pop(0)
        layers, heads, dim = self._shape
        shape = (layers, heads, pages * PAGE_TOKENS, dim)
        return KVSlab(
            torch.empty(shape, dtype=self._dtype, device=self._device),
            torch.empty(shape, dtype=self._dtype, device=self._device),
            pages,
        )
