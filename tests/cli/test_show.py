from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvblend.cli.config.fields import Field, known_fields
from kvblend.cli.config.given import Given
from kvblend.cli.config.layers import resolve
from kvblend.cli.config.show import HIDDEN, show_check, show_configuration, shown_value


def test_json_has_every_setting_with_value_and_source(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    show_configuration(resolve({"port": Given(1, "flag", "--port")}, environ={"KVBLEND_SINKS": "4"}), as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert set(shown["settings"]) == set(known_fields())
    assert shown["settings"]["port"] == {"value": 1, "source": "flag --port"}
    assert shown["settings"]["sinks"] == {"value": 4, "source": "environment KVBLEND_SINKS"}
    assert shown["settings"]["store"] == {"value": str(cache / "store"), "source": "default"}
    assert shown["settings"]["check_layers"] == {"value": [1], "source": "default"}


def test_the_table_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    show_configuration(resolve({"system": Given("[bold]x" * 30, "flag", "--system")}, environ={}), as_json=False)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(known_fields()) <= set(lines)
    assert "[bold]x[bold]x" in lines["system"]
    assert "flag --system" in lines["system"]


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    environ = {"KVBLEND_SALT": "hunter2", "KVBLEND_REMOTE": "redis://me:hun@ter3@h:1/0"}
    show_configuration(resolve({}, environ=environ), as_json=as_json)
    out = capsys.readouterr().out
    assert HIDDEN in out
    assert "redis://***@h:1/0" in out
    assert "hunter2" not in out
    assert "ter3" not in out


def test_an_empty_secret_is_shown_as_empty() -> None:
    assert shown_value(Field("salt", object, str, ""), "") == ""


def test_a_sound_file_is_said_to_be_sound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "l.yaml").write_text("chunk_size: 256\nblend_min_tokens: 1\n")
    show_check(tmp_path / "l.yaml", lmcache=True)
    note, said = capsys.readouterr().out.splitlines()
    assert "line 1: chunk_size is set aside" in note
    assert said.endswith("is sound and sets blend_min_tokens")
