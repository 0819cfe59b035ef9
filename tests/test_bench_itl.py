"""The benchmark of gaps between tokens: gaps are those of the time asked about, and all of it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from itl import AUTO, Gap, Running, hear, line, parse, row

from kvblend.actors.messages import Delta, Failed
from kvblend.actors.streams import TokenStream

ROOT = Path(__file__).resolve().parent.parent
ROW = {
    "streams", "beside", "bound", "itl_ms_max", "gaps", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "ratio", "ttft_ms",
}  # fmt: skip


class Said:
    """A stream that has said all it will say."""

    def __init__(self, *events: object, terminal: object = None) -> None:
        self.events, self.terminal = events, terminal

    async def __aiter__(self) -> AsyncIterator[object]:
        for event in self.events:
            yield event


def running(stream: Said, gaps: list[Gap] | None = None) -> Running:
    return Running(cast(TokenStream, stream), gaps or [])


async def test_tokens_without_text_share_the_time_of_the_piece_they_come_with() -> None:
    one = running(Said(Delta("r", "a", (1,)), Delta("r", "b", (2, 3)), Delta("r", "c", (4,))))
    await one.read()
    assert len(one.gaps) == 3
    assert one.gaps[0] == one.gaps[1]


def test_only_gaps_that_ended_in_that_time_count() -> None:
    gaps = [Gap(1.0, 500.0), *(Gap(2.0 + n / 100, 10.0 + n) for n in range(4)), Gap(9.0, 600.0)]
    found = row([running(Said(), gaps)], 1.5, 8.0, alone_ms=5.0)
    assert (found["gaps"], found["itl_p50_ms"], found["itl_p99_ms"], found["itl_max_ms"]) == (4, 11.0, 13.0, 13.0)
    assert found["ratio"] == pytest.approx(13.0 / 5.0)


def test_a_time_in_which_nothing_was_said_is_no_row() -> None:
    with pytest.raises(ValueError, match="no token"):
        row([running(Said())], 0.0, 1.0)


async def test_an_answer_that_ends_meanwhile_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended before"):
        await hear([running(Said(terminal=Failed("r", "internal", "")))], 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--streams", "0"], "--streams is 0; it must be at least 1"),
        (["--itl-ms-max", "fast"], "it must be a number or auto"),
        (["--itl-ms-max", "-1"], "--itl-ms-max must not be negative"),
        (["--prompt-tokens", "0"], "--prompt-tokens is 0; it must be at least 1"),
    ],
)
def test_options_that_measure_nothing_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(options)
    assert said in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_a_quick_run_ends_with_all_figures() -> None:
    command = [sys.executable, str(ROOT / "bench" / "itl.py"), "--quick", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert ended.returncode == 0, ended.stderr[-2000:]
    result: dict[str, Any] = json.loads(ended.stdout)
    rows = result["rows"]
    assert all(set(found) == ROW for found in rows)
    seen = {(found["streams"], found["beside"], found["bound"]) for found in rows}
    assert seen == {(n, b, bound) for n in (1, 2) for b in ("nothing", "prompt", "blend") for bound in (AUTO, 1000.0)}
    assert result["ratio"] == max(found["ratio"] for found in rows if found["bound"] == AUTO and found["ratio"])
    assert all("gap p50" in line(found) for found in rows)
