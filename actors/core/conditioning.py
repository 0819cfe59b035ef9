"""What a server computes chunks behind, and which variants of a chunk it therefore looks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvblend.store.keys import TOKEN_ID_MAX

ConditioningKind = Literal["system", "bare", "warm", "neighbours"]
Ids = tuple[int, ...]
# no vocabulary has this id, so that no text can be mistaken for the neighbours of a chunk
NEIGHBOURS: Ids = (TOKEN_ID_MAX,)
# KV behind the warm text is mixed with that behind the system prompt (engine/contrast.py): another share, another mark
WARM: Ids = (TOKEN_ID_MAX - 1,)
# the same, with the echo of the chunk behind it (engine/repeats.py)
ECHO: Ids = (TOKEN_ID_MAX - 2,)


@dataclass(frozen=True, slots=True)
class Conditioning:
    """A server's rule. `warm` are the ids of the unrelated text; with `tokens_max` tokens a prompt is full.

    `neighbours` is `warm` for every chunk whose neighbours were not given when it was stored. With `echo` a warm chunk
    is stored with what it becomes behind a copy of itself, too, where that copy fits.
    """

    kind: ConditioningKind = "system"
    warm: Ids = ()
    tokens_max: int = 1 << 40
    echo: bool = False

    def parts(self, system: Ids, tokens: int) -> tuple[Ids, ...]:
        """What a chunk of this many tokens is computed behind, piece by piece; no piece is empty.

        A chunk that does not fit behind the warm text is computed behind the system prompt alone.
        """
        if self.kind == "bare":
            return ()
        pieces = (system, self.warm) if self.warms and self.fits(system, tokens) else (system,)
        return tuple(piece for piece in pieces if piece)

    def behind(self, system: Ids, tokens: int) -> Ids:
        """What a key calls this: the ids of `parts`, and a mark where the KV is that of two contexts."""
        mark = ECHO if self.echoes(system, tokens) else WARM if self.label(system, tokens) == "warm" else ()
        return (*(token for piece in self.parts(system, tokens) for token in piece), *mark)

    @property
    def warms(self) -> bool:
        """Whether chunks are computed behind the warm text where they fit. A small context has no room for any."""
        return bool(self.warm) and self.kind in ("warm", "neighbours")

    def fits(self, system: Ids, tokens: int) -> bool:
        """Whether a chunk of this many tokens fits behind system prompt and warm text."""
        return len(system) + len(self.warm) + tokens <= self.tokens_max

    def echoes(self, system: Ids, tokens: int) -> bool:
        """Whether a chunk of this many tokens is stored with its echo."""
        return self.echo and self.label(system, tokens) == "warm" and self.fits(system, 2 * tokens)

    def label(self, system: Ids, tokens: int) -> ConditioningKind:
        """The name of what `parts` says."""
        if self.kind == "bare":
            return "bare"
        return "warm" if self.warms and self.fits(system, tokens) else "system"

    def variants(self, system: Ids, tokens: int) -> tuple[Ids, ...]:
        """The ids behind which a stored chunk may have been computed to be taken, best first, without repeats."""
        own = self.behind(system, tokens)
        chosen = [(*system, *NEIGHBOURS)] if self.kind == "neighbours" else []
        # an echo does no harm where none is asked for, and its lack little
        other = [(*own[:-1], *mark) for mark in (ECHO, WARM)] if self.label(system, tokens) == "warm" else []
        return tuple(dict.fromkeys([*chosen, own, *other, system, ()]))
