"""How much of a prompt is left, and which slice of it is on its way."""

from __future__ import annotations

from dataclasses import replace

from core_driver import A, B, C, generate, store
from hypothesis import given
from hypothesis.strategies import integers

from kvblend.actors.core import events as ev
from kvblend.actors.core.jobs import BlendShape
from kvblend.actors.core.planning import decide
from kvblend.actors.core.progress import Outlook, Progress
from kvblend.actors.messages import BlendOptions

LAYERS = 10


def outlook(job: ev.Job, *cached: int) -> Outlook:
    hits = [ev.Hit(index, False, "disk") for index in cached]
    return Outlook.of(job, decide(job, hits, 0), LAYERS)


def went(rows: int, row_layers: int, status: str = "running") -> ev.ItemResult:
    return ev.ItemResult("r", status, rows, row_layers=row_layers)  # type: ignore[arg-type]


def test_a_plain_prompt_needs_all_its_rows_in_all_layers() -> None:
    assert outlook(generate("r", A, mode="full")) == Outlook(9, 0, 9, LAYERS)
    assert outlook(generate("r", A, mode="full")).row_layers == 90


def test_a_blend_needs_all_rows_up_to_its_check_layer_and_then_the_chosen_ones() -> None:
    job = generate("r", A, B, C, ratio=0.5)
    assert outlook(job, 2, 3) == Outlook(17, 2, 9 + 4, LAYERS)


def test_a_selector_that_waits_needs_no_more_than_fresh_and_chosen_rows_at_a_time() -> None:
    job = replace(generate("r", A, B, C, ratio=0.5), shape=BlendShape(0, True))
    assert outlook(job, 2, 3).row_layers == 13 * LAYERS


def test_where_the_ratio_may_be_raised_all_rows_are_expected() -> None:
    job = replace(generate("r", A, B, C, ratio=0.5), options=BlendOptions(max_kl=0.1))
    assert outlook(job, 2, 3).row_layers == 17 * LAYERS


def test_a_chunk_that_is_stored_needs_its_rows() -> None:
    assert outlook(store("s", A)).rest == 7


def test_rows_left_fall_as_rows_are_done() -> None:
    blend = Outlook(100, 2, 20, LAYERS)
    assert [blend.rows_left(done) for done in (0, 100, 200, 280, 352)] == [100, 50, 20, 10, 1]


def test_what_takes_longer_than_it_seemed_goes_on() -> None:
    assert Outlook(100, 2, 20, LAYERS).rows_left(5000) == 20


@given(integers(1, 500), integers(0, 3), integers(1, 500), integers(0, 10_000))
def test_there_is_always_a_row_left(first: int, full: int, rest: int, done: int) -> None:
    assert Outlook(first, full, rest, LAYERS).rows_left(done) >= 1


def test_a_slice_that_left_because_of_its_layers_is_on_its_way() -> None:
    progress = Progress()
    progress.note(went(50, 200), 4, LAYERS)
    assert (progress.rows, progress.layers, progress.row_layers) == (50, 4, 200)


def test_a_slice_that_was_only_projected_is_on_its_way() -> None:
    progress = Progress()
    progress.note(went(500, 0), None, LAYERS)
    assert (progress.rows, progress.layers) == (500, 0)


def test_a_slice_that_has_been_through_all_layers_is_done() -> None:
    progress = Progress()
    for layers in (4, 4, 2):
        progress.note(went(50, 50 * layers), 4, LAYERS)
    assert (progress.rows, progress.row_layers) == (0, 500)


def test_a_slice_that_went_as_far_as_it_could_is_done() -> None:
    progress = Progress()
    progress.note(went(50, 500), None, LAYERS)
    assert progress.rows == 0


def test_a_slice_that_waits_for_a_layer_keeps_its_rows() -> None:
    progress = Progress()
    progress.note(went(50, 0, "stalled"), None, LAYERS)
    assert progress.rows == 50


def test_another_slice_takes_the_place_of_the_one_before() -> None:
    progress = Progress()
    progress.note(went(50, 150), 3, LAYERS)
    progress.note(went(10, 30), 3, LAYERS)
    assert (progress.rows, progress.layers) == (10, 3)


def test_the_last_speed_counts_half() -> None:
    progress = Progress()
    progress.note_speed(1.0)
    progress.note_speed(2.0)
    assert progress.row_layer_ms == 1.5
