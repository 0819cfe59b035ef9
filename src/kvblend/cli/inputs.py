"""What the user gave, checked: text files and settings."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvblend.cli.failures import BadInput


def read_texts(files: Sequence[Path]) -> list[str]:
    """The contents of UTF-8 text files; BadInput names the file that is missing, empty or not UTF-8."""
    return [read_text(file) for file in files]


def read_text(file: Path) -> str:
    """The contents of a UTF-8 text file; see `read_texts`."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is not valid UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from error
    if not text.strip():
        raise BadInput(f"{file} is empty")
    return text


def read_blend(items: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` options of `blend`; several values stand between commas. BadInput for an unknown or second name."""
    from kvblend.actors.messages import SelectionOptions

    out: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if name not in SelectionOptions.names() or not equals:
            raise BadInput(f"--blend {item}: give NAME=VALUE; names: {', '.join(SelectionOptions.names())}")
        if name in out:
            raise BadInput(f"--blend {name} is given twice")
        values = tuple(_number_or_text(part.strip()) for part in text.split(","))
        single = len(values) == 1 and (name not in _LISTS or isinstance(values[0], str))
        out[name] = values[0] if single else values
    return out


_LISTS = ("check_layers", "recompute_ratios", "thresholds", "score_layers")


def read_ratio(text: str | None) -> float | str | None:
    """A ratio, or the word that was given in its place; whoever takes it says which words there are."""
    return None if text is None else _number_or_text(text)


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


NEIGHBOURS_MAX = 8


def read_condition_on(value: str | None) -> int:
    """How many neighbours `--condition-on neighbours:K` asks for, 0 where it is not given; BadInput for other forms."""
    if value is None:
        return 0
    kind, _, count = value.partition(":")
    if kind != "neighbours" or not count.isascii() or not count.isdigit() or not 1 <= int(count) <= NEIGHBOURS_MAX:
        raise BadInput(f"--condition-on is {value!r}; give neighbours:K with K in 1..{NEIGHBOURS_MAX}")
    return int(count)
