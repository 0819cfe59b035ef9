"""What the user gave, checked: text files and settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvblend.cli.failures import BadInput

if TYPE_CHECKING:
    from kvblend.actors.settings import Settings


def read_texts(files: Sequence[Path]) -> list[str]:
    """The contents of UTF-8 text files; BadInput names the file that is missing, empty or not UTF-8."""
    return [_read_text(file) for file in files]


def _read_text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is not valid UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from error
    if not text.strip():
        raise BadInput(f"{file} is empty")
    return text


def make_settings(**flags: Any) -> Settings:
    """Settings from the flags that were given (None: not given). RequestError names a value out of range."""
    from kvblend.actors.settings import Settings

    return Settings(**{name: value for name, value in flags.items() if value is not None})
