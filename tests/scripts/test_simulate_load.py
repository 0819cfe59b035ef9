"""`scripts/simulate_load.py` as it is called: options, output, files, what it says of a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulation.main import POLICIES, main

SMALL = ["--requests", "40", "--pool", "8", "--chunks", "2", "--chunk-tokens", "32", "--layers", "3", "--rate", "4"]


def result(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*SMALL, "--json", *options]) == 0
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def test_every_policy_gets_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    rows = result(capsys)["policies"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    assert [row["requests"] for row in rows] == [40] * len(POLICIES)


def test_the_table_says_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--policies", "fcfs"]) == 0
    said = capsys.readouterr().out
    assert "first token, p99, s" in said
    assert "requests answered" in said


def test_the_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result(capsys, "--plot", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


DETAILS = {
    "costs": {"step_s": 0.01, "row_layer_s": 1e-5, "key_layer_s": 0.0},
    "layers": 3,
    "layer_token_bytes": 100,
    "options": {"pool": 8, "chunks": 2, "chunk_tokens": 32, "max_tokens": 2, "clients": 4},
    "rows": [
        {"mode": "blend", "loop": "closed", "rate": None, "ttft_p50_ms": 20.0, "ttft_p99_ms": 30.0, "requests": 9},
        {"mode": "blend", "loop": "open", "rate": 5.0, "ttft_p50_ms": 20.0, "ttft_p99_ms": 30.0, "requests": 9},
    ],
}


def test_a_measured_run_is_forecast(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "details.json").write_text(json.dumps(DETAILS))
    (row,) = result(capsys, "--forecast", str(tmp_path / "details.json"))["rows"]
    # one step: 10 ms, and 2 blends' worth of rows through 3 layers
    assert 10 < row["forecast_p50_ms"] < 20
    assert row["p99_off"] == pytest.approx(row["forecast_p99_ms"] / 30.0 - 1.0)


def test_a_forecast_has_the_arrivals_that_were_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # all at once: the last of nine waits for the others, four at a time
    loop = {"mode": "blend", "loop": "open", "rate": 5.0, "ttft_p50_ms": 20.0, "ttft_p99_ms": 30.0, "requests": 9}
    rows = [{**loop, "arrivals_s": arrivals} for arrivals in ([0.0] * 9, [float(n) for n in range(9)])]
    (tmp_path / "details.json").write_text(json.dumps({**DETAILS, "rows": rows}))
    crowded, spread = result(capsys, "--forecast", str(tmp_path / "details.json"))["rows"]
    assert spread["forecast_p99_ms"] == pytest.approx(spread["forecast_p50_ms"])
    assert crowded["forecast_p99_ms"] > 2 * spread["forecast_p99_ms"]


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"costs": {}})])
def test_a_file_of_something_else_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert main([*SMALL, "--costs", str(tmp_path / "x.json")]) == 2
    assert "x.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--requests", "0"], "--requests is 0; it must be at least 1"),
        (["--rate", "-1"], "--rate is -1; it must be above 0"),
        (["--ratio", "1.5"], "--ratio is 1.5; it must lie in 0..1"),
        (["--step-s", "-1"], "--step-s is -1; it must not be negative"),
        (["--chunks", "9"], "--chunks 9 are more than --pool 8"),
        (["--deadline-s", "3", "2"], "--deadline-s is [3.0, 2.0]"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as error:
        main([*SMALL, *options])
    assert error.value.code == 2
    assert said in capsys.readouterr().err
