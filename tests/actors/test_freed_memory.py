"""Freed memory that the process keeps; in processes of their own, since it is set for a whole one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from small_system import running

from kvblend.actors.runtime import freed_memory

LARGE_BYTES, TIMES = 48 << 20, 6
# a thread, because the engine computes in one; bytes that are written, because only those are faulted in
FAULTS = f"""
import resource
from concurrent.futures import ThreadPoolExecutor
from kvblend.actors.runtime.freed_memory import keep_freed_memory

def use():
    b"x" * {LARGE_BYTES}

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

%s
with ThreadPoolExecutor(1) as pool:
    pool.submit(use).result()
    before = faults()
    for _ in range({TIMES}):
        pool.submit(use).result()
    print(faults() - before)
"""
PAGES = TIMES * LARGE_BYTES // 4096
needs_glibc = pytest.mark.skipif(not freed_memory.has_glibc(), reason="this C library is not glibc: nothing to keep")


def faults(first: str) -> int:
    run = subprocess.run([sys.executable, "-c", FAULTS % first], capture_output=True, text=True, check=True)
    return int(run.stdout)


@needs_glibc
def test_a_large_piece_of_memory_is_faulted_in_once() -> None:
    assert faults("assert keep_freed_memory()") < PAGES // 20


@needs_glibc
def test_without_it_every_use_is_faulted_in() -> None:
    # large pages take fewer faults
    assert faults("") > PAGES // 20


@needs_glibc
def test_where_it_is_not_wanted_nothing_changes() -> None:
    assert faults("assert not keep_freed_memory(wanted=False)") > PAGES // 20


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_system_asks_for_it_as_it_is_set(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("kvblend.actors.system.keep_freed_memory", lambda *, wanted: asked.append(wanted))
    async with running(tiny_model_path, keep_freed_memory=wanted):
        pass
    assert asked == [wanted]


@needs_glibc
def test_it_may_be_set_twice() -> None:
    assert faults("assert keep_freed_memory() and keep_freed_memory()") < PAGES // 20


class OtherLibrary:
    """A C library without any name of glibc's."""


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: OtherLibrary())
    assert freed_memory.keep_freed_memory() is False


def test_a_system_that_cannot_be_asked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: object) -> None:
        raise TypeError("no handle of the own process")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert freed_memory.keep_freed_memory() is False
