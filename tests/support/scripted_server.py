"""A server over a scripted system in a process of its own: `python scripted_server.py`, or `scripted()`.

Prints its port, then serves until SIGTERM. What an uncaught mistake prints goes to its standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import logging
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import uvloop

LISTEN_S = 60.0


@dataclass
class Scripted:
    """The running process, its port, and what it has written to its standard error."""

    process: subprocess.Popen[bytes]
    port: int
    errors: Path

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=30)


@contextlib.contextmanager
def scripted(errors: Path, *flags: str) -> Iterator[Scripted]:
    """The server once it listens; killed on the way out if it still runs."""
    with errors.open("wb") as said:
        command = [sys.executable, __file__, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, stdin=subprocess.DEVNULL)
    try:
        yield Scripted(process, int(first_line(process.stdout)), errors)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def first_line(stdout: IO[bytes] | None, timeout_s: float = LISTEN_S) -> bytes:
    """The line with the port, empty if the server ended; TimeoutError if nothing was said in time."""
    if stdout is None:
        raise RuntimeError("the server has no output")
    # the line is written at once, so what is there is all of it
    if not select.select([stdout], [], [], timeout_s)[0]:
        raise TimeoutError(f"the server said no port in {timeout_s:g} s")
    return stdout.readline()


def _load_scripted() -> Any:
    file = Path(__file__).resolve().parent.parent / "api" / "scripted.py"
    spec = importlib.util.spec_from_file_location("tests.api.scripted", file)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{file} cannot be loaded")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _watch_lag(lags_ms: list[float]) -> None:
    """How late a timer of this loop is, every few milliseconds."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + 0.005
        await asyncio.sleep(0.005)
        lags_ms.append(max(0.0, loop.time() - due) * 1e3)


async def _main(interval_ms: float, tokens: int, lag_file: Path | None) -> int:
    from kvblend.api.server.limits import ApiLimits
    from kvblend.api.server.serve import serve

    def announce(_host: str, port: int) -> None:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()

    system = timed_system(interval_ms, tokens, time.monotonic_ns)
    limits = ApiLimits(drain_grace_s=1.0, close_grace_s=1.0, lanes_max=64)
    lags_ms: list[float] = []
    watching = asyncio.create_task(_watch_lag(lags_ms)) if lag_file is not None else None
    code = await serve(system, "127.0.0.1", 0, limits=limits, on_listening=announce)
    await system.close()
    if watching is not None and lag_file is not None:
        watching.cancel()
        await asyncio.to_thread(lag_file.write_text, json.dumps(lags_ms))
    return code


def timed_system(interval_ms: float, tokens: int, clock_ns: Callable[[], int]) -> Any:
    """A scripted system whose tokens are moments of this clock; with `interval_ms` 0 it says what tests expect."""
    from kvblend.actors.messages import Delta, Finished, Generate
    from kvblend.actors.streams import TokenStream

    rig = _load_scripted()

    async def emit(request: Generate, stream: TokenStream) -> None:
        """Each token is the moment that it was emitted at, in nanoseconds."""
        name, loop = request.request_id, asyncio.get_running_loop()
        # streams that begin together do not step together, as those of an engine do not
        due = loop.time() + interval_ms / 1e3 * random.random()
        for number in range(tokens):
            stream.push_nowait(Delta(name, f"{clock_ns()} ", (number,)))
            due += interval_ms / 1e3
            await asyncio.sleep(max(0.0, due - loop.time()))
        stream.push_nowait(Finished(name, "stop", rig.USAGE))

    class System(rig.ScriptedSystem):  # type: ignore[misc, name-defined]
        """Forgets what was asked of it: it runs for long."""

        async def submit(self, request: Generate) -> TokenStream:
            stream: TokenStream = await super().submit(request)
            self.requests.clear()
            for name in [name for name, one in self.streams.items() if one.ended]:
                del self.streams[name]
            for seen in (self.cancelled, self.abandoned):
                seen.clear()
            return stream

    return System(emit if interval_ms else rig.answer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--interval-ms", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--lag-file", type=Path, help="where to write how late the loop was")
    given = parser.parse_args()
    logging.basicConfig()
    # a client's mistakes are warnings
    logging.getLogger().handlers[0].setLevel(logging.ERROR)
    raise SystemExit(uvloop.run(_main(given.interval_ms, given.tokens, given.lag_file)))
