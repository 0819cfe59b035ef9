"""Makes a file importable under a name: test folders are no packages under pytest's importlib mode."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def load_beside(file: Path, name: str) -> None:
    """Import `file` as the module `name`, once."""
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
