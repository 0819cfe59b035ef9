"""`kvblend serve`: a system of this process behind the WebSocket server."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

import typer

from kvblend.cli.loops import run
from kvblend.cli.models import resolve_model

if TYPE_CHECKING:
    from kvblend.actors.settings import Settings

LISTENING = "listening on "


def serve_here(settings: Settings, host: str, port: int, origins: Collection[str], drain_grace_s: float) -> int:
    """Serve until a signal; the exit code. Prints one line with the address once requests are taken."""
    from kvblend.actors.system import System
    from kvblend.api.server.limits import ApiLimits
    from kvblend.api.server.serve import serve

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    name, path = resolve_model(settings.model)

    async def main() -> int:
        system = await System.start(settings, path, name)
        try:
            limits = ApiLimits(drain_grace_s=drain_grace_s)
            return await serve(system, host, port, limits=limits, origins=origins, on_listening=announce)
        finally:
            await system.close()

    return run(main())


def announce(host: str, port: int) -> None:
    """Print the one line scripts wait for."""
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"{LISTENING}ws://{shown}:{port}/v1/responses")
