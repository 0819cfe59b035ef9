"""A real `kvblend serve` over a tiny model in a process of its own, to be stopped or killed by a test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

LISTENING = "listening on "
# random weights have no quality that a gate could judge
FLAGS = ("--gate", "off", "--store-dtype", "float32", "--blend-min-tokens", "1", "--system", "be brief.")


@dataclass
class ServeProcess:
    """A running server: `url` is its WebSocket address. What it said is in `log`."""

    process: asyncio.subprocess.Process
    url: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].split("/")[0])

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for its end; its exit code."""
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvblend", *words]


@contextlib.asynccontextmanager
async def served(model: Path, store: Path, *flags: str) -> AsyncIterator[ServeProcess]:
    """The server once it listens; killed on the way out if it still runs."""
    log = store.parent / "serve.log"
    words = command("serve", "--model", str(model), "--store", str(store), "--port", "0", *FLAGS, *flags)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stderr=said, stdin=asyncio.subprocess.DEVNULL, env=environment
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(90):
            line = (await process.stdout.readline()).decode().strip()
        assert line.startswith(LISTENING), log.read_text()
        yield ServeProcess(process, line.removeprefix(LISTENING), log)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.communicate()


async def run(*words: str) -> tuple[int, str]:
    """`kvblend WORDS...` to its end: exit code and all output."""
    process = await asyncio.create_subprocess_exec(
        *command(*words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()
