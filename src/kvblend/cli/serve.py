"""`kvblend serve`: a system of this process behind the WebSocket server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvblend.cli.logs import set_up_logs
from kvblend.cli.loops import run
from kvblend.cli.models import resolve_model

if TYPE_CHECKING:
    from kvblend.cli.config.layers import Configuration

LISTENING = "listening on "


def serve_here(configuration: Configuration) -> int:
    """Serve until a signal; the exit code. Prints one line with the address once requests are taken."""
    from kvblend.actors.system import System
    from kvblend.api.server.serve import serve

    settings, server, limits = configuration.settings, configuration.server, configuration.limits
    set_up_logs(server.log_format, server.log_level)
    name, path = resolve_model(settings.model)

    async def main() -> int:
        system = await System.start(settings, path, name)
        try:
            return await serve(
                system, server.host, server.port, limits=limits, origins=server.allow_origin, on_listening=announce
            )
        finally:
            await system.close()

    return run(main())


def announce(host: str, port: int) -> None:
    """Print the one line scripts wait for."""
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"{LISTENING}ws://{shown}:{port}/v1/responses")
