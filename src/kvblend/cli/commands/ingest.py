"""`kvblend ingest`: its flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvblend.cli.failures import BadInput
from kvblend.cli.flags import Flags, with_settings
from kvblend.cli.options import SystemOption, UrlOption
from kvblend.cli.reporting import reported


@reported
@with_settings(
    *("model", "store", "remote", "conditioning", "echo", "dtype", "store_dtype", "threads", "device", "attention")
)
def ingest(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="UTF-8 text files, one chunk each.")],
    given: Flags,
    url: UrlOption = None,
    system: SystemOption = None,
    condition_on: Annotated[
        str | None,
        typer.Option(metavar="neighbours:K", help="Compute each chunk behind the K files most like it, K in 1..8."),
    ] = None,
) -> None:
    """Compute and store the KV of text files; returns when it is durable."""
    given.check_remote(url)
    from kvblend.cli.ingest import ingest_here, ingest_on_server
    from kvblend.cli.inputs import read_condition_on

    neighbours = read_condition_on(condition_on)
    if neighbours and given.value("conditioning") not in (None, "neighbours"):
        kind = given.value("conditioning")
        raise BadInput(f"--condition-on goes with --conditioning neighbours; --conditioning is {kind!r}")
    if url is not None:
        ingest_on_server(url, given.value("model"), files, system, neighbours)
        return
    # nothing is blended: the model need not be judged
    settings = replace(given.resolve().settings, gate="off")
    if neighbours:
        settings = replace(settings, conditioning="neighbours")
    ingest_here(settings, files, system, neighbours)
