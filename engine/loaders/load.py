"""Opens a model, whatever its format: a Hugging Face directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3

from kvblend.engine.chat import ChatTemplate
from kvblend.engine.config import BadModelFile, ModelConfig
from kvblend.engine.fingerprint import model_fingerprint
from kvblend.engine.loaders.gguf import open_gguf
from kvblend.engine.loaders.hf import open_directory
from kvblend.engine.loaders.source import ModelSource
from kvblend.engine.model import Model
from kvblend.engine.tokenizer import Tokenizer
from kvblend.engine.weights import build_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run with everything that belongs to it. `fingerprint` is part of every chunk's key."""

    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate
    fingerprint: str


def load_model(
    path: Path, dtype: torch.dtype, device: torch.device, check: Callable[[ModelConfig], None] | None = None
) -> LoadedModel:
    """Load the model at `path` with its weights in `dtype` on `device`.

    `check` sees the model's shape before any weight is read; what it raises ends the loading.
    Raises BadModelFile (nothing there, damaged, incomplete) or UnsupportedModel (readable, but of a kind this engine
    does not have); both name the file and the field or tensor.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    with _open(path) as source:
        config, tokenizer = source.config, source.tokenizer
        if check is not None:
            check(config)
        if tokenizer.vocab_size > config.vocab_size:
            raise BadModelFile(
                f"{path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, "
                f"the embedding has {config.vocab_size} rows"
            )
        for token_id in config.eos_ids:
            if not 0 <= token_id < config.vocab_size:
                raise BadModelFile(f"{path}: the eos token is {token_id}; ids lie in 0..{config.vocab_size - 1}")
        # a template that cannot be used is found here, not by the first request
        source.template.split("system", [("user", "question")])
        digests = [digest_file(file) for file in source.files]
        weights = build_weights(config, source.read, dtype, device)
    fingerprint = model_fingerprint(config, digests, tokenizer.digest)
    return LoadedModel(Model(config, weights), tokenizer, source.template, fingerprint)


def digest_file(path: Path) -> bytes:
    """BLAKE3 of a file's bytes (32 bytes), computed on all cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).digest()


def _open(path: Path) -> AbstractContextManager[ModelSource]:
    accepted = "a model is a Hugging Face directory (config.json, *.safetensors, tokenizer.json) or a .gguf file"
    if path.is_dir():
        return open_directory(path)
    if not path.exists():
        raise BadModelFile(f"{path} does not exist; {accepted}")
    if not path.is_file() or path.suffix.lower() != ".gguf":
        raise BadModelFile(f"{path} is not a model; {accepted}")
    return open_gguf(path)
