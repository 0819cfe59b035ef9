"""Options that commands share: the same names everywhere."""

from __future__ import annotations

import pytest
import typer.main

from kvblend.cli.app import app


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_shared_options_have_one_name_in_all_commands(command: str) -> None:
    group = typer.main.get_command(app)
    options = {name for parameter in group.commands[command].params for name in parameter.opts}  # type: ignore[attr-defined]
    assert {"--model", "--dtype", "--threads", "--device", "--attention", "--recompute-ratio"} <= options
    assert {"--conditioning", "--blend", "--gate-kl-max"} <= options
