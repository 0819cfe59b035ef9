"""What a command can fail with: one clear line on stderr and an exit code, never a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """A command could not do its work: `message` is the line shown, `exit_code` the process's status."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadInput(CommandError):
    """What the user gave is wrong; nothing was started."""

    exit_code = 2
