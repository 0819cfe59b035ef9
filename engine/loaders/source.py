"""What a loader hands over, whatever the file format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvblend.engine.chat import ChatTemplate
from kvblend.engine.config import ModelConfig
from kvblend.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An opened model: everything but the weights is here, those come through `read` under Hugging Face names.

    `read(name)` gives a tensor of the file's own values that shares no memory with the file. `files` hold the weights,
    in the order they are hashed.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    files: tuple[Path, ...]
    read: Callable[[str], torch.Tensor]
