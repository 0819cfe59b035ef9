from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvblend.cli.config.files import FileEntry, read_entries
from kvblend.cli.failures import BadInput


def write(folder: Path, name: str, text: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_toml_has_values_and_lines(tmp_path: Path) -> None:
    file = write(
        tmp_path, "a.toml", '# first\nthreads = 2\n\n"gate" = "off"\ncheck_layers = [\n1,\n2]\n[other]\nx = 1\n'
    )
    assert read_entries(file) == [
        FileEntry("threads", 2, 2),
        FileEntry("gate", "off", 4),
        FileEntry("check_layers", [1, 2], 5),
        FileEntry("other", {"x": 1}, 8),
    ]


@pytest.mark.parametrize("suffix", ["yaml", "yml", "YAML"])
def test_yaml_has_values_and_lines(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path, f"a.{suffix}", "# first\nthreads: 2\n\nstore: null\ncheck_layers:\n  - 1\n  - 2\n")
    assert read_entries(file) == [
        FileEntry("threads", 2, 2),
        FileEntry("store", None, 4),
        FileEntry("check_layers", [1, 2], 5),
    ]


def test_in_yaml_only_true_and_false_are_switches(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "gate: off\nforce_blend: true\nsalt: no\n")
    assert [entry.value for entry in read_entries(file)] == ["off", True, "no"]


@pytest.mark.parametrize("name", ["a.toml", "a.yaml"])
def test_an_empty_file_sets_nothing(tmp_path: Path, name: str) -> None:
    assert read_entries(write(tmp_path, name, "\n# nothing\n")) == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.ini", "x=1", "must end in .toml, .yaml or .yml"),
        ("a.toml", "x = = 1", "is not valid TOML"),
        ("a.toml", "x = 1\nx = 2", "is not valid TOML"),
        ("a.yaml", "x: [1", "is not valid YAML"),
        ("a.yaml", "x: 1\nx: 2\n", "line 2: x is given twice, first in line 1"),
        ("a.yaml", "- 1\n", "line 1: must be a table"),
        ("a.yaml", "x: !!python/object:os.system {}\n", "is not valid YAML"),
        ("a.yaml", "x: 2026-99-99\n", "is not valid YAML"),
        ("a.yaml", "x: 1\n---\ny: 2\n", "is not valid YAML"),
        ("a.toml", b"x = '\xff'", "is not valid UTF-8: byte 5"),
        ("a.toml", b"#" * (1 << 20) + b"#", "the limit is 1048576"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, name: str, text: str | bytes, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_entries(write(tmp_path, name, text))
    assert said in caught.value.message
    assert name in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read configuration file"):
        read_entries(tmp_path / "none.toml")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.one_of(st.binary(max_size=80), st.text(alphabet="ab:[]{}-\n \"'=.,#!&*|>1", max_size=80)))
@pytest.mark.parametrize("name", ["a.toml", "a.yaml"])
def test_anything_is_entries_or_one_error(tmp_path: Path, name: str, data: bytes | str) -> None:
    try:
        found = read_entries(write(tmp_path, name, data))
    except BadInput:
        return
    assert all(isinstance(entry.name, str) for entry in found)
