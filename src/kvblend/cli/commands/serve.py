"""`kvblend serve`: its flags."""

from __future__ import annotations

import typer

from kvblend.cli.flags import Flags, with_settings
from kvblend.cli.options import SETTING_OPTIONS
from kvblend.cli.reporting import reported


@reported
@with_settings(*SETTING_OPTIONS)
def serve(given: Flags) -> None:
    """Serve a model over WebSocket until SIGTERM or Ctrl-C."""
    configuration = given.resolve()
    from kvblend.cli.serve import serve_here

    raise typer.Exit(serve_here(configuration))
