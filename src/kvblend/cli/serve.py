"""`kvblend serve`: a system of this process behind the WebSocket server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvblend.cli.failures import BadInput
from kvblend.cli.logs import set_up_logs
from kvblend.cli.loops import run
from kvblend.cli.models import resolve_model

if TYPE_CHECKING:
    from kvblend.api.server.keys import KeyRing
    from kvblend.cli.config.layers import Configuration

_log = logging.getLogger("kvblend.keys")
LISTENING = "listening on "


def serve_here(configuration: Configuration) -> int:
    """Serve until a signal; the exit code. Prints one line with the address once requests are taken."""
    from kvblend.actors.system import System
    from kvblend.api.server.rates import RateLimits
    from kvblend.api.server.serve import serve

    settings, server, limits = configuration.settings, configuration.server, configuration.limits
    set_up_logs(server.log_format, server.log_level)
    name, path = resolve_model(settings.model)
    ring = None if server.keys_file is None else open_ring(server.keys_file)
    if ring is None and not _is_loopback(server.host):
        _log.warning("no API keys are set: whoever can reach %s can ask, read and delete chunks", server.host)
    rates = RateLimits(server.requests_per_minute_max, server.requests_running_max)

    async def main() -> int:
        system = await System.start(settings, path, name)
        try:
            async with reloading(ring, server.keys_file):
                return await serve(
                    system,
                    server.host,
                    server.port,
                    limits=limits,
                    origins=server.allow_origin,
                    keys=ring,
                    rates=rates,
                    on_listening=announce,
                )
        finally:
            await system.close()

    return run(main())


def open_ring(path: Path) -> KeyRing:
    """The keys of a file. BadInput where it cannot be read or has none: then nobody could ever be served."""
    from kvblend.api.server.keys import KeyRing
    from kvblend.cli.key_file import read_key_file

    ring = KeyRing(read_key_file(path))
    if not len(ring):
        raise BadInput(f"{path} has no keys; make one: kvblend keys add NAME --keys-file {path}")
    return ring


async def reload_ring(ring: KeyRing, path: Path) -> None:
    """Read the keys anew; a file that cannot be read leaves them as they were."""
    from kvblend.cli.key_file import read_key_file

    try:
        ring.replace(await asyncio.to_thread(read_key_file, path))
    except BadInput as error:
        _log.error("the keys stay as they were: %s", error.message)
    else:
        _log.info("keys read anew: %d", len(ring))


@contextlib.asynccontextmanager
async def reloading(ring: KeyRing | None, path: Path | None) -> AsyncIterator[None]:
    """While inside, SIGHUP reads the keys anew, if there are any."""
    if ring is None or path is None or not hasattr(signal, "SIGHUP"):
        yield
        return
    asked = asyncio.Event()

    async def watch() -> None:
        while True:
            await asked.wait()
            asked.clear()
            await reload_ring(ring, path)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, asked.set)
    watching = loop.create_task(watch(), name="keys-reload")
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def announce(host: str, port: int) -> None:
    """Print the one line scripts wait for."""
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"{LISTENING}ws://{shown}:{port}/v1/responses")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
