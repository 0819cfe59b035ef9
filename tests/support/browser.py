"""A real browser for tests: headless Chromium of Debian's packages, found or installed.

As a pytest plugin it brings the fixture `chromium`, the path of its program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from needed import find_program, install_program, need_program

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
    return find_program(BINARIES)


def install_browser() -> None:
    """Install Debian's package."""
    install_program("a browser", PACKAGES, find_browser, INSTALL_S)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's program; skips, or fails in CI, where there is none and none can be installed."""
    missing = "no Chromium is installed"
    return need_program(find_browser, install_browser, missing, "no browser's WebSocket is tested")


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
