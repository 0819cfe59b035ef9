from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvblend.api.server.keys import KeyRing
from kvblend.cli.failures import BadInput
from kvblend.cli.key_file import add_key, read_key_file, remove_key, rotate_key


def test_a_key_that_was_added_opens_and_is_not_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "keys.toml"
    tenant, key = add_key(file, "alice")
    assert KeyRing(read_key_file(file)).find(key) == tenant
    assert key not in file.read_text()


def test_the_file_is_its_owners_only(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    add_key(file, "alice")
    file.chmod(0o644)
    add_key(file, "bob")
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["keys.toml"]


def test_a_rotated_key_is_another_of_the_same_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    old, old_key = add_key(file, "alice")
    bob, _ = add_key(file, "bob")
    new, new_key = rotate_key(file, "alice")
    ring = KeyRing(read_key_file(file))
    assert (ring.find(old_key), ring.find(new_key), new.id) == (None, new, old.id)
    assert bob in ring


def test_a_removed_key_is_gone_and_its_name_is_a_new_tenant_later(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    old, key = add_key(file, "alice")
    bob, _ = add_key(file, "bob")
    assert remove_key(file, "alice") == old
    assert read_key_file(file) == [bob]
    assert KeyRing(read_key_file(file)).find(key) is None
    assert add_key(file, "alice")[0].id != old.id


def test_comments_and_other_lines_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    add_key(file, "alice")
    file.write_text(file.read_text() + "# bob = the one from Bonn")
    add_key(file, "bob")
    remove_key(file, "alice")
    assert "# bob = the one from Bonn\nbob = " in file.read_text()


def test_a_quoted_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    tenant, _ = add_key(file, "alice")
    file.write_text(f'"alice" {tenant.entry.removeprefix("alice ")}\n')
    remove_key(file, "alice")
    assert read_key_file(file) == []


def test_a_file_behind_a_link_is_written_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "keys.toml"
    link.symlink_to(tmp_path / "real" / "keys.toml")
    add_key(link, "alice")
    assert link.is_symlink()
    assert len(read_key_file(tmp_path / "real" / "keys.toml")) == 1


def test_bad_names_and_files_are_bad_input(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    with pytest.raises(BadInput, match="cannot be read"):
        read_key_file(file)
    with pytest.raises(BadInput, match=r"1\.\.64 letters"):
        add_key(file, "a b")
    assert not file.exists()
    add_key(file, "alice")
    before = file.read_text()
    with pytest.raises(BadInput, match="kvblend keys rotate alice"):
        add_key(file, "alice")
    for change in (remove_key, rotate_key):
        with pytest.raises(BadInput, match="no key called 'bob'"):
            change(file, "bob")
    assert file.read_text() == before
    file.write_text("alice = 'hunter2'")
    with pytest.raises(BadInput, match=r"keys.toml: entry 'alice'") as caught:
        add_key(file, "bob")
    assert "hunter2" not in caught.value.message


def test_a_folder_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be"):
        add_key(tmp_path / "file" / "keys.toml", "alice")
