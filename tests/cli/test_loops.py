from __future__ import annotations

import asyncio
import sys

import pytest

from kvblend.cli.loops import run


async def loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_uvloop_is_used_where_it_is_installed() -> None:
    assert run(loop_module()).startswith("uvloop")


def test_asyncio_is_enough_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run(loop_module()).startswith("asyncio")
