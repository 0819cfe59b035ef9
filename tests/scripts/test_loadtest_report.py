"""The result block, the table, the files."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from loadtest.figures import compute
from loadtest.options import read_options
from loadtest.outcome import Outcome
from loadtest.plot import place, plot
from loadtest.report import block, describe, result_path, table, warnings

NOW = datetime(2026, 1, 2, 3, 4, 5)
ONE = Outcome(0, "normal", "ok", 0.0, 0.0, 0.1, 0.2, 0.5, [0.1], 9, 3, False, "cold", 0, "abc")


def made(line: str = "", rate: float = 2.0, *outcomes: Outcome) -> dict[str, Any]:
    options = read_options(line.split())
    return {**describe(options, "org/m", rate, NOW), **compute(outcomes or (ONE,), options, rate)}


def test_the_block_has_the_lines_that_users_know() -> None:
    lines = list(block(made(), read_options([])))
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     1" in lines
    assert "Request rate configured (RPS):           2.00" in lines
    assert "---------------Time to First Token----------------" in lines
    assert "P99 TTFT (ms):                           200.00" in lines
    assert lines[-1] == "=" * 50


def test_the_block_is_split_by_reuse() -> None:
    text = "\n".join(block(made(), read_options([])))
    assert "Cold: Time to First Token" in text
    assert "Full hit: Time to First Token" not in text


def test_no_limit_is_said_in_words() -> None:
    assert made(rate=math.inf)["request_rate"] == "inf"


def test_metadata_stand_beside_the_figures() -> None:
    assert made("--metadata machine=big")["machine"] == "big"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "openai-chat-2qps-m-20260102-030405.json"),
        ("--label a/b --max-concurrency 4", "a-b-2qps-concurrency4-m-20260102-030405.json"),
        ("--result-filename x.json", "x.json"),
        ("--result-filename x.json --request-rate 2,4", "x-2qps.json"),
    ],
)
def test_each_rate_has_a_file_of_its_own(line: str, name: str) -> None:
    assert result_path(read_options(line.split()), "org/m", 2.0, NOW).name == name


def test_errors_are_said_with_how_often_they_came() -> None:
    bad = replace(ONE, status="failed", error="HTTP 500")
    assert list(warnings([bad, bad, ONE], made())) == ["failed 2 times: HTTP 500"]


def test_a_late_client_is_said() -> None:
    assert "was up to 25 ms late" in next(warnings([replace(ONE, lag_s=0.025)], made()))


def test_counted_tokens_are_said() -> None:
    assert "came without usage" in next(warnings([ONE], {**made(), "estimated_token_counts": 1}))


def test_the_table_has_a_line_for_each_rate() -> None:
    lines = list(table([made(rate=2.0), made(rate=math.inf)]))
    assert [line.split()[0] for line in lines] == ["rate", "2.0", "inf"]


def test_a_rate_without_limit_stands_at_its_throughput() -> None:
    result = made(rate=math.inf)
    assert place(result) == result["request_throughput"]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    plot([made(rate=4.0), made(rate=2.0)], "p99", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
