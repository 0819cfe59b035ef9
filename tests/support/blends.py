"""Prompts of a few chunks, blended from stored KV, and what a full prefill of them gives."""

from __future__ import annotations

from collections.abc import Sequence

from tiny_models import Bench, DictSource, Run, random_ids

from kvblend.engine.layout import PromptLayout, Reuse, SegmentKind
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.divergence import DivergenceSelector

SYSTEM = random_ids(7, 1)
A, B, C, D = (random_ids(n, 10 + n) for n in (19, 23, 16, 11))
QUESTION = random_ids(9, 2)
KIND = SegmentKind
TOLERANCE = 1e-9


def prompt(chunks: Sequence[Sequence[int]], question: Sequence[int] = QUESTION) -> PromptLayout:
    return PromptLayout.of([(KIND.SYSTEM, SYSTEM), *((KIND.CHUNK, c) for c in chunks), (KIND.QUESTION, question)])


def blend(
    bench: Bench,
    layout: PromptLayout,
    missing: Sequence[int] = (),
    ratio: float = 1.0,
    selector: Selector | None = None,
    rows_max: int = 1 << 30,
    bare: bool = False,
) -> Run:
    """Every chunk but the `missing` ones (by order) from the store, the system segment too.

    Where RoPE is that of long prompts, what was computed in short ones is exact nowhere: those segments are fresh.
    """
    payloads: dict[int, list[memoryview]] = {}
    long = bool(bench.model.config.rope_regime(layout.num_tokens))
    reuse = [Reuse.FRESH if long else Reuse.EXACT]
    if not long:
        payloads[0] = bench.payloads((), layout.segments[0].token_ids)
    for order, (_, segment) in enumerate(layout.chunks()):
        exact = order == 0 and not bare
        if order in missing or (exact and long):
            reuse.append(Reuse.FRESH)
            continue
        payloads[segment.start] = bench.payloads(() if bare else layout.segments[0].token_ids, segment.token_ids)
        reuse.append(Reuse.EXACT if exact else Reuse.CACHED)
    reuse.append(Reuse.FRESH)
    sequence = bench.start(layout, reuse, ratio, selector or DivergenceSelector(), DictSource(payloads))
    return bench.finish(sequence, rows_max)


def assert_equal(got: Run, want: Run) -> None:
    assert (got.logits - want.logits).abs().max() <= TOLERANCE * want.logits.abs().max()
    assert (got.k - want.k).abs().max() <= TOLERANCE * want.k.abs().max()
    assert (got.v - want.v).abs().max() <= TOLERANCE * want.v.abs().max()


LAYOUTS = {
    "reordered hits": (prompt([C, A, B]), ()),
    "miss in the middle": (prompt([A, B, C]), (1,)),
    "first chunk missing": (prompt([A, B, C]), (0,)),
    "same chunk twice": (prompt([A, B, A]), ()),
    "same chunk twice in a row": (prompt([A, A]), ()),
    "one-token question": (prompt([B, A], QUESTION[:1]), ()),
    "all misses": (prompt([A, B]), (0, 1)),
    "single chunk": (prompt([A]), ()),
}
