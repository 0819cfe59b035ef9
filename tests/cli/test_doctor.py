"""`kvblend doctor`: a sound model passes, a poor one fails with exit code 1, and both say why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_files import save_llama
from typer.testing import CliRunner, Result

from kvblend.cli.app import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("doctor"), max_position_embeddings=4096)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_a_model_within_the_limit_passes_and_the_environment_is_named(model: Path) -> None:
    result = invoke("--model", model, "--gate-kl-max", "1000", "--json")
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields["passed"] is True
    assert [check["name"] for check in fields["checks"]] == [
        "layer0_parity",
        "prefix",
        "scattered_rows",
        "ratio_one",
        "store_dtype",
        "kl_mean",
    ]
    around = fields["environment"]
    assert around["store_dtype"].startswith("bfloat16 (auto: mean KL of plain reuse of KV stored as bfloat16")
    assert {"torch", "threads", "attention", "dtype", "OMP_WAIT_POLICY"} <= set(around)
    assert around["dtype"] == "float32"


def test_a_model_above_the_limit_fails_with_exit_code_1_and_a_table(model: Path) -> None:
    result = invoke("--model", model, "--gate-kl-max", "0", "--recompute-ratio", "0.05")
    assert result.exit_code == 1
    assert "kl_mean" in result.stdout
    assert "failed" in result.stdout
    assert "divergence at 0.05" in result.stdout
    assert "full prefill, unless force_blend is set" in result.stdout


def test_a_store_dtype_that_was_asked_for_is_judged_and_may_fail(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvblend.engine.evaluation.gate.STORE_KL_MAX", 0.0)
    result = invoke("--model", model, "--gate-kl-max", "1000", "--store-dtype", "int8", "--json")
    assert result.exit_code == 1
    fields = json.loads(result.stdout)
    (check,) = [check for check in fields["checks"] if not check["passed"]]
    assert check["name"] == "store_dtype"
    assert fields["environment"]["store_dtype"] == "int8 (int8: set)"


def test_auto_falls_back_without_failing_the_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvblend.engine.evaluation.gate.STORE_KL_MAX", 0.0)
    result = invoke("--model", model, "--gate-kl-max", "1000", "--json")
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields["environment"]["store_dtype"].startswith("float32 (auto: mean KL")
    assert "store_dtype" not in [check["name"] for check in fields["checks"]]


def test_a_model_with_a_short_context_cannot_be_judged(tmp_path: Path) -> None:
    result = invoke("--model", save_llama(tmp_path, max_position_embeddings=512), "--json")
    assert result.exit_code == 1
    (check,) = json.loads(result.stdout)["checks"]
    assert (check["name"], check["passed"], check["value"]) == ("probes", False, None)
    assert "context of 512" in check["reason"]
