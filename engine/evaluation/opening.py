"""Opens a model for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvblend.engine.assembly import assemble_engine
from kvblend.engine.attention.choose import choose_backend
from kvblend.engine.config import ModelConfig
from kvblend.engine.evaluation.chunk_kv import KeptForms
from kvblend.engine.evaluation.examiner import Examiner
from kvblend.engine.evaluation.methods import Run
from kvblend.engine.loaders.load import LoadedModel


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """An examiner, and what it computes with."""

    examiner: Examiner
    fingerprint: str
    attention: str
    threads: int
    torch_version: str


def open_model(
    path: Path,
    dtype: str,
    device: str,
    threads: int,
    runs: Sequence[Run],
    clock: Callable[[], float],
    passages: Sequence[tuple[str, str]] = (),
    store_dtype: str = "",
    kept: Callable[[str], KeptForms] | None = None,
) -> OpenedModel:
    """Load the model at `path`; `threads` 0 leaves torch's own choice, `clock` gives seconds,
    `passages` are texts of the corpus, `store_dtype` names the form of stored chunks (see `Examiner`). `kept` has forms
    of chunks of the model with a fingerprint.

    Raises BadSelection, before any weight is read, where a run names a layer that the model lacks; else what
    `assemble_engine` raises.
    """

    def check(config: ModelConfig) -> None:
        for run in runs:
            if run.spec is not None:
                run.spec.check_model(config.num_layers)

    engine = assemble_engine(path, dtype, device, "auto", 0, threads, check)
    model = engine.runner.model
    backend, _ = choose_backend("auto", model.device, model.dtype)
    loaded = LoadedModel(model, engine.tokenizer, engine.template, engine.fingerprint)
    forms = None if kept is None else kept(engine.fingerprint)
    examiner = Examiner(loaded, backend, clock, passages, store_dtype, forms)
    return OpenedModel(examiner, engine.fingerprint, engine.attention, torch.get_num_threads(), torch.__version__)
