"""Makes `tests.api.scripted` importable: test folders are no packages under pytest's importlib mode. No proxies."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
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


load_beside(Path(__file__).parent / "scripted.py", "tests.api.scripted")


@pytest.fixture(scope="session", autouse=True)
def loopback_without_proxy() -> Iterator[None]:
    """Clients here, and in processes that a test starts, would ask the user's HTTP_PROXY even for 127.0.0.1."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        yield
