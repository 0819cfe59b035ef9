"""What is measured at teacher-forced positions: divergence from the full prefill, likelihood, agreement."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def kl_per_position(reference: torch.Tensor, other: torch.Tensor) -> list[float]:
    """KL(reference || other) in nats at each position; logits `[positions, vocab_size]`, never below 0."""
    wanted, given = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    # a probability of 0 adds nothing, where 0 * inf would be NaN
    terms = torch.where(wanted.isneginf(), 0.0, wanted.exp() * (wanted - given))
    found: list[float] = terms.sum(-1).clamp_min(0.0).tolist()
    return found


def negative_log_likelihood(logits: torch.Tensor, token_ids: Sequence[int]) -> float:
    """Mean over positions of -log p(token) in nats; logits `[len(token_ids), vocab_size]`."""
    chosen = logits.double().log_softmax(-1).gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    return float(-chosen.mean())


def top1_agreement(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Share of positions at which both have the same likeliest token."""
    return float((reference.argmax(-1) == other.argmax(-1)).double().mean())


def entropy_per_position(logits: torch.Tensor) -> list[float]:
    """Entropy in nats of the expected token at each position."""
    log_p = logits.double().log_softmax(-1)
    found: list[float] = torch.special.entr(log_p.exp()).sum(-1).tolist()
    return found


def first_divergence(reference: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = enumerate(zip(reference, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(reference), len(other)))
