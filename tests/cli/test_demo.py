from __future__ import annotations

import itertools

from kvblend.actors.messages import Mode, Usage
from kvblend.cli import demo as module
from kvblend.cli.answers import Answer
from kvblend.samples import load


def test_no_sample_follows_the_one_it_followed_before() -> None:
    samples = load()
    mixed = module.shuffled(samples)
    assert sorted(s.title for s in mixed) == sorted(s.title for s in samples)
    neighbours = set(itertools.pairwise(samples))
    assert not neighbours & set(itertools.pairwise(mixed))


def runs(mode: Mode, warm_up_ms: float, measured_ms: float) -> module.Runs:
    warm_up, measured = (
        Answer("same", (1, 2), Usage(mode=mode, ttft_ms=ttft_ms), "stop") for ttft_ms in (warm_up_ms, measured_ms)
    )
    return module.Runs(warm_up, measured)


def test_the_table_has_both_times_and_their_ratio() -> None:
    table = module.comparison(runs("full", 950, 900), runs("blend", 310, 300))
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    rows = dict(zip(cells[0], zip(cells[1], cells[2], strict=True), strict=True))
    assert rows["time to first token, ms"] == ("900", "300")
    assert rows["the warm-up's, ms"] == ("950", "310")
    assert rows["full / this"] == ("1.0x", "3.0x")
    assert rows["same leading tokens"] == ("", "100%")
    assert rows["same answer"] == ("", "yes")


def test_a_run_slower_than_its_warm_up_is_not_trusted() -> None:
    assert runs("full", 100, 200).disturbed
    assert not runs("full", 200, 100).disturbed
