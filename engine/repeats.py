"""Which tokens of a prompt's chunks say again what an earlier chunk said: retrieved chunks often overlap.

A token that repeats earlier text looks its copy up, and its K and V differ a lot from those of the same token read for
the first time. A chunk may therefore be stored in two forms (docs/quality.md, "Repeats"): as read for the first time,
and as an *echo*, computed behind a copy of itself. Which form a token wants is told by the prompt's token ids alone.
"""

from __future__ import annotations

import torch

from kvblend.engine.layout import PromptLayout

REPEAT_TOKENS = 3
"""A token repeats when it and the two before it stand in this order in an earlier chunk."""


class Repeats:
    """The repeating tokens of one prompt; they are looked for when the first chunk asks."""

    def __init__(self, layout: PromptLayout) -> None:
        self._layout = layout
        self._found: dict[int, torch.Tensor] | None = None

    def of(self, start: int) -> torch.Tensor:
        """Those of the segment at position `start`: ascending offsets from it, int64."""
        if self._found is None:
            found = repeated_tokens(self._layout)
            self._found = {at: torch.tensor(offsets, dtype=torch.int64) for at, offsets in found.items()}
        return self._found.get(start, torch.empty(0, dtype=torch.int64))


def repeated_tokens(layout: PromptLayout) -> dict[int, list[int]]:
    """Per chunk segment, by its first position: which of its tokens repeat, as ascending offsets from that position."""
    seen: set[tuple[int, ...]] = set()
    found: dict[int, list[int]] = {}
    for _, segment in layout.chunks():
        ids = segment.token_ids
        runs = list(zip(*(ids[shift:] for shift in range(REPEAT_TOKENS)), strict=False))
        found[segment.start] = [at for at, run in enumerate(runs, start=REPEAT_TOKENS - 1) if run in seen]
        seen.update(runs)
    return found
