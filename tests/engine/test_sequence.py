"""A sequence between two steps: its passes, what they cost, and what it refuses from a selector."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_models import DictSource, tiny_config

from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.selectors.base import Observation, Pass, Passes, SelectionContext, Selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.sequence import Frontier, SequenceState, join_frontiers, selection_context

KIND = SegmentKind
E, C, F = Reuse.EXACT, Reuse.CACHED, Reuse.FRESH
LAYERS = 4


class Listed:
    """Yields the given passes and keeps what it is sent."""

    name = "listed"

    def __init__(self, *passes: Pass) -> None:
        self.given = passes
        self.seen: list[Observation] = []

    def passes(self, context: SelectionContext) -> Passes:
        for item in self.given:
            self.seen.append((yield item))


def plan(marks: Sequence[Reuse] = (E, E, C, F, F), ratio: float = 0.5) -> BlendPlan:
    """System 2, chunks of 3 tokens, a question of 2."""
    parts = [(KIND.SYSTEM, (1, 2)), *[(KIND.CHUNK, (3, 4, 5))] * (len(marks) - 2), (KIND.QUESTION, (6, 7))]
    return BlendPlan.of(PromptLayout.of(parts), marks, ratio)


def start(selector: Selector | None = None, marks: Sequence[Reuse] = (E, E, C, F, F)) -> SequenceState:
    slab = SlabPool(tiny_config(), 64, torch.float32, torch.device("cpu")).reserve(16)
    return SequenceState.start("r", plan(marks), selector or PlainSelector(), slab, LAYERS, DictSource({}))


def rows(*positions: int) -> torch.Tensor:
    return torch.tensor(positions)


def frontier(layer: int, *positions: int, q: bool = False) -> Frontier:
    hidden = torch.tensor(positions, dtype=torch.float32)[:, None]
    return Frontier(layer, rows(*positions), hidden, 10.0 * hidden if q else None)


def test_a_selector_sees_cached_fresh_and_question_rows_apart() -> None:
    context = selection_context(plan(), LAYERS)
    assert context.cached_rows.tolist() == [5, 6, 7]
    assert context.fresh_rows.tolist() == [8, 9, 10, 11, 12]
    assert context.question_rows.tolist() == [11, 12]
    assert (context.num_layers, context.num_tokens, context.budget) == (LAYERS, 13, 2)


def test_a_prompt_without_cached_rows_has_an_empty_set_of_them() -> None:
    assert selection_context(plan((F, F, F)), LAYERS).cached_rows.tolist() == []


def test_token_ids_stay_on_the_cpu_with_room_for_the_answer() -> None:
    sequence = start()
    assert sequence.token_ids.device.type == "cpu"
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 6, 7, 0, 0, 0]


def test_a_last_segment_that_is_reused_is_refused() -> None:
    with pytest.raises(ValueError, match="last segment of a prompt must be computed fresh"):
        start(marks=(E, C, C))


def test_a_prompt_with_reuse_waits_for_its_layers() -> None:
    assert start().installed == 0


def test_a_prompt_without_reuse_waits_for_nothing() -> None:
    sequence = start(marks=(F, F, F))
    assert (sequence.installed, sequence.source) == (LAYERS, None)


def test_a_finished_pass_of_the_last_row_ends_the_prompt() -> None:
    sequence = start()
    sequence.end_pass()
    assert sequence.prefilled
    assert (sequence.num_computed_tokens, sequence.rows_left, sequence.source) == (13, 0, None)


def test_an_appended_token_is_a_one_row_pass() -> None:
    sequence = start()
    sequence.end_pass()
    sequence.append_token(42)
    assert sequence.current is not None
    assert (sequence.current.layers, sequence.current.rows.tolist()) == (range(LAYERS), [13])
    assert int(sequence.token_ids[13]) == 42
    sequence.end_pass()
    assert (sequence.prefilled, sequence.num_computed_tokens) == (True, 14)


def test_an_observation_reaches_the_selector() -> None:
    selector = Listed(Pass(range(2), rows(5, 12)), Pass(range(LAYERS), rows(12)))
    sequence = start(selector)
    sequence.observation = Observation(rows(5, 12), torch.ones(2), torch.ones(2))
    given = sequence.observation
    sequence.end_pass()
    assert selector.seen == [given]
    assert sequence.observation is None


def test_a_pass_without_observation_sends_its_rows() -> None:
    selector = Listed(Pass(range(2), rows(5, 12)), Pass(range(LAYERS), rows(12)))
    start(selector).end_pass()
    assert selector.seen[0].rows.tolist() == [5, 12]
    assert selector.seen[0].attention is None


@pytest.mark.parametrize(("stop", "ended"), [("output", 2), ("qkv", 1)])
def test_a_pass_goes_on_where_the_one_before_ended(stop: str, ended: int) -> None:
    first = Pass(range(2), rows(5, 12), stop=stop)  # type: ignore[arg-type]
    sequence = start(Listed(first, Pass(range(ended, LAYERS), rows(12))))
    sequence.end_pass()
    assert sequence.current is not None
    assert sequence.current.layers.start == ended


@pytest.mark.parametrize(
    ("following", "message"),
    [
        (Pass(range(1, LAYERS), rows(12)), "a pass starts at layer 1; it may start at 0 or 2"),
        (Pass(range(3, LAYERS), rows(12)), "a pass starts at layer 3; it may start at 0 or 2"),
        (Pass(range(2, LAYERS), rows(6, 12)), "starts at layer 2 with rows that the pass before it did not compute"),
        (Pass(range(2, 2), rows(12)), "needs neighbouring layers within 0..3"),
        (Pass(range(2, LAYERS + 1), rows(12)), "needs neighbouring layers within 0..3"),
        (Pass(range(0, LAYERS, 2), rows(12)), "needs neighbouring layers within 0..3"),
        (Pass(range(LAYERS), rows(12, 5)), "strictly ascending"),
        (Pass(range(LAYERS), rows(12, 12)), "strictly ascending"),
        (Pass(range(LAYERS), torch.empty(0, dtype=torch.int64)), "at least one"),
    ],
)
def test_a_pass_that_cannot_run_is_refused(following: Pass, message: str) -> None:
    sequence = start(Listed(Pass(range(2), rows(5, 12)), following))
    with pytest.raises(RuntimeError, match=message):
        sequence.end_pass()


def test_a_first_pass_above_layer_zero_is_refused() -> None:
    with pytest.raises(RuntimeError, match="first pass starts at layer 1; it must start at 0"):
        start(Listed(Pass(range(1, LAYERS), rows(12))))


@pytest.mark.parametrize(
    "last", [Pass(range(3), rows(12)), Pass(range(LAYERS), rows(11)), Pass(range(LAYERS), rows(12), stop="qkv")]
)
def test_a_selector_must_bring_the_last_row_through_the_last_layer(last: Pass) -> None:
    with pytest.raises(RuntimeError, match="ended before the prompt's last row left the last layer"):
        start(Listed(last)).end_pass()


def test_slices_join_to_one_frontier_in_row_order() -> None:
    joined = join_frontiers([frontier(2, 1, 4, q=True), frontier(2, 7, q=True)])
    assert joined is not None
    assert joined.q is not None
    assert (joined.layer, joined.rows.tolist()) == (2, [1, 4, 7])
    assert joined.hidden.flatten().tolist() == [1.0, 4.0, 7.0]
    assert joined.q.flatten().tolist() == [10.0, 40.0, 70.0]


def test_slices_without_queries_join_without_them() -> None:
    joined = join_frontiers([frontier(2, 1), frontier(2, 7)])
    assert joined is not None
    assert joined.q is None


def test_a_single_slice_is_the_frontier_itself() -> None:
    only = frontier(1, 3)
    assert join_frontiers([only]) is only


def test_no_slice_is_no_frontier() -> None:
    assert join_frontiers([]) is None


def test_rows_left_count_down_with_the_slices_that_started() -> None:
    sequence = start()
    assert sequence.rows_left == 5
    sequence.rows_started = 3
    assert sequence.rows_left == 2


@pytest.mark.parametrize(("marks", "ratio"), [((F, F, F), 1.0), ((E, E, F), 0.0), ((E, F, E, F), 0.0)])
def test_charged_ratio_without_cached_rows_tells_full_from_exact(marks: tuple[Reuse, ...], ratio: float) -> None:
    assert start(marks=marks).charged_ratio == ratio


def test_charged_ratio_counts_cached_rows_per_layer() -> None:
    sequence = start()
    sequence.charges.cached_row_layers = 6
    sequence.charges.question_row_layers = LAYERS * 2
    assert sequence.charged_ratio == 6 / (LAYERS * 3)


def test_charged_ratio_counts_the_question_beyond_its_first_pass() -> None:
    sequence = start()
    sequence.charges.question_row_layers = LAYERS * 2 + 4
    assert sequence.charged_ratio == 4 / (LAYERS * 3)


def test_tokens_are_reused_recomputed_or_fresh() -> None:
    sequence = start()
    sequence.end_pass()
    assert sequence.count_tokens() == (8, 0, 5)


def test_recomputed_are_the_cached_rows_that_went_through_the_last_layer() -> None:
    sequence = start()
    cached = sequence.context.cached_rows
    wide = Pass(range(2), torch.cat((cached, sequence.context.fresh_rows)).sort().values)
    narrow = Pass(range(2, LAYERS), torch.cat((cached[:2], sequence.context.fresh_rows)).sort().values)
    sequence = start(Listed(wide, narrow))
    sequence.end_pass()
    sequence.end_pass()
    assert sequence.count_tokens() == (6, 2, 5)
