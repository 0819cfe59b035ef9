"""Puts a device's engine together: threads, weights, attention backend, KV pool. Call it in the device thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvblend.engine.attention.choose import BackendUnavailable, choose_backend
from kvblend.engine.capture import DTYPES
from kvblend.engine.chat import ChatTemplate
from kvblend.engine.config import ModelConfig
from kvblend.engine.kv import SlabPool
from kvblend.engine.loaders.load import load_model
from kvblend.engine.precision import Precision, store_fingerprint
from kvblend.engine.runner import Runner
from kvblend.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Engine:
    """All that belongs to one loaded model on one device. `attention` says which kernels run and why.

    `store_dtype` is the form of what it stores and loads; "": the compute dtype.
    """

    runner: Runner
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    fingerprint: str
    dtype: str
    attention: str
    store_dtype: str = ""

    @property
    def stored(self) -> str:
        """The name of the dtype that chunks are stored in."""
        return self.store_dtype or self.dtype

    @property
    def store_fingerprint(self) -> str:
        """What the store calls this model's chunks: those of another dtype have another name."""
        return store_fingerprint(self.fingerprint, self.dtype, self.stored)

    def storing(self, dtype: str) -> Engine:
        """The same engine with another form of stored chunks, before it runs anything; for the device thread.

        ValueError for an unknown dtype or one wider than the compute dtype.
        """
        self.runner.precision = Precision.of_model(self.runner.model, dtype)
        return replace(self, store_dtype=dtype)


def assemble_engine(
    path: Path,
    dtype: str,
    device: str,
    attention: str,
    kv_tokens_max: int,
    threads: int,
    check: Callable[[ModelConfig], None] | None = None,
) -> Engine:
    """Load the model at `path`. `threads` 0 leaves torch's own choice (the physical cores).

    `check` may refuse the model's shape before its weights are read.

    Raises BadModelFile, UnsupportedModel, BackendUnavailable, or ValueError for a dtype or device that does not exist.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose {', '.join(DTYPES)}")
    where = _device(device)
    if threads:
        torch.set_num_threads(threads)
    backend, line = choose_backend(attention, where, DTYPES[dtype])
    loaded = load_model(path, DTYPES[dtype], where, check)
    pool = SlabPool(loaded.model.config, kv_tokens_max, DTYPES[dtype], where)
    runner = Runner(loaded.model, backend, pool)
    return Engine(runner, loaded.model.config, loaded.tokenizer, loaded.template, loaded.fingerprint, dtype, line)


def count_threads() -> int:
    """How many threads torch computes with on the CPU."""
    return torch.get_num_threads()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is not a device torch knows") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(f"device {name!r} was asked for; torch sees no CUDA device here; available: cpu")
    return device
