"""The pure parts of the comparison with other engines, and of what is measured beside it."""

from __future__ import annotations

import importlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from kvblend.engine.recommended import recommended
from kvblend.engine.selectors.base import Pass

BENCH = Path(__file__).resolve().parent.parent / "bench"
ECHO = """
import json, sys
print(json.dumps({"ready": True, "version": "7", "settings": {}}), flush=True)
for line in sys.stdin:
    given = json.loads(line)
    if given == {"end": 1}:
        sys.exit("enough")
    print(json.dumps({"error": "no"} if given == {"fail": 1} else {"seconds": 2.0}), flush=True)
"""


def load(name: str) -> Any:
    """A module of the benchmarks, which are scripts beside each other."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


peers, figures, process, runner, own = map(load, ("peers", "peer_figures", "peer_process", "peer_runner", "peer_own"))
stages, work, clock, scaling = map(load, ("stages", "stage_work", "stage_clock", "scaling"))
TIMES = {"full": 600.0, "divergence@0.15": 120.0, "query@0.05": 60.0, "question_only": 30.0}


def test_ratios_are_against_the_own_full_prefill_and_the_fastest_peer() -> None:
    found = figures.ratios({**TIMES, "openvino": 540.0, "transformers": 750.0}, {})
    assert found["divergence@0.15/own_full"] == 5.0
    assert found["query@0.05/best_peer"] == 9.0
    assert found["question_only/own_full"] == 20.0
    assert found["full/transformers"] == 0.8


def test_what_was_not_measured_has_no_ratio() -> None:
    found = figures.ratios(TIMES, {"full": 1.0, "query@0.05": 3.0})
    assert not any("best_peer" in name for name in found)
    assert "full/transformers" not in found
    assert found["query@0.05/own_full/rate"] == 3.0


def test_rates_are_against_the_peer_that_answers_most_requests() -> None:
    found = figures.ratios({**TIMES, "vllm": 1.0, "openvino": 1.0}, {"query@0.05": 3.0, "vllm": 0.5, "openvino": 0.25})
    assert found["query@0.05/best_peer/rate"] == 6.0


def test_a_row_says_engine_mode_selector_and_ratio() -> None:
    row = figures.own_row("query@0.05", 4170, [3.0, 1.0, 2.0], None)
    assert (row["engine"], row["selector"], row["ratio"]) == ("kvblend", recommended(0.05).spec.selector, 0.05)
    assert row["ttft_ms_median"] == 2.0
    assert figures.peer_row("vllm", 4170, [1.0], 0.5)["requests_per_s"] == 0.5


def test_the_guided_modes_run_as_recommended(tmp_path: Path) -> None:
    settings = own.own_settings("warm", tmp_path, "text", 1)
    spec = recommended(0.05).spec
    assert (settings.selection, settings.conditioning, settings.echo) == (spec, "warm", True)
    assert own.own_settings("system", tmp_path, "text", 1).selector == "divergence"


def test_orders_are_shuffled_and_begin_with_every_chunk_in_turn() -> None:
    orders = peers.make_orders(random.Random(1), 8, 20)
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert sorted(order[0] for order in orders[5:13]) == list(range(8))
    assert len({tuple(order) for order in orders}) == 20


def venv(folder: Path, name: str) -> Path:
    python = folder / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    return python


def test_peers_are_found_in_venvs_and_a_missing_one_is_named_with_what_is_there(tmp_path: Path) -> None:
    python = venv(tmp_path, "openvino")
    found, lines = process.find_peers([], tmp_path)
    assert found["openvino"] == str(python)
    assert next(line for line in lines if "vllm" in line).endswith("available: openvino, transformers")


def test_a_named_python_comes_before_a_venv(tmp_path: Path) -> None:
    venv(tmp_path, "vllm")
    assert process.find_peers([f"vllm={sys.executable}"], tmp_path, "vllm") == ({"vllm": sys.executable}, [])


@pytest.mark.parametrize(
    ("named", "only", "said"),
    [
        (["tgi=python"], None, "NAME=PYTHON with a name of: openvino"),
        (["vllm"], None, "NAME=PYTHON"),
        (["vllm=/no/python"], None, "'/no/python' is no Python"),
        ([], "tgi", "--only names 'tgi'"),
        ([], "vllm", "peer vllm is not there"),
    ],
)
def test_a_peer_that_cannot_be_is_refused_by_name(
    tmp_path: Path, named: list[str], only: str | None, said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        process.find_peers(named, tmp_path, only)


def test_no_peers_can_be_asked_for(tmp_path: Path) -> None:
    assert process.find_peers([], tmp_path, "") == ({}, [])


def test_an_engine_that_fails_once_answers_the_next_line() -> None:
    out = io.StringIO()
    runner.answer(["nothing\n", json.dumps({"x": 1})], out, lambda given: {"seconds": given["x"]})
    first, second = map(json.loads, out.getvalue().splitlines())
    assert "JSONDecodeError" in first["error"]
    assert second == {"seconds": 1}


def test_a_process_is_asked_line_by_line_and_its_failure_is_told() -> None:
    engine = process.EngineProcess("echo", [sys.executable, "-c", ECHO])
    try:
        assert engine.start()["version"] == "7"
        assert engine.ask({"tokens": 1}) == {"seconds": 2.0}
        with pytest.raises(SystemExit, match="echo failed: no"):
            engine.ask({"fail": 1})
        with pytest.raises(SystemExit, match="echo failed: it ended: enough"):
            engine.ask({"end": 1})
    finally:
        engine.close()


def test_an_engine_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    engine = process.EngineProcess("gone", [sys.executable, "-c", "import sys; sys.exit('no such wheel')"])
    try:
        assert engine.start() is None
    finally:
        engine.close()
    assert "gone did not start: no such wheel" in capsys.readouterr().err


def test_layers_that_only_project_and_the_last_one_are_not_counted() -> None:
    rows = torch.tensor([1, 3])
    assert work.counted_layers(Pass(range(2), rows, stop="qkv"), 4) == [(2, 6)]
    assert work.counted_layers(Pass(range(1, 4), rows), 4) == [(2, 6)] * 2
    assert work.counted_layers(Pass(range(4), rows, observe="attention"), 4) == [(2, 6)] * 4


def test_stages_are_timed_within_the_clock_only_and_inner_ones_count_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Engine:
        def outer(self) -> None:
            self.inner()

        def inner(self) -> None:
            pass

    before = Engine.outer
    monkeypatch.setattr(clock, "STAGES", [*clock.STAGES, (Engine, "outer", "a"), (Engine, "inner", "b")])
    with clock.StageClock() as running:
        Engine().outer()
        seconds = dict(running.seconds)
    assert set(seconds) == {"a", "b"}
    assert Engine.outer is before
    Engine().outer()
    assert dict(running.seconds) == seconds


def test_operations_of_a_layer_are_those_of_its_matrices() -> None:
    config = tiny_config()
    h, d, q, kv = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    weights = h * (q + 2 * kv) * d + q * d * h + 3 * h * config.intermediate_size
    assert stages.layer_flops(config) == 2 * weights
    bound = stages.bound_of(config, [(2, 10), (2, 10)], {2: 4.0}, 8.0)
    assert bound == {"gemm": 2 * weights * 2 * 2 / 4.0, "attention": 2 * 4 * q * d * 10 / 8.0}


def test_the_fit_finds_both_terms_and_its_largest_error() -> None:
    tokens = [1000.0, 2000.0, 4000.0]
    a, b, error = scaling.fit_quadratic(tokens, [2 * n + 0.5 * n * n for n in tokens])
    assert a == pytest.approx(2.0)
    assert b == pytest.approx(0.5)
    assert error < 1e-9
    assert scaling.fit_quadratic(tokens, [1.0, 9.0, 3.0])[2] > 0.1
