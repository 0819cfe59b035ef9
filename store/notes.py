"""Small JSON files beside the chunks: what was found out once about the folder's model. Everything here blocks."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from kvblend.store.files import sync_folder, write_whole

log = logging.getLogger("kvblend.store")
NOTE_BYTES_MAX = 1 << 20
_NAME = re.compile(r"[a-z][a-z-]{0,30}")


def note_path(root: Path, name: str) -> Path:
    """Where a note lies. ValueError for a name that is not lower-case letters and hyphens."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name is {name!r}; it must be 1..31 lower-case letters and hyphens")
    return root / f"kvblend-{name}.json"


def read_note(root: Path, name: str) -> dict[str, Any]:
    """The note's fields; empty where there is none. One that cannot be used is as good as none, with a warning."""
    path = note_path(root, name)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            raw = file.read(NOTE_BYTES_MAX + 1)
        fields = json.loads(raw) if len(raw) <= NOTE_BYTES_MAX else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be used and is ignored: %s", path, error)
        return {}
    if not isinstance(fields, dict):
        log.warning("%s cannot be used and is ignored: it is no JSON object of at most 1 MiB", path)
        return {}
    return fields


def write_note(root: Path, name: str, fields: dict[str, Any]) -> None:
    """Replace a note, durably and as a whole. Raises OSError, and ValueError for what JSON cannot hold."""
    path = note_path(root, name)
    temp = path.with_suffix(".json.tmp")
    write_whole(temp, [json.dumps(fields, allow_nan=False).encode()])
    os.replace(temp, path)
    sync_folder(root)
