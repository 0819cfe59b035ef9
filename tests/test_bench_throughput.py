"""The throughput benchmark: its loads are what they say, its figures add up, and all of it runs."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from throughput import SERIAL, ratios
from throughput_counts import parse
from throughput_decay import first_sights, quarter_ends
from throughput_plot import plot
from throughput_steps import fit_costs, prompt_work
from throughput_work import Answer, Clients, Measured, Pool, closed_loop, open_loop, percentile, zipf_weights

from kvblend.actors.core.events import PrefillReport
from kvblend.actors.messages import Usage

ROOT = Path(__file__).resolve().parent.parent
ROW = {"mode", "loop", "rate", "clients", "requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms"}


class Scripted:
    """Clients of a server that answers at once; counts who is under way."""

    def __init__(self) -> None:
        self.now, self.most, self.asked = 0, 0, 0

    async def ask(self, mode: str) -> Answer:
        import asyncio

        self.now, self.asked = self.now + 1, self.asked + 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return Answer(0.5, 1.0, (0.1, 0.4), Usage())


async def test_a_closed_loop_keeps_its_clients_busy() -> None:
    server = Scripted()
    out = await closed_loop(cast(Clients, server), "blend", 3, 10)
    assert (len(out.answers), server.asked, server.most) == (10, 10, 3)


async def test_an_open_loop_sends_whatever_is_still_under_way() -> None:
    server = Scripted()
    out = await open_loop(cast(Clients, server), "blend", 1e6, 20, random.Random(0))
    assert (len(out.answers), out.rate, out.clients) == (20, 1e6, None)
    assert len(out.arrivals_s) == 20
    assert out.arrivals_s == sorted(out.arrivals_s)


def test_a_row_has_the_fields_of_the_contract() -> None:
    row = Measured("blend", "closed", None, 4, [Answer(0.5, 1.0, (0.1, 0.4), Usage())], seconds=2.0).row()
    assert set(row) == ROW
    assert (row["requests_per_s"], row["ttft_p99_ms"], row["itl_p99_ms"]) == (0.5, 500.0, 400.0)


def test_percentiles_are_values_that_were_seen() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (50, 99)] == [2.0, 3.0]
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize("weights", [None, zipf_weights(5)])
def test_no_order_is_asked_for_twice(weights: list[float] | None) -> None:
    pool = Pool([""] * 5, 2, random.Random(0), weights)
    drawn = [pool.draw() for _ in range(20)]
    assert len(set(drawn)) == 20
    assert all(len(set(order)) == 2 for order in drawn)
    with pytest.raises(ValueError, match="no new order"):
        pool.draw()


def test_a_zipf_pool_prefers_its_first_chunks() -> None:
    pool = Pool([""] * 30, 2, random.Random(0), zipf_weights(30))
    counts = [0] * 30
    for _ in range(300):
        for index in pool.draw():
            counts[index] += 1
    assert sum(counts[:5]) > sum(counts[5:15]) > sum(counts[20:])


@pytest.mark.parametrize("count", [12, 13, 17])
def test_first_sights_show_every_chunk(count: int) -> None:
    orders = first_sights(count, random.Random(0))
    assert {index for order in orders for index in order} == set(range(count))
    assert all(len(set(order)) == 6 for order in orders)


def test_quarters_end_where_the_run_does() -> None:
    assert quarter_ends(601) == [150, 300, 450, 601]


def test_costs_are_found_again() -> None:
    chance = random.Random(0)
    costs = {"step_s": 0.02, "row_layer_s": 3e-5, "key_layer_s": 2e-9, "decode_key_layer_s": 5e-8}
    work = [(chance.uniform(30, 9e4), chance.uniform(1e5, 1e8), chance.uniform(0, 1e6)) for _ in range(40)]
    found = fit_costs([(a, b, c, 0.02 + 3e-5 * a + 2e-9 * b + 5e-8 * c) for a, b, c in work])
    assert found == pytest.approx(costs)


def test_no_cost_is_negative() -> None:
    found = fit_costs([(rows, rows * 100.0, 0.0, 1e-3 * rows - 0.5) for rows in (1e3, 2e3, 3e3, 4e3)])
    assert min(found.values()) >= 0.0


def test_a_prompt_is_counted_by_what_was_computed_of_it() -> None:
    rows, keys = prompt_work(10, PrefillReport(80, 20, 10, 0.5, 0.0))
    # half of the 90 rows that are not exact, seeing half of 110 keys; ten fresh ones at the end
    assert (rows, keys) == (45 + 10, 45 * 55 + 10 * 105)


def measured(mode: str, ttft_s: float, total_s: float, rate: float) -> Measured:
    return Measured(mode, "closed", None, 1, [Answer(ttft_s, total_s, (), Usage())], seconds=1 / rate)


def test_the_ratios_are_those_of_the_contract() -> None:
    rows = {
        "full alone": measured("full", 8.0, 9.0, 0.1),
        "blend alone": measured("blend", 2.0, 3.0, 0.3),
        "full": measured("full", 8.0, 9.0, 0.1),
        "blend": measured("blend", 2.0, 3.0, 0.4),
        SERIAL: measured("blend", 2.0, 3.0, 0.25),
    }
    found = ratios(rows, {})
    assert found == pytest.approx({"blend/full": 4.0, "blend/predicted": 4.0 / 3.0, "packed/serial": 1.6})


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    base: dict[str, Any] = {"requests_per_s": 1.0, "ttft_p50_ms": 10.0, "ttft_p99_ms": 20.0, "itl_p99_ms": None}
    rows = [{"mode": "blend", "loop": "closed", "rate": None, "clients": n, **base} for n in (1, 16)]
    rows += [{"mode": "blend", "loop": "open", "rate": rate, "clients": None, **base} for rate in (0.7, 0.3)]
    plot(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--blends", "0"], "--blends must be at least 1"),
        (["--pool", "5"], "--pool 5 is smaller than --chunks 6"),
        (["--decays", "3"], "--decays must be at least 4"),
    ],
)
def test_counts_that_measure_nothing_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("", options)
    assert said in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_a_quick_run_ends_with_all_figures(tmp_path: Path) -> None:
    options = ["--quick", "--json", "--open-s-min", "1", "--decay-pool", "24", "--details", str(tmp_path / "d.json")]
    options += ["--open", "blend", "reuse"]
    command = [sys.executable, str(ROOT / "bench" / "throughput.py"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert ended.returncode == 0, ended.stderr[-2000:]
    result = json.loads(ended.stdout)
    assert set(result) == {"rows", "ratio", "decay"}
    assert all(set(row) == ROW for row in result["rows"])
    assert set(result["ratio"]) == {"blend/full", "blend/predicted", "packed/serial"}
    assert {row["mode"] for row in result["rows"]} >= {"full", "prefix", "reuse", "blend", SERIAL}
    details = json.loads((tmp_path / "d.json").read_text())
    assert details["decay"]["chunks_after_first_sight"] == details["decay"]["chunks_at_end"]
    assert all(row["requests"] > 0 for row in details["rows"])
    open_loops = [row for row in details["rows"] if row["loop"] == "open"]
    assert {row["mode"] for row in open_loops} == {"blend", "reuse"}
    assert all(len(row["arrivals_s"]) == row["requests"] for row in open_loops)
