"""A sequence that begins with what an earlier one computed: the next turn of a conversation."""

from __future__ import annotations

import pytest
from tiny_models import CPU, random_ids, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.kv import PAGE_TOKENS, SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.output import OutputText
from kvblend.engine.runner import Runner, SequenceSpec, TickResult
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.plain import PlainSelector

FIRST = random_ids(20, 1)
MORE = random_ids(6, 2)


class Silent:
    """A detokeniser without text."""

    def push(self, token_id: int) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


def new_runner() -> Runner:
    model = tiny_model()
    return Runner(model, SdpaBackend(), SlabPool(model.config, 256, model.dtype, CPU))


def spec(name: str, ids: tuple[int, ...], earlier: str = "", kept: int = 0, new: int = 4) -> SequenceSpec:
    parts = [(SegmentKind.CHUNK, ids[:kept])] if kept else []
    layout = PromptLayout.of([*parts, (SegmentKind.QUESTION, ids[kept:])])
    marks = [Reuse.EXACT] * len(parts) + [Reuse.FRESH]
    return SequenceSpec(
        name,
        BlendPlan.of(layout, marks, 0.0),
        PlainSelector(),
        len(ids) + new,
        sampling=SamplingPlan(0.0, 1.0, 0),
        output=OutputText(Silent(), (), (), new),
        continues=(earlier, kept) if kept else None,
    )


def answer(runner: Runner, name: str, count: int) -> tuple[int, ...]:
    tokens: list[int] = []
    while len(tokens) < count:
        (result,) = runner.tick([(name, 1000, None)])
        if result.status == "sampled":
            tokens.append(result.token_id)
    return tuple(tokens)


def test_the_next_turn_gives_the_tokens_of_a_full_prefill() -> None:
    runner = new_runner()
    runner.start(spec("first", FIRST))
    said = answer(runner, "first", 4)
    # the last token that was sampled has no KV: it never went through the model
    prompt, kept = (*FIRST, *said, *MORE), len(FIRST) + 3
    runner.start(spec("second", prompt, "first", kept))
    runner.start(spec("afresh", prompt))
    assert answer(runner, "second", 4) == answer(runner, "afresh", 4)


def test_only_what_is_new_is_computed() -> None:
    runner = new_runner()
    runner.start(spec("first", FIRST))
    answer(runner, "first", 1)
    runner.start(spec("second", (*FIRST, *MORE), "first", len(FIRST)))
    (result,) = runner.tick([("second", 1000, None)])
    assert result.rows == len(MORE)
    assert result.figures is not None
    assert (result.figures.tokens_reused, result.figures.tokens_fresh) == (len(FIRST), len(MORE))
    assert result.figures.charged_ratio == 0.0


def test_the_earlier_sequence_may_be_freed_once_the_next_has_started() -> None:
    runner = new_runner()
    runner.start(spec("first", FIRST))
    answer(runner, "first", 1)
    runner.start(spec("second", (*FIRST, *MORE), "first", len(FIRST)))
    runner.free("first")
    runner.start(spec("afresh", (*FIRST, *MORE)))
    assert answer(runner, "second", 4) == answer(runner, "afresh", 4)


@pytest.mark.parametrize(
    ("ids", "earlier", "kept"),
    [((*FIRST, *MORE), "nobody", 20), ((*FIRST, *MORE), "first", 24), ((*MORE, *FIRST), "first", 6)],
)
def test_what_was_not_computed_cannot_be_continued_and_holds_nothing(
    ids: tuple[int, ...], earlier: str, kept: int
) -> None:
    runner = new_runner()
    runner.start(spec("first", FIRST))
    answer(runner, "first", 1)
    used = runner.pool.tokens_used
    runner.start(spec("second", ids, earlier, kept))
    assert runner.tick([("second", 1000, None)]) == [TickResult("second", "lost")]
    assert runner.pool.tokens_used == used == -(-24 // PAGE_TOKENS) * PAGE_TOKENS


def test_who_runs_beside_one_that_cannot_be_continued_goes_on() -> None:
    runner = new_runner()
    runner.start(spec("first", FIRST))
    runner.start(spec("second", (*FIRST, *MORE), "nobody", len(FIRST)))
    results = runner.tick([("first", 1000, None), ("second", 1000, None)])
    assert [(result.request_id, result.status) for result in results] == [("first", "sampled"), ("second", "lost")]


def test_it_may_start_afresh_once_it_was_freed() -> None:
    runner = new_runner()
    runner.start(spec("second", (*FIRST, *MORE), "nobody", len(FIRST)))
    runner.free("second")
    assert runner.tick([("second", 1000, None)]) == []
    runner.start(spec("second", (*FIRST, *MORE)))
    assert runner.tick([("second", 1000, None)])[0].status == "sampled"
