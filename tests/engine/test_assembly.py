"""A device's engine from a model file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvblend.engine.assembly import assemble_engine, count_threads
from kvblend.engine.attention.choose import BackendUnavailable, choose_backend
from kvblend.engine.kv import pages_of


def test_an_engine_has_everything_of_its_model(llama_dir: Path) -> None:
    engine = assemble_engine(llama_dir, "float32", "cpu", "auto", 512, 0)
    assert engine.config.num_layers == 3
    assert engine.runner.model.dtype is torch.float32
    assert engine.runner.pool.tokens_max == 512
    assert engine.attention == choose_backend("auto", torch.device("cpu"), torch.float32)[1]
    assert engine.fingerprint


def test_both_kinds_of_file_of_one_model_give_the_same_ids(llama_dir: Path, llama_gguf: Path) -> None:
    one, other = (assemble_engine(path, "float32", "cpu", "sdpa", 64, 0) for path in (llama_dir, llama_gguf))
    ids = one.tokenizer.encode("the river and the mill", special=False)
    assert other.tokenizer.encode("the river and the mill", special=False) == ids


def test_the_number_of_threads_is_set(llama_dir: Path) -> None:
    before = torch.get_num_threads()
    try:
        assemble_engine(llama_dir, "float32", "cpu", "sdpa", 64, before + 1)
        assert count_threads() == torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_the_dtype_of_the_model_is_that_asked_for(llama_dir: Path) -> None:
    engine = assemble_engine(llama_dir, "bfloat16", "cpu", "sdpa", 64, 0)
    assert (engine.runner.model.dtype, engine.dtype) == (torch.bfloat16, "bfloat16")
    assert pages_of(engine.runner.pool.tokens_max) == 4


def test_an_engine_stores_as_it_computes_until_another_form_is_chosen(llama_dir: Path) -> None:
    engine = assemble_engine(llama_dir, "float32", "cpu", "sdpa", 64, 0)
    assert (engine.stored, engine.store_fingerprint) == ("float32", engine.fingerprint)
    narrow = engine.storing("int8")
    assert (narrow.stored, narrow.fingerprint) == ("int8", engine.fingerprint)
    assert narrow.store_fingerprint == f"{engine.fingerprint}:int8"
    assert narrow.runner.precision.name == "int8"
    with pytest.raises(ValueError, match="store_dtype is 'int3'"):
        engine.storing("int3")


@pytest.mark.parametrize(("dtype", "device"), [("int3", "cpu"), ("float32", "abacus")])
def test_what_does_not_exist_is_refused_by_name(llama_dir: Path, dtype: str, device: str) -> None:
    with pytest.raises(ValueError, match=r"int3|abacus"):
        assemble_engine(llama_dir, dtype, device, "auto", 64, 0)


def test_a_device_that_is_not_there_is_refused(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="cuda"):
        assemble_engine(llama_dir, "float32", "cuda", "auto", 64, 0)


def test_a_kernel_that_is_not_there_is_refused(llama_dir: Path) -> None:
    with pytest.raises(BackendUnavailable):
        assemble_engine(llama_dir, "float32", "cpu", "xformers", 64, 0)
