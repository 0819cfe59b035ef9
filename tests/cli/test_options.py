"""Options that commands share: the same names everywhere."""

from __future__ import annotations

import pytest
import typer.main

from kvblend.actors.messages import SelectionOptions
from kvblend.actors.settings import Settings
from kvblend.cli.app import app
from kvblend.cli.options import SETTING_OPTIONS


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_shared_options_have_one_name_in_all_commands(command: str) -> None:
    group = typer.main.get_command(app)
    options = {name for parameter in group.commands[command].params for name in parameter.opts}  # type: ignore[attr-defined]
    assert {"--model", "--dtype", "--threads", "--device", "--attention", "--recompute-ratio"} <= options
    assert {"--conditioning", "--blend", "--gate-kl-max"} <= options


def test_every_setting_is_a_flag_of_serve_or_a_blend_option() -> None:
    # the texts that `warm_text` may hold come from a file: `--conditioning warm:FILE`
    others = {*SelectionOptions.names(), "warm_text", "debug"}
    assert set(Settings.names()) - others <= set(SETTING_OPTIONS)
