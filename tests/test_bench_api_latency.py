from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench" / "api_latency.py"


@pytest.mark.parametrize(("transport", "clock"), [("websocket", "wall"), ("sse", "wall"), ("websocket", "cpu")])
def test_every_token_is_timed_from_its_emission(transport: str, clock: str) -> None:
    flags = ["--streams", "6", "--connections", "2", "--tokens", "12", "--interval-ms", "5"]
    command = [sys.executable, str(BENCH), *flags, "--transport", transport, "--clock", clock, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # the first five of each stream are warm-up
    assert found["tokens"] == 6 * (12 - 5)
    assert 0 < found["added_ms"]["p50"] <= found["added_ms"]["p99"] <= found["added_ms"]["max"]
    assert found["within_target"] is (found["added_ms"]["p99"] < found["target_p99_ms"])
    assert found["loop_lag_ms"]["p99"] >= 0
    assert found["clock"] == clock
