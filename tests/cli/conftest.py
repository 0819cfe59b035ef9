"""Makes `tests.api.scripted` importable: test folders are no packages under pytest's importlib mode."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from beside import load_beside

from kvblend.engine import assembly

load_beside(Path(__file__).parent.parent / "api" / "scripted.py", "tests.api.scripted")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("KVBLEND_", "LMCACHE_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("kvblend")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before
    root.setLevel(before[1])


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


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three questions over three documents."""
    texts = ("the river and the mill", "the wheel turned all night", "the water rose")
    contexts = [{"title": f"T{i}", "text": text} for i, text in enumerate(texts)]
    questions = [{"ctxs": contexts[i:] + contexts[:i], "question": f"what {i}?", "answers": ["mill"]} for i in range(3)]
    file = tmp_path / "data.json"
    file.write_text(json.dumps(questions))
    return file


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(assembly, "load_model", fail)
