"""Makes `tests.api.scripted` importable: test folders are no packages under pytest's importlib mode. No proxies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from beside import load_beside

load_beside(Path(__file__).parent / "scripted.py", "tests.api.scripted")


@pytest.fixture(scope="session", autouse=True)
def loopback_without_proxy() -> Iterator[None]:
    """Clients here, and in processes that a test starts, would ask the user's HTTP_PROXY even for 127.0.0.1."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        yield
