from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvblend.cli.failures import BadInput
from kvblend.cli.flags import Flags, label_of, with_settings


def command_with(*names: str) -> tuple[typer.Typer, list[tuple[Flags, str]]]:
    seen: list[tuple[Flags, str]] = []
    app = typer.Typer()

    @app.command()
    @with_settings(*names)
    def run(given: Flags, other: Annotated[str, typer.Option()] = "x") -> None:
        """Does things."""
        seen.append((given, other))

    return app, seen


def test_only_what_was_typed_is_given() -> None:
    app, seen = command_with("model", "threads", "force_blend")
    result = CliRunner().invoke(app, ["--threads", "0", "--other", "y", "--config", "a.toml"])
    assert result.exit_code == 0, result.output
    ((given, other),) = seen
    assert {name: (one.value, one.label) for name, one in given.values.items()} == {"threads": (0, "--threads")}
    assert (other, given.config, given.lmcache_config, given.value("model")) == ("y", Path("a.toml"), None, None)


def test_a_command_has_no_flags_but_its_own() -> None:
    app, _ = command_with("model")
    assert CliRunner().invoke(app, ["--threads", "0"]).exit_code == 2


def test_blend_items_are_settings_too() -> None:
    app, seen = command_with("blend")
    CliRunner().invoke(app, ["--blend", "span=2", "--blend", "check_layers=1,2"])
    values = seen[0][0].values
    assert {one.label: one.value for one in values.values()} == {"--blend span": 2, "--blend check_layers": (1, 2)}


def test_a_setting_may_be_switched_off() -> None:
    app, seen = command_with("force_blend")
    CliRunner().invoke(app, ["--no-force-blend"])
    assert (seen[0][0].value("force_blend"), seen[0][0].values["force_blend"].label) == (False, "--no-force-blend")


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--threads", "1"], "--threads"), (["--config", "a.toml"], "--config")]
)
def test_local_flags_are_of_no_use_with_a_url(arguments: list[str], named: str) -> None:
    app, seen = command_with("model", "threads")
    CliRunner().invoke(app, ["--model", "m", *arguments])
    given = seen[0][0]
    given.check_remote(None)
    with pytest.raises(BadInput, match=f"{named} is of no use with --url"):
        given.check_remote("ws://h")


def test_a_model_may_be_asked_of_a_server() -> None:
    app, seen = command_with("model")
    CliRunner().invoke(app, ["--model", "m"])
    seen[0][0].check_remote("ws://h")


def test_resolving_says_what_is_set_aside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    assert Flags().resolve().settings.threads == 0
    assert capsys.readouterr().err.startswith("note: LMCACHE_CHUNK_SIZE is set aside")


def test_labels_are_flags() -> None:
    assert label_of("max_num_seqs") == "--max-num-seqs"
