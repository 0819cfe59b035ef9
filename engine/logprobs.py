"""What the model thought of an output token, as it leaves the engine: plain data, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

LOGPROBS_MAX = 20
"""Likeliest tokens that can be asked for beside each chosen one."""
LOGPROB_MIN = -9999.0
"""Stands for the logarithm of 0, which JSON cannot write."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token at one place of an answer: the natural logarithm of its probability, `LOGPROB_MIN` at least.

    Probabilities are those of the model's own logits, before penalties, temperature and the rest. `bytes` is what the
    token adds to the text, perhaps a part of a character; None where it is no text (the token that ends an answer).

    Of an output token, `top` has the likeliest tokens of its place, likeliest first, each without a `top` of its own,
    and `offset` is where its text begins in the answer, in characters.
    """

    token_id: int
    logprob: float
    token: str = ""
    bytes: bytes | None = None
    top: tuple[TokenLogprob, ...] = ()
    offset: int = 0
