"""A tiny model on disk for the tests of the whole system."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import save_llama


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=4, max_position_embeddings=2048)
