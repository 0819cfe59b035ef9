"""What a pass shows its selector: divergence of rows, attention that keys receive, parity of layer 0."""

from __future__ import annotations

import math

import torch

from kvblend.engine.attention.base import AttentionBackend, attend_scored
from kvblend.engine.model import Model
from kvblend.engine.selectors.base import Observation
from kvblend.engine.sequence import SequenceState, Slice


def observe_divergence(sequence: SequenceState, current: Slice, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Fresh against cached, before the slots are overwritten. Rotation keeps norms, so rotated keys will do.

    k (rotated) and v are `[rows, kv_heads, head_dim]`.
    """
    old_k = sequence.slab.k[layer].index_select(1, current.rows_device).transpose(0, 1)
    old_v = sequence.slab.v[layer].index_select(1, current.rows_device).transpose(0, 1)
    shown = [current.rows]
    shown += torch.stack([x.float().square().sum((1, 2)) for x in (k - old_k, v - old_v, old_k, old_v)]).cpu().unbind()
    seen = sequence.observation
    if seen is not None:
        before = (seen.rows, seen.key_change, seen.value_change, seen.key_norm, seen.value_norm)
        shown = [now if old is None else torch.cat((old, now)) for old, now in zip(before, shown, strict=True)]
    sequence.observation = Observation(*shown)


def check_parity(sequence: SequenceState, current: Slice, k: torch.Tensor) -> None:
    """Layer-0 keys depend on token and position only: the cached ones must equal the fresh ones (`k`, rotated)."""
    cached = torch.isin(current.rows, sequence.context.cached_rows).nonzero().flatten()
    if not cached.numel():
        return
    slots = current.rows[cached].to(k.device)
    old = sequence.slab.k[0].index_select(1, slots).transpose(0, 1)
    fresh = k.index_select(0, cached.to(k.device))
    scale = fresh.abs().max().clamp_min(torch.finfo(k.dtype).tiny)
    if sequence.precision is not None and sequence.precision.is_narrow:
        # rounding follows the largest key of a chunk, which may stand in another slice
        everywhere = sequence.context.cached_rows.to(k.device)
        scale = torch.maximum(scale, sequence.slab.k[0].index_select(1, everywhere).abs().max())
    error = float((old - fresh).abs().max() / scale)
    # NaN compares as neither larger nor smaller: it must not pass for agreement
    sequence.parity_error = max(sequence.parity_error, math.inf if math.isnan(error) else error)


def show_rows(sequence: SequenceState, model: Model) -> None:
    """Put the logits of the rows that the pass shows into its observation; its slices have all left the last layer."""
    running = sequence.current
    if running is None or running.shows_from is None:
        return
    parts = [(part.hidden, part.rows >= running.shows_from) for part in sequence.partial]
    hidden = torch.cat([hidden[shown.to(hidden.device)] for hidden, shown in parts])
    seen = sequence.observation = sequence.observation or Observation(running.rows)
    seen.logits = model.logits(hidden)


def attend_observed(
    sequence: SequenceState,
    current: Slice,
    q: torch.Tensor,
    backend: AttentionBackend,
    layer: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of the slice's rows; the question's rows are scored too. Returns `[rows, heads * head_dim]`.

    In a layer with a window, keys outside it are not attended and so receive no score there. Scores are summed on the
    device: the sequence brings the sum to the CPU once, when the pass ends.
    """
    question = int(sequence.context.question_rows[0])
    first = int(torch.searchsorted(current.rows, question))
    parts = []
    if first:
        rows = current.rows[:first]
        k, v = sequence.slab.view(layer, int(rows[-1]) + 1)
        parts.append(backend.attend(backend.prepare(rows, k.device, k.dtype, window), q[:first], k, v, scale))
    if first < current.rows.shape[0]:
        rows = current.rows[first:]
        keys = int(rows[-1]) + 1
        k, v = sequence.slab.view(layer, keys)
        out, received = attend_scored(rows, q[first:], k, v, scale, window)
        parts.append(out)
        seen = sequence.observation
        if seen is None or seen.attention is None:
            scores = torch.zeros(sequence.num_prompt_tokens, device=received.device)
            seen = sequence.observation = Observation(current.rows, attention=scores)
        if seen.attention is not None:
            seen.attention[:keys] += received
    return parts[0] if len(parts) == 1 else torch.cat(parts)
