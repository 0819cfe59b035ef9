"""Makes `tests.api.scripted` importable: test folders are no packages under pytest's importlib mode."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvblend"


@pytest.fixture
def local_system(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Puts a scripted system where `kvblend.actors.system` is imported; the systems that were started."""
    from tests.api.scripted import ScriptedSystem

    started: list[Any] = []

    class System(ScriptedSystem):
        @classmethod
        async def start(cls, settings: Any, model_path: Path, model_name: str) -> System:
            system = cls()
            system.model = model_name
            started.append((system, settings, model_path))
            return system

    module = ModuleType("kvblend.actors.system")
    module.System = System  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvblend.actors.system", module)
    monkeypatch.delenv("KVBLEND_DEBUG", raising=False)
    return started


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Something that passes for a model until it is loaded."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder
