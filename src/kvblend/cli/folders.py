"""Where the command line keeps its files: the user's cache folder, `$XDG_CACHE_HOME` honoured."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of everything kvblend may fetch or compute again (not created here)."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG rules tell programs to ignore a relative value
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "kvblend"


def models_folder() -> Path:
    """Where pulled models lie."""
    return cache_folder() / "models"


def default_store_folder() -> Path:
    """Where chunks are stored when no `--store` is given."""
    return cache_folder() / "store"
