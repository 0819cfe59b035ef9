"""Makes `tests.api.scripted` importable: test folders are no packages under pytest's importlib mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from beside import load_beside

load_beside(Path(__file__).parent.parent / "api" / "scripted.py", "tests.api.scripted")


@pytest.fixture(autouse=True)
def no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
