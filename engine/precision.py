"""The form in which KV is stored: the compute dtype, bfloat16, or int8 with scales; docs/format.md has the layout.

Encoding happens once, when a chunk is stored. Decoding happens in the device thread for every layer of every request,
so it writes straight into the KV slots: on a CPU with two AVX2 cores, 512 tokens of SmolLM2 and one thread, a layer
takes 1.03 times as long from bfloat16 and 1.09 times from int8 as from float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from kvblend.engine.capture import DTYPES, payload_sensitivity, payload_tensors, tensor_bytes
from kvblend.engine.model import Model
from kvblend.engine.payloads import Payload, payload_numbers
from kvblend.engine.rope import rotate, rotate_into

STORE_DTYPES = ("float32", "bfloat16", "int8")
INT8_MAX = 127
STORED_DTYPES = {**DTYPES, "int8": torch.int8}
STORED_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
# what rounding may do to a number that RoPE turns behind it, as a share of the largest: a bit over sqrt(2) half steps
ROUNDING_MAX = {torch.bfloat16: 1.5 * 2.0**-8, torch.int8: 0.75 / INT8_MAX}


class UnstorableKV(ValueError):
    """KV that a narrow form cannot hold: numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How layers of `[kv_heads, tokens, head_dim]` in dtype `compute` are stored as `stored`: the same, or narrower."""

    compute: torch.dtype
    stored: torch.dtype
    kv_heads: int
    head_dim: int

    @classmethod
    def of_model(cls, model: Model, stored: str = "") -> Self:
        """A model's KV stored as `stored`, or as it is computed. ValueError as of `of`."""
        config = model.config
        return cls.of(model.dtype, stored or STORED_NAMES[model.dtype], config.num_kv_heads, config.head_dim)

    @classmethod
    def of(cls, compute: torch.dtype, stored: str, kv_heads: int, head_dim: int) -> Self:
        """By the name of the stored dtype. ValueError for an unknown one, and for one wider than the compute dtype."""
        dtype = STORED_DTYPES.get(stored)
        if dtype is None:
            raise ValueError(f"store_dtype is {stored!r}; choose {', '.join(STORE_DTYPES)}")
        if dtype != compute and dtype.itemsize >= compute.itemsize:
            raise ValueError(f"store_dtype is {stored!r}; that is no narrower than {STORED_NAMES[compute]}")
        return cls(compute, dtype, kv_heads, head_dim)

    @property
    def is_narrow(self) -> bool:
        """Whether storing changes the numbers."""
        return self.stored != self.compute

    @property
    def rounding_max(self) -> float:
        """The largest difference of a decoded number, turned or not, from what was encoded: a share of the largest."""
        return ROUNDING_MAX.get(self.stored, 0.0) if self.is_narrow else 0.0

    @property
    def name(self) -> str:
        """The stored dtype's name, as in files and settings."""
        return STORED_NAMES[self.stored]

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of one layer's K and V, scales included, without the sensitivity that may stand behind them."""
        numbers = 2 * self.kv_heads * tokens * self.head_dim * self.stored.itemsize
        scales = self.kv_heads * (self.head_dim + tokens) if self.stored == torch.int8 else 0
        return numbers + torch.float32.itemsize * scales

    def encode(self, payload: memoryview, tokens: int) -> memoryview:
        """The stored form of one captured layer; what stands behind K and V stays. The payload itself where not narrow.

        Raises UnstorableKV for numbers that are not finite, or too large for the stored dtype.
        """
        if not self.is_narrow:
            return payload
        pair = payload_tensors(payload, self.kv_heads, self.head_dim, self.compute, tokens)
        kv = _encode_int8(*pair) if self.stored == torch.int8 else _encode_narrow(torch.stack(pair), self.stored)
        behind = payload_sensitivity(payload, self.kv_heads, self.head_dim, self.compute, tokens)
        parts = [*kv, *([] if behind is None else [behind])]
        wide = Precision(self.compute, self.compute, self.kv_heads, self.head_dim)
        if isinstance(echo := wide.echo(payload, tokens), memoryview):
            parts.append(torch.frombuffer(self.encode(echo, tokens), dtype=torch.uint8))
        return tensor_bytes(torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]))

    def decode(self, payload: Payload, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (not rotated) and V `[kv_heads, tokens, head_dim]` of one stored layer, in the compute dtype."""
        k, v = self._numbers(payload, tokens)
        if self.stored != torch.int8:
            return k.to(self.compute), v.to(self.compute)
        k_scale, v_scale = self._scales(payload, tokens)
        return (k * k_scale).to(self.compute), (v * v_scale).to(self.compute)

    def decode_into(
        self,
        parts: Sequence[tuple[int, int, Payload]],
        slots: tuple[torch.Tensor, torch.Tensor],
        turn: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Write one layer of stored segments into its KV slots: K rotated, V as it is.

        `parts` are `(start, end, payload)` of positions `start..end-1`, in ascending order; a payload lies in host
        memory or where the slots are. `slots` are k and v `[kv_heads, positions, head_dim]` of any device, `turn` cos
        and sin `[positions, rotary_dim]`.
        """
        slots_k, slots_v = slots
        pairs = [self._numbers(payload, end - start) for start, end, payload in parts]
        if not self.is_narrow:
            for (start, end, _), (k, v) in zip(parts, pairs, strict=True):
                rotate_into(slots_k[:, start:end], k.to(slots_k.device), *(part[start:end] for part in turn))
                slots_v[:, start:end].copy_(v)
            return
        # V's slots hold K for a moment: no memory of its own is needed, and neighbours are rotated in one go
        for (start, end, payload), (k, _) in zip(parts, pairs, strict=True):
            self._widen_into(slots_v[:, start:end], k, payload, 0)
        for start, end in _joined(parts):
            rotate_into(slots_k[:, start:end], slots_v[:, start:end], *(part[start:end] for part in turn))
        for (start, end, payload), (_, v) in zip(parts, pairs, strict=True):
            self._widen_into(slots_v[:, start:end], v, payload, 1)

    def _widen_into(self, out: torch.Tensor, numbers: torch.Tensor, payload: Payload, which: int) -> None:
        """`numbers` of a narrow payload into `out`, in its dtype; `which` of the scales they take: 0 of K, 1 of V."""
        out.copy_(numbers)
        if self.stored == torch.int8:
            out.mul_(self._scales(payload, out.shape[1])[which].to(out.device))

    def sensitivity(self, payload: Payload, tokens: int) -> torch.Tensor | None:
        """What stands behind K and V of one stored layer, if anything: float32 `[tokens]` in host memory (see
        `engine.contrast`).
        """
        offset = self.kv_bytes(tokens)
        if len(payload) == offset:
            return None
        return payload_numbers(payload, torch.float32, tokens, offset).cpu()

    def echo(self, payload: Payload, tokens: int) -> Payload | None:
        """The second K and V of one stored layer, in the form of the first (see `engine.repeats`), if there are any."""
        offset = self.kv_bytes(tokens) + torch.float32.itemsize * tokens
        return payload[offset:] if len(payload) > offset else None

    def decode_rows_into(
        self,
        parts: Sequence[tuple[int, int, Payload, torch.Tensor]],
        slots: tuple[torch.Tensor, torch.Tensor],
        turn: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """`decode_into` for some rows of each segment: `(start, end, payload, rows)`, rows int64 offsets, ascending."""
        slots_k, slots_v = slots
        found = [self._some(payload, end - start, rows) for start, end, payload, rows in parts]
        # some may lie on the device and others in host memory
        place = slots_k.device, slots_k.dtype
        k, v = (torch.cat([part.to(*place) for part in both], dim=1) for both in zip(*found, strict=True))
        at = torch.cat([rows + start for start, _, _, rows in parts]).to(slots_k.device)
        slots_k.index_copy_(1, at, rotate(k, *(part.index_select(0, at) for part in turn)))
        slots_v.index_copy_(1, at, v)

    def _some(self, payload: Payload, tokens: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[kv_heads, rows, head_dim]` of some rows, in the stored dtype or, with their scales, in float32."""
        k, v = self._numbers(payload, tokens)
        rows = rows.to(k.device)
        k, v = k.index_select(1, rows), v.index_select(1, rows)
        if self.stored != torch.int8:
            return k, v
        k_scale, v_scale = self._scales(payload, tokens)
        return k * k_scale, v * v_scale.index_select(1, rows)

    def _numbers(self, payload: Payload, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return payload_tensors(payload, self.kv_heads, self.head_dim, self.stored, tokens)

    def _scales(self, payload: Payload, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 `[kv_heads, 1, head_dim]` for K and `[kv_heads, tokens, 1]` for V; views of the payload."""
        heads, dim = self.kv_heads, self.head_dim
        offset = 2 * heads * tokens * dim
        scales = payload_numbers(payload, torch.float32, heads * (dim + tokens), offset)
        return scales[: heads * dim].view(heads, 1, dim), scales[heads * dim :].view(heads, tokens, 1)


def store_fingerprint(fingerprint: str, compute: str, stored: str) -> str:
    """What a store calls the chunks of a model (its `fingerprint`) computed in one dtype and stored in another.

    Part of every chunk's key, so chunks of different dtypes have different names, in one folder and in a remote tier.
    float32 stored as float32 is the fingerprint alone.
    """
    if compute == "float32":
        return fingerprint if stored == compute else f"{fingerprint}:{stored}"
    return f"{fingerprint}:{stored}:{compute}"


def _joined(parts: Sequence[tuple[int, int, Payload]]) -> list[tuple[int, int]]:
    """Stretches of positions without a gap."""
    spans: list[tuple[int, int]] = []
    for start, end, _ in parts:
        first = spans.pop()[0] if spans and spans[-1][1] == start else start
        spans.append((first, end))
    return spans


def _encode_narrow(kv: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    narrow = kv.to(dtype)
    # behind the rounding: a finite number may have become infinite by it
    if not bool(torch.isfinite(narrow).all()):
        raise UnstorableKV(f"K or V holds numbers that {STORED_NAMES[dtype]} cannot: not finite, or too large")
    return [narrow]


def _encode_int8(k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """int8 K and V, then their float32 scales: of K per head and channel, of V per head and token."""
    (k_int, k_scale), (v_int, v_scale) = _quantise(k, dim=1), _quantise(v, dim=2)
    return [k_int, v_int, k_scale, v_scale]


def _quantise(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 and float32 scales along `dim`, so that int8 times scale is x to half a scale."""
    # amax hands on a NaN, so one look at the scales sees every number
    scale = (x.abs().amax(dim, keepdim=True).to(torch.float32) / INT8_MAX).contiguous()
    if not bool(torch.isfinite(scale * INT8_MAX).all()):
        raise UnstorableKV("K or V holds numbers that int8 cannot: not finite, or too large")
    steps = x / torch.where(scale == 0, 1.0, scale)
    return steps.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), scale
