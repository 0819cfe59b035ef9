from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.cli.kept_forms import FolderForms
from kvblend.engine.evaluation.chunk_kv import FormKey

KEY: FormKey = ("contrast", "float32", ((1, 2), (3,)), (4, 5))
LAYERS = [memoryview(b"first layer."), memoryview(b"second one..")]


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    FolderForms(tmp_path, "model").put(KEY, LAYERS)
    assert FolderForms(tmp_path, "model").get(KEY) == LAYERS


@pytest.mark.parametrize(
    "other",
    [
        ("plain", *KEY[1:]),
        (*KEY[:1], "int8", *KEY[2:]),
        (*KEY[:2], ((1,), (2, 3)), KEY[3]),
        (*KEY[:3], (5, 4)),
    ],
)
def test_another_form_is_not_there(tmp_path: Path, other: FormKey) -> None:
    FolderForms(tmp_path, "model").put(KEY, LAYERS)
    assert FolderForms(tmp_path, "model").get(other) is None


def test_another_model_has_forms_of_its_own(tmp_path: Path) -> None:
    FolderForms(tmp_path, "model").put(KEY, LAYERS)
    assert FolderForms(tmp_path, "other").get(KEY) is None


@given(place=st.integers(0, 200), cut=st.booleans())
def test_a_damaged_file_counts_as_missing(tmp_path_factory: pytest.TempPathFactory, place: int, cut: bool) -> None:
    folder = tmp_path_factory.mktemp("forms")
    FolderForms(folder, "model").put(KEY, LAYERS)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    place %= len(content)
    if cut:
        del content[place:]
    else:
        content[place] ^= 1
    path.write_bytes(content)
    assert FolderForms(folder, "model").get(KEY) is None


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        FolderForms(tmp_path, "model").put(KEY, LAYERS)
    assert not list(tmp_path.iterdir())
