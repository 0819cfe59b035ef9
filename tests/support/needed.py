"""Programs that tests need: found, or installed from Debian's packages by root, or missed loudly."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

INSTALL_LOCK = Path(tempfile.gettempdir()) / "kvblend-tests-install.lock"


def find_program(names: Sequence[str]) -> str | None:
    """The path of the first of these that is installed."""
    return next(filter(None, map(shutil.which, names)), None)


def install_program(
    what: str,
    packages: Sequence[str],
    find: Callable[[], str | None],
    budget_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Install the first package that brings what `find` finds, as root where there is apt-get; says so loudly.

    All runs together take `budget_s` seconds at most.
    """
    if os.geteuid() or not shutil.which("apt-get"):
        return
    settings = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", **(environment or {})}
    due = time.monotonic() + budget_s
    installs = (["install", "-y", "--no-install-recommends", package] for package in packages)
    with only_one_installs(due):
        for arguments in (["update"], *installs):
            if find() or (left_s := due - time.monotonic()) <= 0:
                return
            command = ["apt-get", "-o", "DPkg::Lock::Timeout=60", *arguments]
            print(f"\n*** the tests need {what}: apt-get {' '.join(arguments)} ***", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, env=settings, stdin=subprocess.DEVNULL, timeout=left_s, check=False)


@contextlib.contextmanager
def only_one_installs(due: float) -> Iterator[None]:
    """Wait while another process of the tests installs, until `due` (monotonic) at most: apt-get fails instead."""
    with INSTALL_LOCK.open("a") as lock:
        while time.monotonic() < due:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.2)
        yield


def need_program(find: Callable[[], str | None], install: Callable[[], None], missing: str, untested: str) -> str:
    """The program's path; skips, or fails in CI, where there is none and none can be installed."""
    if find() is None:
        install()
    found = find()
    if found is None:
        reason = f"{missing}, and it could not be installed here"
        print(f"\n*** {reason}: {untested} ***", file=sys.stderr, flush=True)
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found
