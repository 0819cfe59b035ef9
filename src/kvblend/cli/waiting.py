"""Saying what a command waits for, where that may take minutes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from kvblend.actors.system import System

# what the gate found earlier is read from the store's folder in less
QUIET_S = 0.5
JUDGING = "judging {model} before it is first served blended; the outcome is remembered (--gate off goes without)"


@contextlib.contextmanager
def told_while_judged(system: System) -> Iterator[None]:
    """While inside, a line on stderr says so if the request waits for the model's gate. Inside a loop."""
    console = Console(stderr=True)
    with contextlib.ExitStack() as shown:

        def tell() -> None:
            gate = system.ready().details.get("gate")
            if not isinstance(gate, dict) or gate.get("state") != "running":
                return
            text = JUDGING.format(model=system.model)
            if console.is_terminal:
                shown.enter_context(console.status(text))
            else:
                console.print(text, soft_wrap=True)

        timer = asyncio.get_running_loop().call_later(QUIET_S, tell)
        try:
            yield
        finally:
            timer.cancel()
