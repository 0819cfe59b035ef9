"""How fast the engine computes, before the first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_system import TEXTS, answer, running

from kvblend.actors import profiling
from kvblend.actors.profiling import PrefillSpeed, profile_prefill
from kvblend.actors.settings import Settings
from kvblend.engine.assembly import Engine, assemble_engine


@pytest.fixture(scope="module")
def engine(tiny_model_path: Path) -> Engine:
    engine = assemble_engine(tiny_model_path, "float32", "cpu", "auto", 4096, 0)
    return engine.storing("bfloat16")


def stored(tmp_path: Path, **changes: Any) -> Settings:
    return Settings(store=tmp_path / "s", **changes)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock for the profile; each blend takes the next of these seconds."""
    left: list[float] = []
    now = [0.0, False]

    def clock() -> float:
        if now[1]:
            now[0] += left.pop(0)
        now[1] = not now[1]
        return now[0]

    monkeypatch.setattr("kvblend.actors.profiling.time.perf_counter", clock)
    return left


@pytest.mark.parametrize("selector", ["divergence", "query"])
def test_a_short_blend_is_timed_as_the_server_would_run_it(
    engine: Engine, tmp_path: Path, times: list[float], selector: str
) -> None:
    times += [0.4, 0.01, 0.1]
    speed = profile_prefill(stored(tmp_path, selector=selector, recompute_ratio=0.5), engine)
    assert speed is not None
    # the question's rows and half of the chunk's, or more where layers are computed in full or twice
    assert 16 + 128 <= speed.rows <= 2 * (16 + 256)
    assert speed.seconds == pytest.approx(0.1)


def test_nothing_is_left_in_the_kv_slots(engine: Engine, tmp_path: Path) -> None:
    profile_prefill(stored(tmp_path), engine)
    assert not engine.runner.request_ids


def test_a_slow_machine_computes_the_shorter_blend_only(engine: Engine, tmp_path: Path, times: list[float]) -> None:
    times += [0.7]
    speed = profile_prefill(stored(tmp_path), engine)
    assert speed is not None
    assert speed.seconds == pytest.approx(0.7)


def test_the_first_blend_of_a_process_does_not_count(engine: Engine, tmp_path: Path, times: list[float]) -> None:
    times += [0.45, 0.2]
    speed = profile_prefill(stored(tmp_path, recompute_ratio=1.0), engine)
    assert speed is not None
    # the longer one would take more than half a second
    assert not times
    assert speed.seconds == pytest.approx(0.2)


def test_an_accelerator_is_warmed_up_and_computes_longer_blends(
    engine: Engine, tmp_path: Path, times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "ACCELERATOR_TOKENS", (32, 64))
    times += [9.0, 0.001, 0.002]
    speed = profile_prefill(stored(tmp_path, device="cuda"), engine)
    assert speed is not None
    assert speed.seconds == pytest.approx(0.002)


def test_without_a_place_to_load_from_nothing_is_timed(engine: Engine) -> None:
    assert profile_prefill(Settings(), engine) is None


def test_a_blend_does_not_exceed_the_kv_slots(engine: Engine, tmp_path: Path, times: list[float]) -> None:
    times += [0.02, 0.01]
    speed = profile_prefill(stored(tmp_path, kv_tokens_max=256), engine)
    assert speed is not None
    assert speed.rows < 64


def test_a_blend_that_fails_keeps_no_server_from_starting(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner, "tick", fail)
    assert profile_prefill(stored(tmp_path), engine) is None
    assert "was not learnt at the start: out of memory" in caplog.text
    assert not engine.runner.request_ids


async def test_the_controller_knows_from_the_first_request_on(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvblend.actors.system.profile_prefill", lambda *_: PrefillSpeed(100.0, 0.5))
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        compute = system._troupe._state.controller.compute
        assert (compute.blend_row_s, compute.row_s) == (0.005, 0.005)
        _, end = await answer(system, "a", TEXTS)
    # no tier was read yet, so none but memory is known to be fast enough
    assert end.usage.loading.store_tier == "host"
