"""A real browser for tests: headless Chromium of Debian's packages, found or installed.

As a pytest plugin it brings the fixture `chromium`, the path of its program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

BINARIES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# the first is the smaller one: no window, no drivers of a screen
PACKAGES = ("chromium-headless-shell", "chromium")
# for all of the installation: the test that waits for it has less time than three runs of apt-get may take
INSTALL_S = 300.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--remote-debugging-port=0", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-proxy-server",
)  # fmt: skip


def find_browser() -> str | None:
    """The path of an installed browser."""
    return next(filter(None, map(shutil.which, BINARIES)), None)


def install_browser() -> None:
    """Install Debian's package if this is root on a machine with apt-get. Says loudly what it does."""
    if os.geteuid() or not shutil.which("apt-get"):
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    due = time.monotonic() + INSTALL_S
    installs = (["install", "-y", "--no-install-recommends", package] for package in PACKAGES)
    for arguments in (["update"], *installs):
        if (left_s := due - time.monotonic()) <= 0:
            return
        command = ["apt-get", "-o", "DPkg::Lock::Timeout=60", *arguments]
        print(f"\n*** the tests need a browser: apt-get {' '.join(arguments)} ***", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=left_s, check=False)
        if find_browser():
            return


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's program; skips, or fails in CI, where there is none and none can be installed."""
    if find_browser() is None:
        install_browser()
    found = find_browser()
    if found is None:
        reason = "no Chromium is installed, and it could not be installed here"
        print(f"\n*** {reason}: no browser's WebSocket is tested ***", file=sys.stderr, flush=True)
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


@contextlib.asynccontextmanager
async def browsing(program: str, url: str, profile: Path) -> AsyncIterator[None]:
    """While inside, the browser shows this page."""
    command = [program, *FLAGS, f"--user-data-dir={profile}", url]
    quiet = asyncio.subprocess.DEVNULL
    # Debian's program is a script that starts the browser, which starts others: they end together
    process = await asyncio.create_subprocess_exec(
        *command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
