from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvblend.engine.evaluation import opening
from kvblend.engine.evaluation.methods import plan_runs
from kvblend.engine.evaluation.opening import open_model
from kvblend.engine.loaders import load
from kvblend.engine.loaders.load import load_model
from kvblend.engine.selectors.spec import BadSelection

CPU = torch.device("cpu")


def test_a_model_is_opened_as_it_is_served(llama_dir: Path) -> None:
    opened = open_model(llama_dir, "float32", "cpu", 0, plan_runs(), lambda: 0.0)
    assert opened.fingerprint == load_model(llama_dir, torch.float32, CPU).fingerprint
    assert opened.threads == torch.get_num_threads()
    assert "scaled_dot_product_attention" in opened.attention


def test_the_number_of_threads_is_set(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    open_model(llama_dir, "float32", "cpu", 3, [], lambda: 0.0)
    assert seen == [3]


def test_layers_that_the_model_lacks_are_named_before_weights_are_read(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(load, "build_weights", fail)
    runs = plan_runs(["divergence,check_layers=7"])
    with pytest.raises(BadSelection, match=r"check_layers is \(7,\); the model has layers 0\.\.2"):
        open_model(llama_dir, "float32", "cpu", 0, runs, lambda: 0.0)


@pytest.mark.parametrize(("dtype", "device"), [("float8", "cpu"), ("float32", "nowhere")])
def test_what_torch_does_not_have_is_refused(llama_dir: Path, dtype: str, device: str) -> None:
    with pytest.raises(ValueError, match=r"float8|nowhere"):
        opening.open_model(llama_dir, dtype, device, 0, [], lambda: 0.0)
