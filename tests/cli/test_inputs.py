from __future__ import annotations

from pathlib import Path

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings
from kvblend.cli.failures import BadInput
from kvblend.cli.inputs import make_settings, read_texts


def test_files_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(f"text {name} é", encoding="utf-8")
    assert read_texts([tmp_path / "b", tmp_path / "a"]) == ["text b é", "text a é"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"ab\xff", r"not valid UTF-8: byte 2 is 0xff"), (b" \n", "is empty"), (None, "cannot read")],
)
def test_what_cannot_be_used_names_the_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "notes.md"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        read_texts([file])
    assert "notes.md" in caught.value.message


def test_flags_that_were_not_given_keep_their_defaults() -> None:
    assert make_settings(recompute_ratio=None, salt="s") == Settings(salt="s")


def test_a_setting_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="recompute_ratio is 2"):
        make_settings(recompute_ratio=2.0)
