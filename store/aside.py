"""The folder of damaged files: kept for whoever wants to look at them, bounded, the oldest leave. Everything blocks."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("kvblend.store")

FILES_MAX = 64
BYTES_MAX = 256 << 20
BUDGET_SHARE = 16
"""With a budget of the store's folder, damaged files have at most this part of it: one sixteenth."""


class Aside(NamedTuple):
    """How many damaged files there are, and their bytes."""

    files: int = 0
    num_bytes: int = 0


NOTHING = Aside()


def aside_bytes_max(disk_bytes_budget: int | None) -> int:
    """How many bytes damaged files may have in a folder with this budget (None: none)."""
    return BYTES_MAX if disk_bytes_budget is None else min(BYTES_MAX, disk_bytes_budget // BUDGET_SHARE)


def trim_aside(folder: Path, bytes_max: int = BYTES_MAX, files_max: int = FILES_MAX) -> Aside:
    """Remove the files that were set aside longest ago, until those left keep both limits; what is left.

    A file that cannot be removed stays and counts; folders and links do not count. OSError where it cannot be listed,
    but nothing for one that is not there, and, with a warning, for what is no folder or a link to one.
    """
    files = _list(folder)
    left = _sum(files)
    for _, size, path in files:
        if left.files <= files_max and left.num_bytes <= bytes_max:
            break
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            left = Aside(left.files - 1, left.num_bytes - size)
    return left


def count_aside(folder: Path) -> Aside:
    """What lies there now. OSError as for `trim_aside`."""
    return _sum(_list(folder))


def _sum(files: list[tuple[int, int, Path]]) -> Aside:
    return Aside(len(files), sum(size for _, size, _ in files))


def _list(folder: Path) -> list[tuple[int, int, Path]]:
    """Time of the last change (ns), size and path of each regular file, oldest first.

    A rename counts as a change of a file, so that is when it came here.
    """
    found: list[tuple[int, int, Path]] = []
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            log.warning("%s is not a folder of its own: it is left alone, and no damaged file is kept there", folder)
            return []
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        found.append((about.st_ctime_ns, about.st_size, folder / entry.name))
    except FileNotFoundError:
        return []
    return sorted(found)
