from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvblend.cli.app import app


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from kvblend.__main__ import main\n"
        "sys.argv = ['kvblend', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = ('torch', 'numpy', 'starlette', 'uvicorn', 'websockets', 'kvblend.engine', 'kvblend.actors')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("pull", "serve", "ingest", "ask", "demo"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["pull", "serve", "ingest", "ask", "demo"])
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert (result.exit_code, "Usage" in result.stdout) == (0, True)
