"""What a step may take: speeds that are learnt, and prompts cut to what is left."""

from __future__ import annotations

import pytest
from core_driver import generate
from hypothesis import given
from hypothesis.strategies import floats, integers

from kvblend.actors.core import events as ev
from kvblend.actors.core.entry import Entry
from kvblend.actors.core.pacing import BEYOND, MARGIN, PROGRESS_MIN, Pace, Room
from kvblend.actors.core.planning import Decision, decide
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind

LAYERS = 10


def entry(tokens: int = 1000, cached: bool = False) -> Entry:
    job = generate("r", (4,) * 5, tuple(range(tokens - 10)), mode="blend" if cached else "full", ratio=0.0)
    made = Entry(job, 0.0)
    made.decision = decide(job, [ev.Hit(2, False, "disk")] if cached else [], 0)
    return made


def result(row_layers: int) -> ev.ItemResult:
    return ev.ItemResult("r", "running", 100, row_layers=row_layers)


def taught(itl_ms_max: float | None = 100.0, decode_ms: float = 20.0, speed: float = 0.01) -> Pace:
    pace = Pace(itl_ms_max, LAYERS)
    pace.note(2, [], decode_ms)
    pace.note(0, [(entry(), result(1000))], 1000 * speed)
    return pace


def test_nothing_is_known_at_first() -> None:
    pace = Pace(100.0, LAYERS)
    assert (pace.decode_ms(3), pace.row_layer_ms(entry())) == (0.0, None)


def test_decoding_rows_are_learnt_from_steps_without_prefills() -> None:
    pace = taught()
    assert [pace.decode_ms(rows) for rows in (0, 1, 2, 9)] == [0.0, 20.0, 20.0, 20.0]


def test_what_decoding_takes_is_not_put_down_to_the_prefill_beside_it() -> None:
    pace, beside = taught(), entry()
    pace.note(2, [(beside, result(1000))], 60.0)
    assert beside.progress.row_layer_ms == pytest.approx(0.04)


def test_rows_that_are_scattered_have_a_speed_of_their_own() -> None:
    pace, blend = taught(speed=0.01), entry(cached=True)
    pace.note(0, [(blend, result(1000))], 50.0)
    assert pace.row_layer_ms(entry(cached=True)) == pytest.approx(0.05)
    assert pace.row_layer_ms(entry()) == pytest.approx(0.01)


def test_the_speed_of_others_is_taken_where_its_own_kind_has_none() -> None:
    assert taught(speed=0.02).row_layer_ms(entry(cached=True)) == pytest.approx(0.02)


def test_a_few_rows_tell_nothing() -> None:
    pace = Pace(100.0, LAYERS)
    pace.note(0, [(entry(), result(5))], 50.0)
    assert pace.row_layer_ms(entry()) is None


def test_the_room_is_what_decoding_leaves_of_the_bound() -> None:
    room = taught().room(2, 8192, True)
    assert room.ms == pytest.approx(100.0 * (1 - MARGIN) - 20.0)
    assert room.rows == 8190


def test_some_room_is_left_where_decoding_takes_all() -> None:
    assert taught(decode_ms=85.0).room(2, 8192, True).ms == pytest.approx(100.0 * PROGRESS_MIN)
    assert taught(decode_ms=300.0).room(2, 8192, True).ms == pytest.approx(300.0 * BEYOND)


@pytest.mark.parametrize(("bound", "bounded"), [(None, True), (100.0, False)])
def test_without_a_bound_or_anybody_who_waits_there_is_no_end_of_room(bound: float | None, bounded: bool) -> None:
    pace, long = taught(bound), entry()
    assert pace.cut(long, pace.room(2, 8192, bounded)) == ev.StepItem("r", 1000)


def test_a_prompt_is_cut_by_rows_and_layers() -> None:
    item = taught(decode_ms=5.0).cut(entry(), Room(40.0, 8192))
    assert item is not None
    # 4,000 row-layers fit; five layers at a time go into ten evenly, with some slack
    assert (item.rows_max, item.layers_max) == (761, 5)


def test_a_slice_on_its_way_keeps_its_rows_and_goes_as_far_as_fits() -> None:
    long = entry()
    long.progress.note(ev.ItemResult("r", "running", 500, row_layers=1000), 2, LAYERS)
    item = taught().cut(long, Room(20.0, 8192))
    assert item == ev.StepItem("r", 500, 4)


def test_the_first_of_a_step_goes_on_by_a_layer_and_the_next_has_to_wait() -> None:
    pace, long, room = taught(), entry(), Room(0.001, 8192)
    long.progress.note(ev.ItemResult("r", "running", 500, row_layers=1000), 2, LAYERS)
    assert pace.cut(long, room) == ev.StepItem("r", 500, 1)
    assert pace.cut(entry(), room) is None


def test_a_short_prompt_goes_whole_and_leaves_the_rest_to_the_next() -> None:
    pace, room = taught(), Room(60.0, 8192)
    assert pace.cut(entry(100), room) == ev.StepItem("r", 100)
    assert room.ms == pytest.approx(50.0)


@given(
    tokens=integers(20, 3000),
    ms=floats(0.0, 1e4),
    speed=floats(1e-6, 10.0),
    rows=integers(1, 4000),
    slice_rows=integers(0, 4000),
)
def test_a_cut_is_never_empty_and_fits_where_it_can(
    tokens: int, ms: float, speed: float, rows: int, slice_rows: int
) -> None:
    pace, cut_one, room = Pace(100.0, LAYERS), entry(tokens), Room(ms, rows)
    cut_one.progress.note_speed(speed)
    cut_one.progress.rows = slice_rows
    item = pace.cut(cut_one, room)
    assert item is not None
    assert 1 <= item.rows_max <= rows
    layers = LAYERS if item.layers_max is None else item.layers_max
    assert 1 <= layers <= LAYERS
    moved = slice_rows or item.rows_max
    assert layers == 1 or moved * layers * speed <= ms * (1 + 1e-6)


def teach_tiny(pace: Pace, times: int = 200, decoding: int = 0) -> None:
    """Prompts of 20 tokens: a step takes 50 ms whatever is in it, and 0.01 ms per row-layer."""
    for _ in range(times):
        pace.note(decoding, [(entry(20), result(20 * LAYERS))], 50.0 + 0.01 * 20 * LAYERS)


@pytest.mark.parametrize("decoding", [0, 2])
def test_tiny_prompts_do_not_change_what_a_large_one_is_thought_to_take(decoding: int) -> None:
    pace = taught(speed=0.01)
    teach_tiny(pace, decoding=decoding)
    assert pace.row_layer_ms(entry()) == pytest.approx(0.01)


def test_tiny_prompts_teach_the_fixed_part_of_a_step_and_a_large_one_what_comes_on_top() -> None:
    pace = taught(speed=0.02)
    teach_tiny(pace)
    for _ in range(20):
        pace.note(0, [(entry(), result(1000 * LAYERS))], 50.0 + 0.01 * 1000 * LAYERS)
    assert pace.row_layer_ms(entry()) == pytest.approx(0.01, rel=0.05)


def test_the_fixed_part_is_taken_off_the_room_where_nobody_decodes() -> None:
    pace = taught(speed=0.01)
    teach_tiny(pace)
    assert pace.room(0, 8192, True).ms == pytest.approx(100.0 * (1 - MARGIN) - 50.0)


def test_tiny_prompts_are_better_than_nothing_until_a_large_one_comes() -> None:
    pace = Pace(100.0, LAYERS)
    teach_tiny(pace, 3)
    assert pace.row_layer_ms(entry()) == pytest.approx(52.0 / (20 * LAYERS))
    pace.note(0, [(entry(), result(1000 * LAYERS))], 150.0)
    assert pace.row_layer_ms(entry()) == pytest.approx(0.01, rel=0.6)


def test_few_new_rows_behind_many_kept_ones_are_tiny_too() -> None:
    pace, turn = taught(speed=0.01), entry(cached=True)
    layout = PromptLayout.of([(SegmentKind.CHUNK, tuple(range(2000))), (SegmentKind.QUESTION, (7,) * 20)])
    plan = BlendPlan.of(layout, [Reuse.EXACT, Reuse.FRESH], 0.0)
    turn.decision = Decision(plan, (), (), (), ())
    pace.note(0, [(turn, result(20 * LAYERS))], 52.0)
    assert pace.row_layer_ms(entry()) == pytest.approx(0.01)
