"""scripts/gpu_check.py on the CPU: it passes, says so to people and machines, and notices a wrong backend."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvblend.engine.attention.sdpa import SdpaBackend, SdpaPlan

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_json(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = script.main(["--quick", "--device", "cpu", "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_it_runs_from_anywhere_as_a_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--device", "cpu"],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "checks passed" in done.stdout.splitlines()[-1]


def test_every_check_passes_on_a_cpu(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(script, capsys)
    assert (status, found["ok"]) == (0, True)
    assert found["xformers"] == "xformers has no operator for device 'cpu'"
    names = {check["name"] for check in found["checks"]}
    shown = {"scattered rows", "scattered rows, window", "ratio 1.0: logits", "ratio 1.0: keys", "ratio 1.0: values"}
    assert shown <= names
    pool = next(check for check in found["checks"] if check["name"] == "device pool")
    assert pool["error"] == 0.0
    assert found["timings_ms"]["sdpa blend@0.15, device pool"] > 0.0


class FutureSeeing(SdpaBackend):
    """Sees every key of its tile."""

    def prepare(
        self, positions: torch.Tensor, device: torch.device, dtype: torch.dtype, window: int | None = None
    ) -> SdpaPlan:
        plan = super().prepare(positions, device, dtype, window)
        for tile in plan.tiles:
            if tile.mask is not None:
                tile.mask.fill_(True)
        return plan


def test_a_wrong_mask_is_noticed(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SdpaBackend", FutureSeeing)
    status, found = run_json(script, capsys)
    failed = {check["name"] for check in found["checks"] if not check["ok"]}
    assert status == 1
    assert {"scattered rows", "ratio 1.0: logits"} <= failed


def test_an_output_that_is_no_number_is_an_error(script: ModuleType) -> None:
    assert script.relative_error(torch.tensor([torch.nan]), torch.ones(1)) == script.NO_NUMBER


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none_is_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--quick", "--device", "cuda"]) == 2
    assert "available: cpu" in capsys.readouterr().err
