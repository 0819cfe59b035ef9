from __future__ import annotations

from pathlib import Path

import pytest

from kvblend.engine.config import BadModelFile
from kvblend.engine.loaders.gguf_fields import Fields

FIELDS = Fields(Path("a.gguf"), {"m.layers": 3, "m.name": "x", "m.flag": True}, "m.")


def test_a_field_is_found_behind_the_prefix() -> None:
    assert FIELDS.need("layers", int) == 3


def test_a_whole_number_passes_for_a_float() -> None:
    assert FIELDS.need("layers", float) == 3.0


def test_a_missing_field_has_its_default() -> None:
    assert FIELDS.get("heads", int, 7) == 7


def test_a_missing_field_that_is_needed_is_named() -> None:
    with pytest.raises(BadModelFile, match=r"a\.gguf: the field m\.heads is missing"):
        FIELDS.need("heads", int)


@pytest.mark.parametrize(("name", "value"), [("name", "'x'"), ("flag", "True")])
def test_a_field_of_another_type_is_named(name: str, value: str) -> None:
    with pytest.raises(BadModelFile, match=rf"a\.gguf: the field m\.{name} is {value}; it must be of type int"):
        FIELDS.get(name, int, 0)
