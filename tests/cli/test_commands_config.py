from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvblend.cli.app import app


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["config", *map(str, arguments)])


def test_show_takes_the_flags_of_serve_and_both_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("threads = 1\nsinks = 3\n")
    (tmp_path / "l.yaml").write_text("chunk_size: 256\nblend_min_tokens: 7\n")
    files = ("--config", tmp_path / "a.toml", "--lmcache-config", tmp_path / "l.yaml")
    result = invoke("show", "--json", "--threads", 2, "--blend", "span=4", "--no-force-blend", *files)
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)["settings"]
    assert [shown[name]["value"] for name in ("threads", "sinks", "span", "blend_min_tokens")] == [2, 3, 4, 7]
    assert shown["span"]["source"] == "flag --blend span"
    assert shown["force_blend"] == {"value": False, "source": "flag --no-force-blend"}
    assert "note: " in result.stderr


def test_show_refuses_what_serve_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_THREADS", "x")
    result = invoke("show")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: KVBLEND_THREADS must be a whole number; it is 'x'\n"


def test_check_passes_a_sound_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("port: 1\n")
    result = invoke("check", tmp_path / "a.yaml")
    assert (result.exit_code, "is sound and sets port" in result.stdout) == (0, True)


def test_check_says_all_that_is_wrong_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("prot = 1\nthreads = 'x'\n")
    result = invoke("check", tmp_path / "a.toml")
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert "line 1: prot is not a known setting; did you mean port?" in first
    assert second.startswith("error: ")
    assert "line 2: threads must be a whole number" in second


def test_check_reads_the_names_of_lmcache(tmp_path: Path) -> None:
    (tmp_path / "l.yaml").write_text("enable_sparse: true\n")
    result = invoke("check", "--lmcache", tmp_path / "l.yaml")
    assert result.exit_code == 2
    assert "line 1: enable_sparse is true" in result.stderr
