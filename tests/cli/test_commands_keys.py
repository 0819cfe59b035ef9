from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvblend.api.server.keys import KeyRing
from kvblend.cli.app import app
from kvblend.cli.key_file import read_key_file
from kvblend.store.keys import tenant_tag


def keys(*words: str) -> Result:
    return CliRunner().invoke(app, ["keys", *words])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_key_is_printed_once(file: Path) -> None:
    made = keys("add", "alice", "--keys-file", str(file))
    listed = keys("list", "--keys-file", str(file))
    key = made.stdout.strip()
    assert KeyRing(read_key_file(file)).find(key) is not None
    assert (made.exit_code, made.stdout.count("\n"), made.stderr) == (0, 1, "")
    assert key not in listed.output
    assert listed.stdout.split()[1] == "alice"


def test_rotate_and_remove(file: Path) -> None:
    first = keys("add", "alice", "--keys-file", str(file)).stdout.strip()
    second = keys("rotate", "alice", "--keys-file", str(file)).stdout.strip()
    ring = KeyRing(read_key_file(file))
    assert (ring.find(first), ring.find(second) is None) == (None, False)
    assert keys("remove", "alice", "--keys-file", str(file)).exit_code == 0
    assert read_key_file(file) == []


def test_an_operator_stays_one(file: Path) -> None:
    for name, flags in (("watch", ("--operator",)), ("alice", ())):
        assert keys("add", name, *flags, "--keys-file", str(file)).exit_code == 0
    assert keys("rotate", "watch", "--keys-file", str(file)).exit_code == 0
    assert [tenant.operator for tenant in read_key_file(file)] == [True, False]
    assert [line.split()[1:] for line in keys("list", "--keys-file", str(file)).stdout.splitlines()] == [
        ["watch", "operator"],
        ["alice"],
    ]


def test_the_list_names_the_tag_of_the_tenants_chunks(file: Path) -> None:
    keys("add", "alice", "--keys-file", str(file))
    (tenant,) = read_key_file(file)
    for salt in ("", "s"):
        shown = json.loads(keys("list", "--json", "--keys-file", str(file), "--salt", salt).stdout)
        tag = tenant_tag(f"{salt}/tenant:{tenant.id}")
        assert shown == {"keys": [{"name": "alice", "tenant": tag, "operator": False}]}
    assert tenant_tag(f"/tenant:{tenant.id}") in keys("remove", "alice", "--keys-file", str(file)).stdout


def test_the_file_may_be_named_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_KEYS_FILE", str(file))
    assert keys("add", "alice").exit_code == 0
    assert file.exists()


def test_without_a_file_it_asks_for_one() -> None:
    result = keys("list")
    assert (result.exit_code, "--keys-file FILE" in result.stderr) == (2, True)


def test_a_bad_name_is_bad_input(file: Path) -> None:
    result = keys("add", "a b", "--keys-file", str(file))
    assert (result.exit_code, result.stderr.startswith("error: name is 'a b'")) == (2, True)
