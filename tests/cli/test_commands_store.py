"""`kvblend store` on folders of chunk files: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chunk_files import ChunkFile, flip_byte, make_store, write_old
from typer.testing import CliRunner, Result

from kvblend.cli.app import app
from kvblend.store.root import claim_root, release_root

ONE, TWO = ChunkFile.make(1, tokens=5), ChunkFile.make(2, tokens=7, fingerprint="model-b", salt="ann")
COMMANDS = ("stats", "list", "check", "evict", "clear", "export", "import")


def invoke(command: str, root: Path, *arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["store", command, "--store", str(root), *map(str, arguments)], input=stdin)


def fields(command: str, root: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    result = invoke(command, root, *arguments, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store", ONE, TWO)


@pytest.fixture
def in_use(root: Path) -> Iterator[Path]:
    lock = claim_root(root)
    yield root
    release_root(lock)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(app, ["store", command, "--help"])
    assert (result.exit_code, "--store" in result.stdout, "--json" in result.stdout) == (0, True, True)


def test_no_command_loads_a_model(root: Path) -> None:
    code = (
        "import sys\nfrom kvblend.__main__ import main\n"
        f"sys.argv = ['kvblend', 'store', 'check', '--store', {str(root)!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'kvblend.engine', 'kvblend.actors') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_stats_count_by_model_and_tenant(root: Path) -> None:
    found = fields("stats", root)
    assert (found["chunks"], found["tokens"], found["bytes"]) == (2, 12, len(ONE.raw) + len(TWO.raw))
    assert [(row["fingerprint"], row["layers"], row["dtype"], row["chunks"]) for row in found["models"]] == [
        ("model-a", 3, "float32", 1),
        ("model-b", 3, "float32", 1),
    ]
    assert ("-", 5) in [(row["tenant"], row["tokens"]) for row in found["tenants"]]


def test_stats_and_list_run_beside_a_server(in_use: Path) -> None:
    assert fields("stats", in_use)["chunks"] == 2
    assert len(fields("list", in_use)["chunks"]) == 2


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("check", ()), ("evict", ("--to-bytes", 0)), ("clear", ("--yes",)), ("export", ("a.tar",))],
)
def test_whatever_changes_or_moves_chunks_is_refused_beside_a_server(
    in_use: Path, monkeypatch: pytest.MonkeyPatch, command: str, arguments: tuple[object, ...]
) -> None:
    monkeypatch.chdir(in_use.parent)
    result = invoke(command, in_use, *arguments)
    assert (result.exit_code, "in use by another process" in result.stderr) == (2, True)
    assert ONE.path(in_use).exists()


def test_stats_are_a_table_by_default(root: Path) -> None:
    result = invoke("stats", root)
    assert "model-b" in result.stdout
    assert "ann" not in result.stdout


def test_list_shows_each_chunk_without_its_salt(root: Path) -> None:
    rows = {row["id"]: row for row in fields("list", root)["chunks"]}
    assert (rows[TWO.key.id]["tokens"], rows[TWO.key.id]["bytes"]) == (7, len(TWO.raw))
    assert (rows[ONE.key.id]["tenant"], len(rows[TWO.key.id]["tenant"])) == ("-", 12)


def test_list_takes_a_tag_that_it_showed(root: Path) -> None:
    tag = next(row["tenant"] for row in fields("list", root)["chunks"] if row["id"] == TWO.key.id)
    assert [row["id"] for row in fields("list", root, "--tenant", tag)["chunks"]] == [TWO.key.id]


def test_list_prints_a_line_for_each_chunk(root: Path) -> None:
    lines = invoke("list", root).stdout.splitlines()
    assert {line.split()[0] for line in lines} == {ONE.key.id, TWO.key.id}


def test_old_chunks_are_named_and_counted(root: Path) -> None:
    path = write_old(root, ChunkFile.make(3))
    reason = "it is of format version 1 and holds a salt in clear; its chunk has another id by now"
    named = [{"file": str(path), "version": 1, "reason": reason}]
    found = fields("stats", root)
    assert (found["chunks"], found["old"], found["old_files"]) == (2, 1, named)
    checked = fields("check", root)
    assert (checked["old"], checked["old_removed"]) == (named, False)
    assert f"{path}: it is of format version 1" in invoke("stats", root).stdout
    assert f"{path}: it is of format version 1" in invoke("check", root).stdout


def test_few_of_many_old_chunks_are_shown(root: Path) -> None:
    for number in range(3, 16):
        write_old(root, ChunkFile.make(number))
    shown = invoke("stats", root).stdout
    assert shown.count("old  /") == 10
    assert "13 old files are never read" in shown


def test_old_chunks_are_removed_when_that_is_asked_for(root: Path) -> None:
    path = write_old(root, ChunkFile.make(3))
    assert fields("check", root, "--remove-old")["old_removed"] is True
    assert not path.exists()
    assert fields("stats", root)["old_files"] == []


def test_a_clean_check_exits_with_0(root: Path) -> None:
    result = invoke("check", root)
    assert (result.exit_code, "2 chunks are whole" in result.stdout) == (0, True)


def test_damage_found_exits_with_1_and_names_the_file(root: Path) -> None:
    flip_byte(ONE.path(root), 4096)
    found = fields("check", root, code=1)
    assert found["damaged"] == [{"file": str(ONE.path(root)), "reason": "the checksum of layer 0 does not match"}]
    assert ONE.path(root).exists()


def test_damage_repaired_exits_with_0(root: Path) -> None:
    flip_byte(ONE.path(root), 4096)
    result = invoke("check", root, "--repair")
    assert (result.exit_code, "set aside" in result.stdout) == (0, True)
    aside = fields("stats", root)
    assert (aside["set_aside"], aside["set_aside_bytes"]) == (
        1,
        (root / "damaged" / f"{ONE.key.id}.kvc").stat().st_size,
    )


def test_evicting_needs_to_know_what(root: Path) -> None:
    result = invoke("evict", root)
    assert (result.exit_code, "say which chunks" in result.stderr) == (2, True)


def test_evicting_to_a_size(root: Path) -> None:
    found = fields("evict", root, "--to-bytes", len(TWO.raw))
    assert (found["chunks"], found["chunks_left"]) == (1, 1)


def test_evicting_a_tenant(root: Path) -> None:
    fields("evict", root, "--tenant", "ann")
    assert [row["id"] for row in fields("list", root)["chunks"]] == [ONE.key.id]


def test_evicting_the_empty_tenant_only(root: Path) -> None:
    fields("evict", root, "--tenant", "")
    assert [row["id"] for row in fields("list", root)["chunks"]] == [TWO.key.id]


def test_evicting_what_is_old(root: Path) -> None:
    yesterday = time.time() - 86400
    os.utime(ONE.path(root), (yesterday, yesterday))
    assert fields("evict", root, "--older-than", "12h")["chunks"] == 1
    assert not ONE.path(root).exists()


@pytest.mark.parametrize("value", ["", "12", "h", "-3h", "1.5h", "2w", "1e3s"])
def test_a_duration_must_be_one(root: Path, value: str) -> None:
    result = invoke("evict", root, "--older-than", value, "--to-bytes", 0)
    assert (result.exit_code, "--older-than is" in result.stderr) == (2, True)


def test_a_negative_size_is_bad_input(root: Path) -> None:
    result = invoke("evict", root, "--to-bytes=-1")
    assert (result.exit_code, "--to-bytes is -1" in result.stderr) == (2, True)


@pytest.mark.parametrize("chunk_id", ["../../etc/passwd", "0" * 64, "a/b"])
def test_an_id_that_is_not_stored_is_bad_input(root: Path, chunk_id: str) -> None:
    result = invoke("evict", root, "--id", chunk_id)
    assert (result.exit_code, "is not that of a stored chunk" in result.stderr) == (2, True)


def test_clearing_wants_a_yes(root: Path) -> None:
    result = invoke("clear", root)
    assert (result.exit_code, "give --yes" in result.stderr) == (2, True)
    assert ONE.path(root).exists()


def test_clearing_with_a_yes(root: Path) -> None:
    assert fields("clear", root, "--yes")["chunks"] == 2
    assert fields("stats", root)["chunks"] == 0


def test_export_and_import_again(root: Path, tmp_path: Path) -> None:
    assert fields("export", root, tmp_path / "a.tar")["chunks"] == 2
    assert fields("import", tmp_path / "new", tmp_path / "a.tar")["stored"] == 2
    assert fields("import", tmp_path / "new", tmp_path / "a.tar")["present"] == 2
    assert fields("check", tmp_path / "new")["chunks"] == 2


def test_an_export_with_damage_exits_with_1(root: Path, tmp_path: Path) -> None:
    flip_byte(ONE.path(root), 4096)
    result = invoke("export", root, tmp_path / "a.tar")
    assert (result.exit_code, ONE.key.id in result.stdout) == (1, True)


def test_an_import_with_refusals_exits_with_1(root: Path, tmp_path: Path) -> None:
    fields("export", root, tmp_path / "a.tar")
    flip_byte(tmp_path / "a.tar", 512 + 4096)
    result = invoke("import", tmp_path / "new", tmp_path / "a.tar")
    assert (result.exit_code, "refused" in result.stdout) == (1, True)


def test_an_import_of_no_archive_says_so(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"x" * 2000)
    result = invoke("import", root, tmp_path / "a.tar")
    assert result.exit_code == 1
    assert "does not start as an uncompressed tar file does" in result.stderr
    assert "0 chunks were stored before that" in result.stderr


@pytest.mark.parametrize("command", ["stats", "list", "check", "clear"])
def test_a_missing_store_is_named_and_not_made(tmp_path: Path, command: str) -> None:
    result = invoke(command, tmp_path / "none", *(["--yes"] if command == "clear" else []))
    assert (result.exit_code, "does not exist" in result.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = invoke("stats", tmp_path / "file")
    assert (result.exit_code, "file" in result.stderr) == (2, True)


def test_json_alone_is_on_stdout(root: Path) -> None:
    result = invoke("check", root, "--json")
    assert len(result.stdout.splitlines()) == 1
