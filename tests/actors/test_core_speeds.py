"""Speeds measured from reads that overlap and from prefills."""

from __future__ import annotations

import pytest

from kvblend.actors.core.speeds import SAMPLE_BYTES_MIN, WEIGHT, ComputeMeter, Mean, TierMeter, TierSpeed

MB = 1 << 20


def test_old_samples_fade() -> None:
    mean = Mean(0.2)
    mean.note(1.0)
    mean.note(2.0)
    assert mean.value == pytest.approx(1.2)


def test_overlapping_reads_count_the_time_once() -> None:
    meter = TierMeter()
    meter.begin(0.0)
    meter.begin(0.0)
    meter.end(MB, 0.5)
    meter.end(MB, 1.0)
    assert meter.speed == TierSpeed(2.0 * MB, 0.0, 1.0)


def test_time_without_a_read_does_not_count() -> None:
    meter = TierMeter()
    meter.begin(0.0)
    meter.end(SAMPLE_BYTES_MIN // 2, 0.5)
    meter.begin(100.0)
    meter.end(SAMPLE_BYTES_MIN // 2, 100.5)
    assert meter.speed == TierSpeed(SAMPLE_BYTES_MIN, 0.0, 100.5)


def test_a_few_small_reads_tell_nothing() -> None:
    meter = TierMeter()
    meter.begin(0.0)
    meter.end(SAMPLE_BYTES_MIN - 1, 1.0)
    assert meter.speed is None


def test_a_new_sample_counts_its_weight_in_time() -> None:
    meter = TierMeter()
    for begin, seconds in ((0.0, 1.0), (10.0, 2.0)):
        meter.begin(begin)
        meter.end(MB, begin + seconds)
    assert meter.speed is not None
    assert meter.speed.bytes_per_s == pytest.approx(MB / (1.0 - WEIGHT + 2.0 * WEIGHT))


def test_latency_is_averaged_and_part_of_every_load() -> None:
    meter = TierMeter()
    meter.note_latency(0.01)
    meter.note_latency(0.02)
    meter.begin(0.0)
    meter.end(MB, 1.0)
    assert meter.speed is not None
    assert meter.speed.latency_s == pytest.approx(0.01 + 0.01 * WEIGHT)
    assert meter.speed.load_s(2 * MB) == pytest.approx(2.0 + meter.speed.latency_s)
    assert meter.speed.load_s(0) == 0.0


def test_blends_and_full_prefills_are_measured_apart() -> None:
    meter = ComputeMeter()
    assert (meter.blend_row_s, meter.row_s) == (None, None)
    meter.note(1000.0, 10.0, blend=False)
    assert (meter.blend_row_s, meter.row_s) == (None, 0.01)
    meter.note(1000.0, 20.0, blend=True)
    assert (meter.blend_row_s, meter.row_s) == (0.02, 0.02)


@pytest.mark.parametrize(("rows", "seconds"), [(0.0, 1.0), (10.0, 0.001)])
def test_prefills_too_small_to_measure_are_left_out(rows: float, seconds: float) -> None:
    meter = ComputeMeter()
    meter.note(rows, seconds, blend=True)
    assert meter.row_s is None


def test_what_was_profiled_stands_in_until_a_request_was_measured() -> None:
    meter = ComputeMeter()
    meter.profile(100.0, 1.0)
    assert (meter.blend_row_s, meter.row_s) == (0.01, 0.01)
    meter.note(1000.0, 20.0, blend=True)
    assert (meter.blend_row_s, meter.row_s) == (0.02, 0.02)


def test_rows_of_a_blend_are_taken_no_cheaper_than_those_of_a_full_prefill() -> None:
    meter = ComputeMeter()
    meter.profile(100.0, 1.0)
    meter.note(1000.0, 20.0, blend=False)
    assert (meter.blend_row_s, meter.row_s) == (0.02, 0.02)


def test_a_profile_that_is_too_short_says_nothing() -> None:
    meter = ComputeMeter()
    meter.profile(100.0, 0.01)
    meter.profile(0.0, 1.0)
    assert meter.blend_row_s is None


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_short_prefills_do_not_change_what_a_row_is_thought_to_take(first: bool, blend: bool) -> None:
    meter = ComputeMeter()
    for is_long in (first, not first):
        if is_long:
            meter.note(1000.0, 10.0, blend=blend)
            continue
        for _ in range(50):
            meter.note(20.0, 2.0, blend=blend)
    assert meter.row_s == pytest.approx(0.01)
    assert meter.blend_row_s == (pytest.approx(0.01) if blend else None)


def test_short_blends_do_not_hide_what_a_row_of_a_long_full_prefill_takes() -> None:
    meter = ComputeMeter()
    meter.note(1000.0, 10.0, blend=False)
    meter.note(20.0, 2.0, blend=True)
    assert (meter.blend_row_s, meter.row_s) == (0.01, 0.01)


def test_short_prefills_are_better_than_nothing_and_the_cheapest_is_the_nearest() -> None:
    meter = ComputeMeter()
    meter.note(20.0, 2.0, blend=True)
    assert (meter.blend_row_s, meter.row_s) == (0.1, 0.1)
    meter.profile(100.0, 3.0)
    assert (meter.blend_row_s, meter.row_s) == (0.03, 0.03)
