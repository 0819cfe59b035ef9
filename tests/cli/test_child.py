from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvblend.cli.child import running_server, serve_command
from kvblend.cli.failures import CommandError

LISTEN = "import os, sys, time; print('listening on ws://x', os.getpid(), flush=True); sys.stdin.read(); time.sleep(60)"


async def test_the_server_is_stopped_on_the_way_out() -> None:
    async with running_server([sys.executable, "-c", LISTEN]) as said:
        address, pid = said.split()
        assert address == "ws://x"
        os.kill(int(pid), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


async def test_a_server_that_fails_is_quoted() -> None:
    with pytest.raises(CommandError, match="did not start: no such model"):
        async with running_server([sys.executable, "-c", "raise SystemExit('no such model')"]):
            pass


async def test_a_server_that_says_nothing_is_given_up() -> None:
    with pytest.raises(CommandError, match="said nothing"):
        async with running_server([sys.executable, "-c", "import time; time.sleep(60)"], start_s=0.3):
            pass


def test_the_command_is_the_one_of_the_user(tmp_path: Path) -> None:
    command = serve_command("smollm2", str(tmp_path))
    assert command[1:4] == ["-m", "kvblend", "serve"]
    assert command[-2:] == ["--port", "0"]
