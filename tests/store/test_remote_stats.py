from __future__ import annotations

import pytest

from kvblend.store.remote_stats import MEASURED_BYTES_MIN, WEIGHT, RemoteCounts


def test_the_first_measurement_counts_alone() -> None:
    counts = RemoteCounts()
    counts.note_lookup(0.25)
    assert counts.figures("up").latency_ms == 250.0


def test_later_measurements_move_the_mean() -> None:
    counts = RemoteCounts()
    counts.note_lookup(1.0)
    counts.note_lookup(2.0)
    assert counts.figures("up").latency_ms == pytest.approx(1000 * (1 + WEIGHT))


def test_throughput_is_of_long_answers_only() -> None:
    counts = RemoteCounts()
    counts.note_read(MEASURED_BYTES_MIN - 1, 1.0)
    assert counts.figures("up").read_mb_s == 0.0
    counts.note_read(3_000_000, 2.0)
    assert counts.figures("up").read_mb_s == 1.5
    assert counts.figures("up").bytes_read == 3_000_000 + MEASURED_BYTES_MIN - 1


def test_a_clock_that_stood_still_is_no_throughput() -> None:
    counts = RemoteCounts()
    counts.note_read(MEASURED_BYTES_MIN, 0.0)
    assert counts.figures("up").read_mb_s == 0.0


def test_a_snapshot_stays_as_it_was() -> None:
    counts = RemoteCounts()
    before = counts.figures("idle")
    counts.hits += 1
    assert (before.hits, before.state) == (0, "idle")
