"""A `kvblend serve` of our own in another process, stopped on the way out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import IO

from kvblend.cli.failures import CommandError
from kvblend.cli.serve import LISTENING

STOP_S = 20.0
_SHOWN_LINES = 5


def serve_command(model: str, store: str) -> list[str]:
    """The command of a server with this model and store on a free port."""
    return [sys.executable, "-m", "kvblend", "serve", "--model", model, "--store", store, "--port", "0"]


@contextlib.asynccontextmanager
async def running_server(command: Sequence[str], start_s: float = 300.0) -> AsyncIterator[str]:
    """The URL of a server started with this command.

    CommandError with the server's last words if it ends, or says nothing for `start_s` seconds, before it listens.
    """
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
        try:
            url = await _wait_for_address(process, start_s)
            if url is None:
                raise CommandError(f"the server did not start: {await asyncio.to_thread(_last_words, log)}")
            yield url
        finally:
            await _stop(process)


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return " | ".join(lines[-_SHOWN_LINES:]) or "it said nothing"


async def _wait_for_address(process: asyncio.subprocess.Process, start_s: float) -> str | None:
    if process.stdout is None:
        raise CommandError("the server's output cannot be read")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(start_s):
            async for line in process.stdout:
                text = line.decode(errors="replace").strip()
                if text.startswith(LISTENING):
                    return text.removeprefix(LISTENING)
    return None


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.communicate()
        except TimeoutError:
            process.kill()
    await process.communicate()
