"""Turning errors into one line on stderr and an exit code."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec

import typer

from kvblend.cli.failures import CommandError

P = ParamSpec("P")


def explain(error: BaseException) -> tuple[str, int]:
    """The line to show for this error, and the exit code: 2 for bad input, 1 for everything else."""
    if isinstance(error, CommandError):
        return error.message, error.exit_code
    # by shape, not by class: importing the classes would load the client or the engine for every error
    status, message = getattr(error, "status", None), getattr(error, "message", None)
    if isinstance(status, int) and isinstance(message, str):
        return message, 2 if 400 <= status < 429 else 1
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("kvblend"):
        return f"{error.name} is not installed; this command needs: pip install 'kvblend[server]'", 1
    if isinstance(error, UnicodeDecodeError):
        return f"not valid UTF-8: {error.reason} at byte {error.start}", 2
    if isinstance(error, OSError):
        return str(error), 1
    if type(error).__module__.startswith("kvblend."):
        # a model that cannot be loaded is a ValueError of the engine; both are what the user pointed at
        given = isinstance(error, ValueError) or type(error).__name__ == "StoreUnusable"
        return str(error), 2 if given else 1
    return f"unexpected {type(error).__name__}: {error} (KVBLEND_DEBUG=1 shows where)", 1


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: errors become one line on stderr; Ctrl-C ends with 130."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            if os.environ.get("KVBLEND_DEBUG", "").lower() not in ("", "0", "false", "no", "off"):
                raise
            text, code = explain(error)
            for line in text.splitlines() or [""]:
                typer.echo(f"error: {line}", err=True)
            raise typer.Exit(code) from None

    return wrapper
