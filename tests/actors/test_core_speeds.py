"""Speeds measured from reads that overlap and from prefills."""

from __future__ import annotations

import pytest

from kvblend.actors.core.speeds import SAMPLE_BYTES_MIN, WEIGHT, ComputeMeter, TierMeter, TierSpeed

MB = 1 << 20


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
    meter.note(100.0, 1.0, blend=False)
    assert (meter.blend_row_s, meter.row_s) == (None, 0.01)
    meter.note(100.0, 2.0, blend=True)
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
    meter.note(100.0, 0.5, blend=True)
    assert (meter.blend_row_s, meter.row_s) == (0.005, 0.005)


def test_rows_of_a_blend_are_taken_no_cheaper_than_those_of_a_full_prefill() -> None:
    meter = ComputeMeter()
    meter.profile(100.0, 1.0)
    meter.note(100.0, 2.0, blend=False)
    assert (meter.blend_row_s, meter.row_s) == (0.02, 0.02)


def test_a_profile_that_is_too_short_says_nothing() -> None:
    meter = ComputeMeter()
    meter.profile(100.0, 0.01)
    meter.profile(0.0, 1.0)
    assert meter.blend_row_s is None
