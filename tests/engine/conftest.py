"""Model files shared by the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import write_gguf
from model_files import CHATML, save_llama, tokenizer_json

from kvblend.engine.chat import ChatTemplate
from kvblend.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama in a Hugging Face directory; not to be changed."""
    return save_llama(tmp_path_factory.mktemp("llama"), tie_word_embeddings=True)


@pytest.fixture(scope="session")
def llama_gguf(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a float32 GGUF file; not to be changed."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama_dir)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False)


@pytest.fixture(scope="session")
def chatml() -> ChatTemplate:
    return ChatTemplate(CHATML, bos="<|im_start|>", eos="<|im_end|>")
