"""Makes `tests.api.scripted` importable: test folders are no packages under pytest's importlib mode."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def load_beside(file: Path, name: str) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


load_beside(Path(__file__).parent.parent / "api" / "scripted.py", "tests.api.scripted")


@pytest.fixture(autouse=True)
def no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
